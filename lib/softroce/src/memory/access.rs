//! Rights to memory, with the numbers of `ibv_access_flags`.

use std::ops::{BitOr, BitOrAssign};

/// A set of rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Access(u32);

impl Access {
    /// The RDMA device may read the memory for its own sends, which every region allows.
    pub const LOCAL_READ: Access = Access(0);
    /// The RDMA device may write to the memory: receives, and results of READs and atomics.
    pub const LOCAL_WRITE: Access = Access(1);
    /// A peer may write. Asks for `LOCAL_WRITE` as well.
    pub const REMOTE_WRITE: Access = Access(1 << 1);
    /// A peer may read.
    pub const REMOTE_READ: Access = Access(1 << 2);
    /// A peer may change words by atomic operations. Asks for `LOCAL_WRITE` as well.
    pub const REMOTE_ATOMIC: Access = Access(1 << 3);
    /// Windows may be bound to the memory.
    pub const MW_BIND: Access = Access(1 << 4);
    /// Addresses begin at 0.
    pub const ZERO_BASED: Access = Access(1 << 5);

    /// The set with the bits of `ibv_access_flags`. Bits without meaning here (on demand, huge pages, relaxed ordering)
    /// are hints and kept.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Access {
        Access(bits)
    }

    /// The bits of `ibv_access_flags`.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// All rights of `other` are in this set.
    #[must_use]
    pub const fn contains(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for Access {
    type Output = Access;

    fn bitor(self, other: Access) -> Access {
        Access(self.0 | other.0)
    }
}

impl BitOrAssign for Access {
    fn bitor_assign(&mut self, other: Access) {
        self.0 |= other.0;
    }
}
