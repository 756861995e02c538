//! Links of limited speed: each rank has a network card that carries one byte after the other, in each direction, as a
//! host has one on a switch. Threads of a process, which share memory, then take the time that hosts would.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::{Interest, LinkPair, Peer, Received, RecvLink};
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Header;
use tinynccl_sys::threads::lock;

/// The longest sleep on a link that keeps its message back.
const LOOK: Duration = Duration::from_micros(100);

/// The cards of all ranks.
#[derive(Debug)]
pub struct Cards {
    bytes_per_second: f64,
    /// By rank: until when it sends, and until when it receives what was promised so far.
    busy: Mutex<Vec<[Option<Instant>; 2]>>,
}

impl Cards {
    /// Cards for `ranks` ranks, of this speed in each direction. A speed that is not above 0 is no limit.
    pub fn new(ranks: usize, bytes_per_second: f64) -> Arc<Cards> {
        Arc::new(Cards { bytes_per_second, busy: Mutex::new(vec![[None; 2]; ranks]) })
    }

    /// Returns the time at which a message of `bytes` that is there at `now` has come through both cards, which are
    /// busy until then.
    fn book(&self, from: usize, to: usize, bytes: usize, now: Instant) -> Instant {
        let takes = Duration::try_from_secs_f64(bytes as f64 / self.bytes_per_second).unwrap_or_default();
        let mut busy = lock(&self.busy);
        let of = |rank: usize, way: usize| busy.get(rank).and_then(|card| card[way]);
        let begin = [of(from, 0), of(to, 1)].into_iter().flatten().fold(now, Instant::max);
        let end = begin + takes;
        for (rank, way) in [(from, 0), (to, 1)] {
            if let Some(card) = busy.get_mut(rank) {
                card[way] = Some(end);
            }
        }
        end
    }
}

/// Wraps the pair with which `rank` talks to `peer`: what comes from there comes at the speed of the cards.
pub fn wrap(pair: LinkPair, cards: &Arc<Cards>, rank: usize, peer: usize) -> LinkPair {
    let recv = PacedRecv { inner: pair.recv, cards: cards.clone(), from: peer, to: rank, due: None, held: false };
    LinkPair { recv: Box::new(recv), any_length: false, ..pair }
}

#[derive(Debug)]
struct PacedRecv {
    inner: Box<dyn RecvLink>,
    cards: Arc<Cards>,
    from: usize,
    to: usize,
    /// Time at which the message that lies in the link below is here; `None` while none has been seen there.
    due: Option<Instant>,
    /// The last "not now" came from here, not from below: no one will ring for it.
    held: bool,
}

impl PacedRecv {
    /// Returns true if a message is here.
    fn ready(&mut self) -> Result<bool> {
        self.held = false;
        let due = match (self.due, self.inner.peek()?) {
            (Some(due), _) => due,
            (None, None) => return Ok(false),
            (None, Some((header, _))) => {
                self.cards.book(self.from, self.to, Header::BYTES + header.len as usize, Instant::now())
            }
        };
        self.due = Some(due);
        self.held = Instant::now() < due;
        Ok(!self.held)
    }
}

impl RecvLink for PacedRecv {
    forward!(peer, disarm, bytes_moved, progress, check_peer, interest);

    fn arm(&mut self) -> Result<bool> {
        if self.held {
            // Leaves the core to the other ranks meanwhile; other links of this rank are looked at soon.
            let left = self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
            std::thread::sleep(left.min(LOOK));
        }
        Ok(self.inner.arm()? || self.held)
    }

    fn peek(&mut self) -> Result<Option<(Header, &[u8])>> {
        if self.ready()? { self.inner.peek() } else { Ok(None) }
    }

    fn release(&mut self) -> Result<()> {
        self.due = None;
        self.inner.release()
    }

    fn recv_into(&mut self, expected: &Header, dst: &mut [u8]) -> Result<Received> {
        if !self.ready()? {
            return Ok(Received::Pending);
        }
        let received = self.inner.recv_into(expected, dst)?;
        if received == Received::Done {
            self.due = None;
        }
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_carries_one_message_after_the_other_each_way() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let cards = Cards::new(4, 10.0);
        // All to rank 0: its card receives them one after the other.
        assert_eq!([1, 2, 3].map(|from| cards.book(from, 0, 20, now)), [2, 4, 6].map(after));
        // Rank 0 sends meanwhile, and so do ranks round a ring at once.
        assert_eq!(cards.book(0, 1, 10, now), after(1));
        assert_eq!(cards.book(0, 2, 10, now), after(2));
        let ring = Cards::new(3, 10.0);
        assert_eq!([(0, 1), (1, 2), (2, 0)].map(|(from, to)| ring.book(from, to, 50, now)), [after(5); 3]);
        assert_eq!(Cards::new(2, 0.0).book(0, 1, 50, now), now, "no limit");
    }
}
