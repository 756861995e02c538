//! Threads that read and write sockets.
//!
//! | file | idea |
//! |---|---|
//! | `pool` | all threads of a process: how many, how long they spin, and which one gets a stream |
//! | `thread` | one thread: its epoll, its tasks, and driving its progress inline |
//! | `contention` | detection of spinning threads that share a core |

pub(super) mod contention;
pub(super) mod pool;
pub(super) mod thread;
