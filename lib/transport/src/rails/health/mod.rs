//! Health of the rails of connections that have several: which streams stall, and when one is failed over.
//!
//! | file | idea |
//! |---|---|
//! | `monitor` | the thread that checks all streams, and the evidence against one |
//! | `watch` | connections that a thread looks at until they end |

pub(super) mod monitor;
pub(super) mod watch;
