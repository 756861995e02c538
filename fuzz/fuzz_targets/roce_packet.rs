//! See `softroce::fuzzing::roce_packet`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| softroce::fuzzing::roce_packet(data));
