//! `NCCL_DEBUG`: the library's log in NCCL's form.

use std::sync::Once;

/// Before anything else happens: the log is set up, once.
pub(crate) fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {});
}
