//! libibverbs' C interface over `softroce`: a `libibverbs.so.1` that unchanged programs load. The functions are those
//! of `softroce-verbs`; this library gives them the names and versions that programs are linked to.

mod exports;
mod objects;
mod system;
