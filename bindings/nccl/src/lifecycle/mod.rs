//! Begin and end of communicators.
//!
//! Each of these operations is a job of `submit`, because it waits for other ranks.
//!
//! | file | idea |
//! | --- | --- |
//! | `split` | communicators from communicators: split, shrink, grow |
//! | `init` | communicators by id |
//! | `start` | steps that all ways of making a communicator share |
//! | `finalize` | finalize, destroy, abort, revoke |

pub(crate) mod finalize;
pub(crate) mod init;
pub(crate) mod split;
pub(crate) mod start;
