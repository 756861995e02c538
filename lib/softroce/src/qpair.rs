//! Queue pairs as programs have them.

use std::fmt;
use std::sync::Arc;

use crate::context::{LIMITS, Pd};
use crate::engine::Cell;
use crate::error::{Error, Result};
use crate::qp::{AttrMask, Capacity, Machine, Parts, QpAttr};
use crate::queue::event::Events;
use crate::queue::{Affected, Cq, RecvRequest, SendRequest, Srq};
use crate::sync::read;
use crate::wire::Service;

/// Parameters of a new queue pair.
#[derive(Debug, Clone)]
pub struct QpInit {
    /// Transport service.
    pub service: Service,
    /// Sizes of its queues and requests.
    pub capacity: Capacity,
    /// True if every send gives a completion, signaled or not.
    pub signal_all: bool,
    /// Completions of sends.
    pub send_cq: Arc<Cq>,
    /// Completions of receives.
    pub recv_cq: Arc<Cq>,
    /// Shared receive queue that its receives come from; `None` for its own.
    pub srq: Option<Arc<Srq>>,
}

/// A queue pair. Dropping it destroys it: packets for it are dropped, and its completions are taken out of the queues.
pub struct Qp {
    qpn: u32,
    cell: Arc<Cell>,
    init: QpInit,
    pd: Arc<Pd>,
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("init", &self.init).finish_non_exhaustive()
    }
}

impl Pd {
    /// A queue pair in RESET.
    ///
    /// # Errors
    /// `EINVAL` for more than in [`LIMITS`], `ENOMEM` where the RDMA device has no more queue pairs.
    pub fn create_qp(self: &Arc<Pd>, init: &QpInit) -> Result<Arc<Qp>> {
        self.context.check_here()?;
        let Capacity { sends, recvs, send_sges, recv_sges, inline } = init.capacity;
        let fits = sends <= LIMITS.work_requests
            && recvs <= LIMITS.work_requests
            && send_sges <= LIMITS.sges
            && recv_sges <= LIMITS.sges
            && inline <= LIMITS.inline;
        if !fits {
            return Err(Error::invalid(format!("{:?} is more than the card takes: {LIMITS:?}", init.capacity)));
        }
        Qp::new(self, init, &self.context.events)
    }
}

impl Qp {
    pub(crate) fn new(pd: &Arc<Pd>, init: &QpInit, events: &Arc<Events>) -> Result<Arc<Qp>> {
        let shared = &pd.context.engine.shared;
        let mtu = pd.context.port().active_mtu;
        let (qpn, cell) = shared.add(|qpn| {
            Machine::new(Parts {
                qpn,
                pd: pd.id,
                service: init.service,
                mtu,
                capacity: init.capacity,
                signal_all: init.signal_all,
                send_cq: init.send_cq.clone(),
                recv_cq: init.recv_cq.clone(),
                srq: init.srq.clone(),
                events: events.clone(),
            })
        })?;
        Ok(Arc::new(Qp { qpn, cell, init: init.clone(), pd: pd.clone() }))
    }

    /// Its number, by which the peer addresses it.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.qpn
    }

    /// The parameters with which it was created.
    #[must_use]
    pub fn init(&self) -> &QpInit {
        &self.init
    }

    /// The protection domain.
    #[must_use]
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Changes the attributes in `mask`.
    ///
    /// # Errors
    /// `EINVAL` where the state has no such change, an attribute is missing, is not taken, or is out of its range.
    pub fn modify(&self, attr: &QpAttr, mask: AttrMask) -> Result<()> {
        self.check_here()?;
        self.cell.modify(&self.pd.context.engine.shared, |machine| machine.modify(attr, mask))
    }

    /// Its attributes; `state` and `cur_state` are the state. In a forked child those of a new queue pair.
    #[must_use]
    pub fn query(&self) -> QpAttr {
        if self.check_here().is_err() {
            return QpAttr::default();
        }
        self.cell.with(|machine| machine.attr.clone())
    }

    /// Fails with `EINVAL` in a child of the process that made it, before a lock is taken or a packet sent.
    fn check_here(&self) -> Result<()> {
        self.pd.context.check_here()
    }

    /// Posts requests to the send queue, in order, and sends what can be sent. From any thread.
    ///
    /// # Errors
    /// The index of the request that was refused, and why; those before it are posted. `EINVAL` for a request that the
    /// queue pair does not take in this state, `ENOMEM` where the queue is full.
    ///
    /// # Safety
    /// Memory of the requests is registered under the keys that they name and stays so, unchanged where it is sent and
    /// not looked at where an answer goes, until they complete. That of inline requests is readable until the call
    /// returns.
    pub unsafe fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, crate::Error)> {
        self.check_here().map_err(|e| (0, e))?;
        self.cell.act(&self.pd.context.engine.shared, |machine| {
            requests.iter().enumerate().try_for_each(|(i, request)| machine.post_send(request).map_err(|e| (i, e)))
        })
    }

    /// Posts requests to the send queue, in order, or none of them where one is refused. From any thread.
    ///
    /// # Errors
    /// As [`Qp::post_send`].
    ///
    /// # Safety
    /// As [`Qp::post_send`].
    pub unsafe fn post_send_all(&self, requests: &[SendRequest<'_>]) -> Result<(), (usize, crate::Error)> {
        self.check_here().map_err(|e| (0, e))?;
        self.cell.act(&self.pd.context.engine.shared, |machine| machine.post_send_all(requests))
    }

    /// Posts receives. From any thread.
    ///
    /// # Errors
    /// The index of the receive that was refused, and why; those before it are posted.
    ///
    /// # Safety
    /// Memory of the receives is registered under the keys that they name and stays so, and is not looked at, until
    /// they complete.
    pub unsafe fn post_recv(&self, requests: &[RecvRequest<'_>]) -> Result<(), (usize, crate::Error)> {
        self.check_here().map_err(|e| (0, e))?;
        self.cell.with(|machine| {
            requests.iter().enumerate().try_for_each(|(i, request)| machine.post_recv(request).map_err(|e| (i, e)))
        })
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // A child of `fork` sends nothing in its parent's name.
        if self.check_here().is_err() {
            return;
        }
        let engine = &self.pd.context.engine;
        self.cell.hurry(&engine.shared);
        engine.shared.remove(self.qpn);
        // A thread that still works with it, works with a queue pair in RESET, which is allowed from every state.
        let _ = self.cell.with(|machine| machine.modify(&QpAttr::default(), AttrMask::STATE));
        read(&engine.shared.memory).forget_qp(self.qpn);
        self.pd.context.events.forget(Affected::Qp(self.qpn));
    }
}
