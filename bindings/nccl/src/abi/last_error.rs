//! `ncclGetLastError`: the text of the last failure, of a communicator, of this thread, of this process.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

thread_local! {
    static HERE: RefCell<Option<String>> = const { RefCell::new(None) };
    /// Text that [`last`] returned to this thread, valid until the thread's next call of it.
    static GIVEN: RefCell<CString> = RefCell::new(CString::default());
}

/// The last failure of any thread: a watchdog reads those of other threads.
static ANYWHERE: Mutex<Option<String>> = Mutex::new(None);

/// Keeps the text of a failure of this thread.
pub(crate) fn keep(text: String) {
    anywhere(&text);
    // It is gone when the thread ends.
    let _ = HERE.try_with(|here| here.replace(Some(text)));
}

/// Keeps the text of a failure in the background, which no thread of the program has seen.
pub(crate) fn anywhere(text: &str) {
    *ANYWHERE.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
}

/// Returns the last failure's text: `of_comm`, that of a communicator, else of this thread, else of the process; empty
/// if there is none. Valid until this thread's next call.
pub(crate) fn last(of_comm: Option<String>) -> *const c_char {
    let text = of_comm
        .or_else(|| HERE.try_with(|here| here.borrow().clone()).ok().flatten())
        .or_else(|| ANYWHERE.lock().unwrap_or_else(PoisonError::into_inner).clone());
    let text = CString::new(text.unwrap_or_default().replace('\0', " ")).unwrap_or_default();
    let given = GIVEN.try_with(|given| {
        given.replace(text);
        given.borrow().as_ptr()
    });
    given.unwrap_or(c"".as_ptr())
}
