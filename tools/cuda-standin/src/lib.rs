//! A stand-in for `libcuda.so.1`, CUDA's driver, without a GPU and without kernels. For tests alone.
//!
//! A test puts [`folder`] into `LD_LIBRARY_PATH` of a process. What that process enqueues on streams then really
//! happens, in the order that CUDA promises: copies, memory operations, host functions, events, graphs. So device
//! communicators work on a machine without a GPU, on the path that needs no kernels. A program that has not been
//! started so never loads it, and the device's name shows what it is.
//!
//! | file | idea |
//! | --- | --- |
//! | `calls`, `errors`, `handles` | how a C function becomes a Rust function and back |
//! | `device`, `context` | devices without access to each other; contexts, and the current one of each thread |
//! | `memory` | allocations, attributes of pointers, copies, pools |
//! | `stream`, `work` | a thread per stream, and what it does |
//! | `stream_calls`, `memory_operations`, `event` | what is enqueued |
//! | `capture`, `graph` | lists of the same work |
//! | `absent` | functions that answer `CUDA_ERROR_NOT_SUPPORTED` |
//! | `nvml` | the management library's list of devices and NVLinks: `libnvidia-ml.so.1` is this library, too |
//! | `place` | the folder of the built library |
//!
//! # What is as with a GPU
//! - Device memory is not the program's: a program that reads or writes it itself dies, as it would there.
//! - Pageable memory is read before a copy from it returns, and written before a copy to it returns.
//! - A stream takes 1024 operations, then the caller waits. Freeing memory waits for the context's streams.
//! - Errors of an operation appear in later calls of its context, which is lost.
//!
//! # What is not
//! - No kernels: modules cannot be loaded. No access between devices and none between processes.
//! - Streams never wait for each other because they share a hardware queue.
//! - A graph runs its operations one after the other, in the order of their capture.
//! - A wait of a stream that lasts longer than `TINYNCCL_STANDIN_PATIENCE` seconds (300) ends in
//!   `CUDA_ERROR_LAUNCH_TIMEOUT`, so that a test that fails ends too.
//! - Work after freed memory is found out only if the memory was freed before the work began.
//!
//! `TINYNCCL_STANDIN_DEVICES` is the number of devices (2), `TINYNCCL_STANDIN_MEMORY` the MiB of each (16384, not taken
//! before they are used). `CUDA_VISIBLE_DEVICES` works, by numbers.
#![allow(non_snake_case, reason = "CUDA's names")]

#[macro_use]
mod calls;
mod absent;
mod capture;
mod context;
mod device;
mod errors;
mod event;
mod graph;
mod handles;
mod memory;
mod memory_operations;
mod nvml;
mod place;
mod settings;
mod stream;
mod stream_calls;
mod work;

pub use place::folder;
