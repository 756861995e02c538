//! Calls whose arguments are checked.
//!
//! | file | idea |
//! | --- | --- |
//! | `call` | a call, its stream, and its round |
//! | `messages` | messages of a call, sorted by peer |
//! | `buffers` | checks of device memory |

pub(crate) mod buffers;
pub(crate) mod call;
pub(crate) mod messages;
