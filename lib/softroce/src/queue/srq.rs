//! Shared receive queues: receives that several queue pairs take from (InfiniBand specification, 10.2.9).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::event::{Affected, EventKind, Events};
use super::request::{RecvRequest, RecvWqe};
use crate::error::{Error, Result};
use crate::fork::Origin;
use crate::sync::lock;

#[derive(Debug)]
struct Inner {
    queue: VecDeque<RecvWqe>,
    capacity: usize,
    /// Fewer receives than this are reported, once; 0 is never.
    limit: usize,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    inner: Mutex<Inner>,
    pd: u32,
    max_sge: usize,
    cookie: u64,
    events: Option<Arc<Events>>,
    origin: Origin,
}

impl Srq {
    pub(crate) fn new(pd: u32, capacity: usize, max_sge: usize, cookie: u64, events: Option<Arc<Events>>) -> Arc<Srq> {
        let inner = Mutex::new(Inner { queue: VecDeque::new(), capacity, limit: 0 });
        Arc::new(Srq { inner, pd, max_sge, cookie, events, origin: Origin::here() })
    }

    /// The cookie that the program gave when it created the queue.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    pub(crate) fn pd(&self) -> u32 {
        self.pd
    }

    /// Receives it holds at most, elements in each, and the limit that is armed.
    #[must_use]
    pub fn query(&self) -> (usize, usize, usize) {
        let inner = lock(&self.inner);
        (inner.capacity, self.max_sge, inner.limit)
    }

    /// Asks for one [`EventKind::SrqLimitReached`] when fewer than `limit` receives are left.
    ///
    /// # Errors
    /// `EINVAL` for a limit that is more than the capacity.
    pub fn set_limit(&self, limit: usize) -> Result<()> {
        self.origin.check()?;
        let mut inner = lock(&self.inner);
        if limit > inner.capacity {
            return Err(Error::invalid("the limit is more than the shared receive queue's capacity"));
        }
        inner.limit = limit;
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// `ENOMEM` where the queue is full, `EINVAL` for more elements than it was made for.
    ///
    /// # Safety
    /// The memory stays registered, and is not touched, until the receive has completed.
    pub unsafe fn post_recv(&self, request: &RecvRequest<'_>) -> Result<()> {
        self.origin.check()?;
        if request.sges.len() > self.max_sge {
            return Err(Error::invalid("more scatter-gather elements than the shared receive queue was made for"));
        }
        let mut inner = lock(&self.inner);
        if inner.queue.len() >= inner.capacity {
            return Err(Error::full("the shared receive queue is full"));
        }
        inner.queue.push_back(RecvWqe::new(request));
        Ok(())
    }

    pub(crate) fn take(&self) -> Option<RecvWqe> {
        let mut inner = lock(&self.inner);
        let wqe = inner.queue.pop_front();
        if inner.queue.len() < inner.limit {
            inner.limit = 0;
            drop(inner);
            if let Some(events) = &self.events {
                events.report(EventKind::SrqLimitReached, Affected::Srq(self.cookie));
            }
        }
        wqe
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        if let Some(events) = self.events.as_ref().filter(|_| self.origin.is_here()) {
            events.forget(Affected::Srq(self.cookie));
        }
    }
}
