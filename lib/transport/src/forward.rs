//! Forwarding of calls from a link that wraps another one to that one.

/// Methods of [`SendLink`](super::SendLink) or [`RecvLink`](super::RecvLink) that go to `self.inner` as they are.
macro_rules! forward {
    ($($method:ident),+) => { $(forward!(@ $method);)+ };
    (@ peer) => { fn peer(&self) -> &Peer { self.inner.peer() } };
    (@ expect_more) => { fn expect_more(&mut self) { self.inner.expect_more() } };
    (@ sends_from_caller) => {
        fn sends_from_caller(&self, bytes: usize) -> bool { self.inner.sends_from_caller(bytes) }
    };
    (@ shows_in_place) => { fn shows_in_place(&self) -> bool { self.inner.shows_in_place() } };
    (@ is_flushed) => { fn is_flushed(&self) -> bool { self.inner.is_flushed() } };
    (@ progress) => { fn progress(&mut self) -> Result<bool> { self.inner.progress() } };
    (@ check_peer) => { fn check_peer(&mut self) -> Result<()> { self.inner.check_peer() } };
    (@ arm) => { fn arm(&mut self) -> Result<bool> { self.inner.arm() } };
    (@ disarm) => { fn disarm(&mut self) { self.inner.disarm() } };
    (@ bytes_moved) => { fn bytes_moved(&self) -> u64 { self.inner.bytes_moved() } };
    (@ interest) => { fn interest(&self) -> Interest { self.inner.interest() } };
}
