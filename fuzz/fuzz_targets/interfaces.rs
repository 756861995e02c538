//! See `tinynccl::fuzzing::interfaces`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::interfaces(data));
