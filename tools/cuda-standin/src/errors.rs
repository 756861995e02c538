//! Errors, and their names.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::sync::{LazyLock, Mutex};

use cudarc::driver::sys::CUresult;

use crate::calls::{Answer, lock, put};

pub(crate) fn result(answer: Answer) -> CUresult {
    answer.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

/// Strings that a program may keep forever, one of each text.
fn kept(text: String) -> &'static CStr {
    static KEPT: LazyLock<Mutex<HashMap<String, &'static CStr>>> = LazyLock::new(Mutex::default);
    lock(&KEPT).entry(text).or_insert_with_key(|text| {
        let text = CString::new(text.as_str()).unwrap_or_default();
        Box::leak(text.into_boxed_c_str())
    })
}

/// `CUDA_ERROR_INVALID_VALUE`.
fn name(error: CUresult) -> String {
    format!("{error:?}")
}

/// `invalid value`.
fn text(error: CUresult) -> String {
    let name = name(error);
    let words = name.trim_start_matches("CUDA_ERROR_").trim_start_matches("CUDA_");
    format!("{} (of the stand-in)", words.to_lowercase().replace('_', " "))
}

calls! {
    fn cuGetErrorName(error: CUresult, to: *mut *const c_char) { put(to, kept(name(error)).as_ptr()) }

    fn cuGetErrorString(error: CUresult, to: *mut *const c_char) { put(to, kept(text(error)).as_ptr()) }
}
