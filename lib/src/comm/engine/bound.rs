//! A call together with its memory: all that the engine needs to run it.

use crate::Call;
use crate::executor::{Buffers, Transfers};

/// A checked call and its memory.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) call: Call,
    pub(crate) buffers: Buffers,
    /// Set if each pair of ranks has its own length; the call then has no count.
    pub(in crate::comm) transfers: Option<Box<Transfers>>,
}

impl std::ops::Deref for Bound {
    type Target = Call;
    #[inline]
    fn deref(&self) -> &Call {
        &self.call
    }
}

// SAFETY: the pointers are used by one thread at a time, while the caller keeps the memory alive and untouched.
unsafe impl Send for Bound {}

impl Bound {
    /// A call whose ranks have equal lengths.
    #[inline]
    pub(crate) fn new(call: Call, buffers: Buffers) -> Bound {
        Bound { call, buffers, transfers: None }
    }
}
