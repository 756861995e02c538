//! Asynchronous events, with the numbers of `ibv_event_type` (InfiniBand specification, 11.6.3).

use super::mailbox::Mailbox;

/// Kind of an asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum EventKind {
    /// A completion queue overran.
    CqError = 0,
    /// A queue pair failed without a completion to report it.
    QpFatal = 1,
    /// A peer's request broke the protocol.
    QpRequestError = 2,
    /// A peer requested memory that it may not touch.
    QpAccessError = 3,
    /// The first packet came to a queue pair in RTR.
    CommEstablished = 4,
    /// All that was posted before SQD is done.
    SqDrained = 5,
    /// The device is gone.
    DeviceFatal = 8,
    /// The port's interface is up.
    PortActive = 9,
    /// The port's interface is down.
    PortError = 10,
    /// A shared receive queue failed.
    SrqError = 14,
    /// A shared receive queue has fewer receives than its limit.
    SrqLimitReached = 15,
    /// A failed queue pair takes nothing more from its shared receive queue.
    LastWqeReached = 16,
    /// The port's table of GIDs changed.
    GidChange = 18,
}

/// Object that an asynchronous event concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Affected {
    /// The queue pair with this number.
    Qp(u32),
    /// The completion queue with this cookie.
    Cq(u64),
    /// The shared receive queue with this cookie.
    Srq(u64),
    /// The port with this number.
    Port(u8),
}

/// An asynchronous event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Kind of the event.
    pub kind: EventKind,
    /// Object that the event concerns.
    pub affected: Affected,
}

/// The events of a context.
pub(crate) type Events = Mailbox<AsyncEvent>;

impl Events {
    pub(crate) fn report(&self, kind: EventKind, affected: Affected) {
        self.push(AsyncEvent { kind, affected });
    }

    /// Drops the events of something that goes: a number may name another one soon.
    pub(crate) fn forget(&self, affected: Affected) {
        self.retain(|event| event.affected != affected);
    }
}
