//! State of a connection that its streams, its requests and its owner share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rails::data::control::Outbox;
use crate::rails::data::frame::Frame;
use crate::rails::data::request::{Requests, Status};
use crate::rails::worker::activity::Activity;
use tinynccl_plan::error::Error;

/// Properties of the paths to the peer.
#[derive(Debug, Clone, Copy)]
pub(in crate::rails) struct Paths {
    /// True if there is more than one: fragments are acknowledged, and those of a lost stream go over others.
    pub(in crate::rails) several: bool,
    /// True if the paths lead through other nodes, which the connection's name lists.
    pub(in crate::rails) relayed: bool,
}

/// State of a connection that its streams, its requests and its owner share.
#[derive(Debug)]
pub(in crate::rails) struct Session {
    pub(in crate::rails) name: String,
    receives: bool,
    pub(in crate::rails) requests: Requests,
    pub(in crate::rails) paths: Paths,
    closed: AtomicBool,
    /// Control frames about streams for the peer; any other stream may carry them.
    pub(in crate::rails) outbox: Outbox,
}

impl Session {
    pub(in crate::rails) fn new(name: String, receives: bool, paths: Paths, activity: &Arc<Activity>) -> Session {
        let (requests, closed, outbox) = (Requests::new(activity), AtomicBool::new(false), Outbox::default());
        Session { name, receives, requests, paths, closed, outbox }
    }

    /// Marks the connection as closed: no thread reads or writes for it any more.
    pub(in crate::rails) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns true if several paths lead to the peer.
    #[inline]
    pub(in crate::rails) fn several(&self) -> bool {
        self.paths.several
    }

    /// Returns true if the paths to the peer lead through other nodes.
    pub(in crate::rails) fn relayed(&self) -> bool {
        self.paths.relayed
    }

    /// Advice for the reader of an error about a closed stream: the output to look at.
    pub(in crate::rails) fn advice(&self) -> &'static str {
        if self.relayed() {
            "look at the output of that rank and of the relays for the first error"
        } else {
            "look at that rank's output for the first error"
        }
    }

    pub(in crate::rails) fn name(&self) -> &str {
        &self.name
    }

    /// The connection's failure state, and the alarm that wakes its owner.
    pub(in crate::rails) fn status(&self) -> &Status {
        self.requests.status()
    }

    #[inline]
    pub(in crate::rails) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Returns true once the connection is closed or has failed.
    pub(in crate::rails) fn is_over(&self) -> bool {
        self.is_closed() || self.status().check().is_err()
    }

    pub(in crate::rails) fn error(&self, detail: String) -> Error {
        let op = if self.receives { "receive" } else { "send" };
        Error::Connection { op: op.to_owned(), connection: self.name.clone(), detail }
    }

    /// Takes the next control frame for the peer, if there is one.
    pub(in crate::rails) fn next_control(&self) -> Option<Frame> {
        self.outbox.take()
    }
}
