//! Calls whose arguments are checked.
//!
//! | file | idea |
//! | --- | --- |
//! | `call` | a call, its stream, and its round |
//! | `messages` | messages of a call, sorted by peer |
//! | `buffers` | checks of device memory |

pub(in crate::cuda) mod buffers;
pub(in crate::cuda) mod call;
pub(in crate::cuda) mod messages;
