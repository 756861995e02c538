//! The forms of a call that users see. The [`table`] lists the collectives once; blocking, asynchronous and grouped
//! forms expand from it.

mod asynchronous;
mod checked;
mod collectives;
pub(crate) mod group;
pub mod memory;
pub(crate) mod p2p;
pub(crate) mod persistent;
mod program;
mod raw;
pub mod table;
pub(crate) mod uneven;
pub(crate) mod work;
