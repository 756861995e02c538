//! A rank at the store: joining, its session, and what it hears of the other ranks.
//!
//! | file | idea |
//! | --- | --- |
//! | `join` | from an address to an admitted connection |
//! | `session` | the connection of a rank with the store, as long as the job |
//! | `resume` | the same session over another connection, after a path failed |
//! | `mailbox` | values and events that came, for the threads that wait for them |
//! | `monitor` | the thread that reads the connection and sends heartbeats |
//! | `rendezvous` | a rank's position in the job, from its environment |

pub(in crate::bootstrap) mod join;
pub(in crate::bootstrap) mod mailbox;
pub(in crate::bootstrap) mod monitor;
pub(in crate::bootstrap) mod rendezvous;
pub(in crate::bootstrap) mod resume;
pub mod session;
