//! Processes of a test, and handles as lines between them.

pub(crate) use program_kit::again::{Process, hear, role, say, start};

use super::api::Handle;

pub(crate) fn hex(handle: &Handle) -> String {
    handle.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Handle {
    let bytes: Vec<u8> = (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect();
    bytes.try_into().expect("a handle")
}
