//! The C interface as programs see it: types and functions of the header, the symbols of the library, and what happens
//! when they are called. Calls run over a stand-in for CUDA's driver, so they need no GPU: `client/mod.rs`. `audit` tests
//! the library beside it (`bindings/nccl/audit`).

mod audit;
mod client;
mod exports;
mod header;
