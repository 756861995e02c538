//! Work requests as programs post them.

use std::sync::Arc;

use crate::memory::Bind;
use crate::path::Path;

/// Registered memory of ours: a scatter-gather element, laid out as `ibv_sge`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address of the first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The region's local key.
    pub lkey: u32,
}

/// Registered memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Address of the first byte.
    pub addr: u64,
    /// The region's remote key.
    pub rkey: u32,
}

/// An operation of a send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// A SEND into a posted receive.
    Send,
    /// A SEND with immediate data, in network byte order.
    SendImm([u8; 4]),
    /// A SEND that invalidates this key of the peer.
    SendInv(u32),
    /// A WRITE into the peer's memory.
    Write(Remote),
    /// A WRITE with immediate data, with which a posted receive completes.
    WriteImm(Remote, [u8; 4]),
    /// A READ of the peer's memory.
    Read(Remote),
    /// Stores `swap` if the peer's word is `compare`; the old word comes back.
    CompareSwap {
        /// The word, 8 bytes, aligned.
        remote: Remote,
        /// Value that the word must have.
        compare: u64,
        /// Value that is stored then.
        swap: u64,
    },
    /// Adds to the peer's word; the old word comes back.
    FetchAdd {
        /// The word, 8 bytes, aligned.
        remote: Remote,
        /// Value that is added, wrapping.
        add: u64,
    },
    /// Binds a memory window of ours.
    Bind(Bind),
    /// Invalidates a remote key of ours: of a window of [`crate::WindowKind::OneQp`] or of a region.
    LocalInv(u32),
}

/// Flags of a send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendFlags {
    /// True if success gives a completion; an error always does.
    pub signaled: bool,
    /// True if the receiver's completion is a solicited one.
    pub solicited: bool,
    /// True if the request waits until all READs and atomics that were posted earlier are done.
    pub fence: bool,
    /// True if the bytes are copied when they are posted; their memory need not be registered.
    pub inline: bool,
}

/// Destination of a datagram.
#[derive(Debug, Clone)]
pub struct Datagram {
    /// The path to the receiver.
    pub path: Arc<Path>,
    /// The receiving queue pair.
    pub qpn: u32,
    /// Its key; with the top bit set the sender's own is sent (10.2.5).
    pub qkey: u32,
}

/// A request for a send queue.
#[derive(Debug, Clone)]
pub struct SendRequest<'a> {
    /// Number that comes back in the completion.
    pub id: u64,
    /// Operation to execute.
    pub op: SendOp,
    /// Our memory.
    pub sges: &'a [Sge],
    /// Flags of the request.
    pub flags: SendFlags,
    /// The receiver, of UD only.
    pub to: Option<Datagram>,
}

/// A request for a receive queue.
#[derive(Debug, Clone, Copy)]
pub struct RecvRequest<'a> {
    /// Number that comes back in the completion.
    pub id: u64,
    /// Memory that the message goes to.
    pub sges: &'a [Sge],
}

/// A posted list of elements; most have few, which takes no allocation.
#[derive(Debug, Clone)]
pub(crate) enum SgeList {
    Few([Sge; 2], u8),
    Many(Box<[Sge]>),
}

impl SgeList {
    pub(crate) fn new(sges: &[Sge]) -> SgeList {
        let mut few = [Sge::default(); 2];
        match few.get_mut(..sges.len()) {
            Some(place) => {
                place.copy_from_slice(sges);
                SgeList::Few(few, sges.len() as u8)
            }
            None => SgeList::Many(sges.into()),
        }
    }

    pub(crate) fn as_slice(&self) -> &[Sge] {
        match self {
            SgeList::Few(few, n) => few.get(..usize::from(*n)).unwrap_or_default(),
            SgeList::Many(all) => all,
        }
    }

    /// All bytes.
    pub(crate) fn len(&self) -> u64 {
        self.as_slice().iter().map(|s| u64::from(s.len)).sum()
    }
}

/// A posted receive.
#[derive(Debug, Clone)]
pub(crate) struct RecvWqe {
    pub(crate) id: u64,
    pub(crate) sges: SgeList,
}

impl RecvWqe {
    pub(crate) fn new(request: &RecvRequest<'_>) -> RecvWqe {
        RecvWqe { id: request.id, sges: SgeList::new(request.sges) }
    }
}
