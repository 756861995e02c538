//! See `tinynccl::fuzzing::handshake`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::handshake(data));
