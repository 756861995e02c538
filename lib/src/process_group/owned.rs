//! Buffers that an asynchronous call owns until it is complete.

use super::buffer::{Buffer, BufferMut};
use tinynccl_comm::{Persistent, SymmetricBuffer};
use tinynccl_plan::dtype::Element;

/// A buffer that a call can own until it completes: those of [`Comm`](tinynccl_comm::Comm)'s asynchronous calls,
/// `OnDevice`, and `()` for ranks without an input or output.
pub trait Owned: Send + 'static {
    /// To read from.
    fn input(&self) -> Buffer<'_>;
    /// To write to.
    fn output(&mut self) -> BufferMut<'_>;
}

macro_rules! in_host_memory {
    ($($buffer:ident)*) => { $(
        impl<T: Element> Owned for $buffer<T> {
            fn input(&self) -> Buffer<'_> {
                Buffer::from(&**self)
            }
            fn output(&mut self) -> BufferMut<'_> {
                BufferMut::from(&mut **self)
            }
        }
    )* };
}
in_host_memory!(Vec Persistent SymmetricBuffer);

impl Owned for () {
    fn input(&self) -> Buffer<'_> {
        Buffer::none()
    }
    fn output(&mut self) -> BufferMut<'_> {
        BufferMut::none()
    }
}
