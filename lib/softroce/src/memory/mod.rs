//! Registered memory and the rights to it (InfiniBand specification, 10.6, 10.7).
//!
//! Every access of the RDMA device goes through `Table::check` or, for a peer's, `Table::remote`: key, protection
//! domain, rights and bounds are looked at before a pointer exists, so a packet of an unauthenticated sender reaches
//! registered bytes with the right key or none. The table is read-locked while a device works with pointers it gave
//! out, and deregistration takes the write lock: once that returns, the device does not touch the memory any more.

mod access;
mod copy;
mod dmabuf;
mod gpu;
mod mapped;
mod table;
mod window;

pub use access::Access;
pub(crate) use copy::{Piece, atomic, copy_in, copy_out};
pub(crate) use dmabuf::{Mapping, is_dmabuf};
pub(crate) use gpu::GpuMemory;
pub(crate) use mapped::{begin_turn, is_accessible};
pub(crate) use table::{Backing, MAX_REGIONS, Region, Table};
pub(crate) use window::{Asker, MAX_WINDOWS};
pub use window::{Bind, WindowKind};

/// Reason why an access is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("no region or window has the key {0:#x}")]
    Key(u32),
    #[error("the region or window is of another protection domain")]
    Domain,
    #[error("the region or window does not give the right")]
    Rights,
    #[error("the bytes are not within the region or window")]
    Bounds,
    #[error("the program has unmapped the bytes")]
    Unmapped,
    #[error("the window is bound already")]
    Bound,
    #[error("CUDA's driver does not copy to or from the GPU's memory: code {0}")]
    Gpu(i32),
}
