//! Threads that watch descriptors and serve those that are ready.
//!
//! A worker knows a descriptor by the key under which its owner registered it, and serves it through a trait: it
//! knows neither connections nor queue pairs.
//!
//! | file | idea |
//! |---|---|
//! | `pool` | all threads of a process: how many, how long they spin, and which one gets a stream |
//! | `thread` | one thread: its epoll, its tasks, and driving its progress inline |
//! | `service` | the trait of what a worker serves |
//! | `activity` | open requests of the process, for whose time the threads do not sleep |
//! | `contention` | detection of spinning threads that share a core |

pub(super) mod activity;
pub(super) mod contention;
pub(super) mod pool;
pub(super) mod service;
pub(super) mod thread;
