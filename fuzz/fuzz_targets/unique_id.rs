//! See `tinynccl::fuzzing::unique_id`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::unique_id(data));
