//! Submission: operations are kept until a group ends, then run in threads and on streams.
//!
//! | file | idea |
//! | --- | --- |
//! | `group` | `ncclGroupStart`, `ncclGroupEnd`, and the group of a thread |
//! | `jobs` | operations that synchronise with other ranks, each communicator's in order |
//! | `launch` | calls, put onto streams |

pub(crate) mod group;
pub(crate) mod jobs;
pub(crate) mod launch;
