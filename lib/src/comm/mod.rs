//! Communicators: collectives, point to point, groups, asynchronous work.
