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
    /// Into a posted receive.
    Send,
    /// The same, with immediate data.
    SendImm([u8; 4]),
    /// The same, and the peer's key is invalidated.
    SendInv(u32),
    /// Into the peer's memory.
    Write(Remote),
    /// The same, and a posted receive completes with immediate data.
    WriteImm(Remote, [u8; 4]),
    /// Out of the peer's memory.
    Read(Remote),
    /// Stores `swap` if the peer's word is `compare`; the old word comes back.
    CompareSwap {
        /// The word, 8 bytes, aligned.
        remote: Remote,
        /// What must be there.
        compare: u64,
        /// What is stored then.
        swap: u64,
    },
    /// Adds to the peer's word; the old word comes back.
    FetchAdd {
        /// The word, 8 bytes, aligned.
        remote: Remote,
        /// What is added, wrapping.
        add: u64,
    },
    /// Binds a memory window of ours.
    Bind(Bind),
    /// Invalidates a remote key of ours: of a window of [`crate::WindowKind::OneQp`] or of a region.
    LocalInv(u32),
}

/// How a request is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SendFlags {
    /// A completion tells of success; of an error one always tells.
    pub signaled: bool,
    /// The receiver's completion is a solicited one.
    pub solicited: bool,
    /// Not before all READs and atomics that were posted earlier are done.
    pub fence: bool,
    /// The bytes are copied when they are posted; their memory need not be registered.
    pub inline: bool,
}

/// Where a datagram goes.
#[derive(Debug, Clone)]
pub struct Datagram {
    /// The way.
    pub path: Arc<Path>,
    /// The receiving queue pair.
    pub qpn: u32,
    /// Its key; with the top bit set the sender's own is sent (10.2.5).
    pub qkey: u32,
}

/// A request for a send queue.
#[derive(Debug, Clone)]
pub struct SendRequest<'a> {
    /// Comes back in the completion.
    pub id: u64,
    /// What to do.
    pub op: SendOp,
    /// Our memory.
    pub sges: &'a [Sge],
    /// How.
    pub flags: SendFlags,
    /// The receiver, of UD only.
    pub to: Option<Datagram>,
}

/// A request for a receive queue.
#[derive(Debug, Clone, Copy)]
pub struct RecvRequest<'a> {
    /// Comes back in the completion.
    pub id: u64,
    /// Where the message goes.
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
