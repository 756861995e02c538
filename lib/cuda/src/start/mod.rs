//! Creation of a communicator: which path its data take.
//!
//! | file | idea |
//! | --- | --- |
//! | `setup` | ranks exchange what they have, and agree on a path |
//! | `path_check` | a pattern through the peers' memory, compared, before a path is trusted |
//! | `divided` | several hosts: a communicator inside each, and lanes between |
//! | `alone` | the path of one rank |

pub(crate) mod alone;
mod divided;
pub(crate) mod path_check;
pub(crate) mod setup;
