//! verbs.h over `softroce`: the structures and functions of libibverbs, in Rust, for programs that have no libibverbs.
//!
//! Names and field shapes are those of the crate `ibverbs-sys` (bindgen's), so the same source compiles against
//! either: `use softroce_verbs as ffi` here, `use ibverbs_sys as ffi` where the system's library is wanted.
//! `bindings/ibverbs` exports the functions to C programs, with the versions of their symbols.
//!
//! Each object that a program sees is the first part of one of ours, so a pointer to one is a pointer to the other. The
//! call that makes an object boxes it; the call that destroys it takes the box back. The layer is thin: `softroce`
//! defines what each call does.
//!
//! | module | idea |
//! | --- | --- |
//! | `constants` | numbers and bits |
//! | `types`, `extended` | structures, as C lays them out |
//! | `tables` | the tables of functions behind the inline calls of verbs.h |
//! | `device`, `context`, `memory`, `window`, `ah`, `srq`, `qp` | one kind of object each |
//! | `completion`, `cq`, `cq_ex` | a completion queue: its object, its calls, and reading it field by field |
//! | `post`, `wr` | requests, as a chain and built call by call |
//! | `open`, `query` | a device's table of calls, and what it says of itself |
//! | `named` | objects that events name stay until those are acknowledged |
//! | `uses` | objects that others are made of stay until those are destroyed |
//! | `names` | names of numbers, and calls that this RDMA device does not support |
//!
//! # Safety
//! Every function has the contract of its namesake in rdma-core's manual pages: pointers are valid objects of this
//! library, not used after they were destroyed, and memory that is registered or posted stays as long as verbs asks
//! for.

#![allow(non_camel_case_types, missing_docs, reason = "names and meanings are those of verbs.h")]
#![allow(clippy::missing_safety_doc, reason = "the contract of all is above")]

/// Structures of which zeros are a value (of a mutex and a condition: the one that their initializers have).
macro_rules! zeroed {
    ($($name:ident)*) => {$(
        impl Default for $name {
            fn default() -> $name {
                // SAFETY: integers, pointers, arrays and unions of them, for all of which zero is a value.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}

mod ah;
mod completion;
mod constants;
mod context;
mod cq;
mod cq_ex;
mod device;
mod extended;
mod memory;
mod named;
mod names;
mod open;
mod post;
mod qp;
mod query;
mod srq;
mod tables;
mod types;
mod uses;
mod window;
mod wr;

pub use ah::{ibv_create_ah, ibv_create_ah_from_wc, ibv_destroy_ah, ibv_init_ah_from_wc};
pub use constants::*;
pub use context::*;
pub use cq::*;
pub use device::*;
pub use extended::*;
pub use memory::*;
pub use names::*;
pub use open::*;
pub use qp::*;
pub use query::*;
pub use srq::*;
pub use tables::*;
pub use types::*;

use std::ffi::c_int;

/// Hands an object over to C.
fn give<T>(object: T) -> *mut T {
    Box::into_raw(Box::new(object))
}

/// Takes an object back.
///
/// # Safety
/// `give` made the pointer, and no one uses it after this.
unsafe fn take<T, C>(pointer: *mut C) -> Box<T> {
    // SAFETY: by the caller; the C structure is the first field of ours.
    unsafe { Box::from_raw(pointer.cast()) }
}

/// An error for a call that returns a pointer: null and `errno`.
fn null<T>(error: &softroce::Error) -> *mut T {
    log::info!("{error}");
    set_errno(error.errno());
    std::ptr::null_mut()
}

/// An error for a call that returns its number.
fn code(error: &softroce::Error) -> c_int {
    log::info!("{error}");
    set_errno(error.errno());
    error.errno()
}

fn set_errno(errno: c_int) {
    // SAFETY: a pointer to this thread's errno.
    unsafe { *libc::__errno_location() = errno };
}
