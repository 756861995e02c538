//! The C interface as C sees it: types and functions of the header, and the symbols of the library.

mod exports;
mod header;
