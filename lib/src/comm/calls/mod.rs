//! The forms of a call that users see. The [`table`] lists the collectives once; blocking, asynchronous and grouped
//! forms expand from it.

mod asynchronous;
mod checked;
mod collectives;
pub(in crate::comm) mod group;
pub(crate) mod memory;
pub(in crate::comm) mod p2p;
pub(in crate::comm) mod persistent;
mod program;
mod raw;
pub(crate) mod table;
pub(in crate::comm) mod uneven;
pub(in crate::comm) mod work;
