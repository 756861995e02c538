//! The process's environment as a source of settings.

use std::cell::RefCell;

use super::{HIDDEN, SECRET};
use tinynccl_plan::error::{Error, Result};

/// Reads variables of the process's environment, and remembers the first of them that is not text: such a setting must
/// not count as none, nor as equal to another one.
#[derive(Debug, Default)]
pub struct Environment {
    unreadable: RefCell<Option<Error>>,
}

impl Environment {
    /// The variable, if it is set.
    pub fn get(&self, name: &str) -> Option<String> {
        let value = std::env::var_os(name)?.into_string().unwrap_or_else(|bytes| {
            let text = bytes.to_string_lossy().into_owned();
            let shown = if name == SECRET { HIDDEN } else { &text };
            let error = Error::config(name, shown, "expected text in UTF-8");
            self.unreadable.borrow_mut().get_or_insert(error);
            text
        });
        Some(value)
    }

    /// Fails if a variable read so far is not text.
    ///
    /// # Errors
    /// [`Error::Config`] names a variable that was read and is not text.
    pub fn check(self) -> Result<()> {
        self.unreadable.into_inner().map_or(Ok(()), Err)
    }
}
