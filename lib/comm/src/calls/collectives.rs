//! Blocking collectives. Each checks its arguments, then hands pointers to the executor.
//!
//! `n` is the world size. Invalid lengths give [`Error::InvalidArgument`](tinynccl_plan::Error::InvalidArgument) before
//! anything is sent. Lengths that are valid here but differ from another rank's give
//! [`Error::Mismatch`](tinynccl_plan::Error::Mismatch) naming both.

use super::table::{asked, collectives};
use crate::Comm;
use tinynccl_plan::dtype::{Element, ReduceOp};
use tinynccl_plan::error::Result;

macro_rules! blocking {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        impl Comm {
            $(blocking! { @ $form $collective $arguments $name [$(#[$doc])*] })*

            /// No rank returns before all ranks have called.
            pub fn barrier(&self) -> Result<()> {
                self.inner.run(Ok(self.inner.barrier()))
            }
        }
    };
    (@ apart $collective:ident ($($arg:ident: $ty:ty),*) $name:ident [$($doc:tt)*]) => {
        $($doc)*
        pub fn $name<T: Element>(&self, input: &[T], output: &mut [T] $(, $arg: $ty)*) -> Result<()> {
            self.inner.run(self.inner.call(asked!($collective $(, $arg)*), input, output))
        }
    };
    (@ place $collective:ident ($($arg:ident: $ty:ty),*) $name:ident [$($doc:tt)*]) => {
        $($doc)*
        pub fn $name<T: Element>(&self, buffer: &mut [T] $(, $arg: $ty)*) -> Result<()> {
            self.inner.run(self.inner.call_in_place(asked!($collective $(, $arg)*), buffer))
        }
    };
}
collectives!(blocking);
