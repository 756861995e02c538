//! See `tinynccl::fuzzing::environment`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::environment(data));
