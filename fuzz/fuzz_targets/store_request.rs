//! See `tinynccl::fuzzing::store_request`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tinynccl::fuzzing::store_request(data));
