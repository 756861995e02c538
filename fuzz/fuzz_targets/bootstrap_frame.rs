//! See `tinynccl::fuzzing::bootstrap_frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::bootstrap_frame(data));
