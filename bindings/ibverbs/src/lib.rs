//! libibverbs' C interface over `softroce`: a `libibverbs.so.1` that unchanged programs load. The functions are those
//! of `softroce-verbs`; this library gives them the names and versions that programs are linked to.

#[macro_use]
mod symbol;

mod exports;
mod forwards;
mod objects;
mod slot;
mod system;
