//! See `tinynccl::fuzzing::tcp_frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::tcp_frame(data));
