//! See `softroce::fuzzing::roce_responder`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| softroce::fuzzing::roce_responder(data));
