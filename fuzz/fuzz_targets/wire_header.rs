//! See `tinynccl::fuzzing::wire_header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::wire_header(data));
