//! Records of the calls that each rank has made, by which ranks that disagree are found.
//!
//! | file | idea |
//! | --- | --- |
//! | `ring` | the last calls, with their times |
//! | `calls` | digests of calls, and the first difference |
//! | `messages` | messages between two ranks, which only records have |
//! | `progress` | positions of a rank in its calls |
//! | `comms` | the records of all ranks, by communicator |

pub(in crate::bootstrap) mod calls;
pub(in crate::bootstrap) mod comms;
pub(in crate::bootstrap) mod messages;
pub(in crate::bootstrap) mod progress;
pub(in crate::bootstrap) mod ring;
