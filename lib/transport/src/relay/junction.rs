//! Two links of a relay, joined: what comes in on one goes out on the other, message by message.

use super::notice;
use crate::{Interest, LinkPair};
use tinynccl_plan::error::Error;

/// Messages of one direction that are moved before another junction is served.
const BATCH: usize = 32;

/// Event that a direction waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waits {
    Nothing,
    Message,
    Room,
}

/// State of a direction.
#[derive(Debug, PartialEq, Eq)]
enum Flow {
    /// Messages go on.
    Open,
    /// The receiver of the messages is gone: they are thrown away.
    Void,
    /// No more messages will come, and the receiver is to be sent this reason.
    Notice(String),
    /// The receiver has been notified, or is gone too.
    Done,
}

/// Outcome of one step of a direction.
enum Step {
    /// A message was forwarded, or thrown away.
    Went,
    /// From now on it is in another state.
    Become(Flow),
    Wait(Waits),
    /// The junction is of no more use.
    Break(String),
}

/// Counts of what was moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Something changed.
    pub(crate) any: bool,
    /// Messages that went on.
    pub(crate) messages: u64,
    /// Their payload in bytes.
    pub(crate) bytes: u64,
}

/// Ranks of the relay and of the ends, for notices.
#[derive(Debug, Clone, Copy)]
struct Names {
    relay: usize,
    ends: [usize; 2],
}

impl Names {
    #[cold]
    fn say(&self, what: &str) -> String {
        let Names { relay, ends: [low, high] } = self;
        format!("rank {relay} of the world, which relays between its ranks {low} and {high}, {what}")
    }

    /// Returns the text for the other end when `error` ended one side.
    #[cold]
    fn reason(&self, error: &Error) -> String {
        match error {
            Error::PeerLost { peer, address, detail, .. } => {
                self.say(&format!("lost rank {peer} ({address}): {detail}"))
            }
            other => self.say(&format!("cannot go on: {other}")),
        }
    }
}

/// Two joined links.
#[derive(Debug)]
pub(crate) struct Junction {
    names: Names,
    /// Towards each of the ends.
    links: [LinkPair; 2],
    /// A link that takes nothing any more.
    dead: [bool; 2],
    /// From link 0 to link 1, and back.
    flows: [Flow; 2],
    waits: [Waits; 2],
    max_message: usize,
}

impl Junction {
    /// Joins the links of rank `relay` towards the two `ends`. Messages of both links have at most `max_message` bytes.
    pub(crate) fn new(relay: usize, ends: [usize; 2], links: [LinkPair; 2], max_message: usize) -> Junction {
        Junction {
            names: Names { relay, ends },
            links,
            dead: [false; 2],
            flows: [Flow::Open, Flow::Open],
            waits: [Waits::Nothing; 2],
            max_message,
        }
    }

    /// The ranks at both ends.
    pub(crate) fn ends(&self) -> [usize; 2] {
        self.names.ends
    }

    /// Moves what can be moved without blocking.
    pub(crate) fn advance(&mut self) -> Moved {
        let mut moved = Moved::default();
        for direction in [0, 1] {
            let mut turns = 0..BATCH;
            while turns.next().is_some() && self.step(direction, &mut moved) {
                moved.any = true;
            }
        }
        for (link, dead) in self.links.iter_mut().zip(&mut self.dead) {
            if !link.send.is_flushed() && !*dead {
                match link.send.progress() {
                    Ok(progress) => moved.any |= progress,
                    Err(_) => *dead = true,
                }
            }
        }
        moved
    }

    /// One message of a direction, or one change of its state; false when it has to wait.
    fn step(&mut self, direction: usize, moved: &mut Moved) -> bool {
        let names = self.names;
        let [low, high] = &mut self.links;
        let [low_dead, high_dead] = &mut self.dead;
        let (from, to, to_dead) = if direction == 0 { (low, high, high_dead) } else { (high, low, low_dead) };
        let Some(flow) = self.flows.get_mut(direction) else { return false };
        let step = match flow {
            Flow::Done => Step::Wait(Waits::Nothing),
            Flow::Notice(text) => {
                let (header, payload) = notice::new(text, self.max_message);
                match to.send.send_from(&header, &payload) {
                    Ok(false) => Step::Wait(Waits::Room),
                    Ok(true) => Step::Become(Flow::Done),
                    Err(_) => {
                        *to_dead = true;
                        Step::Become(Flow::Done)
                    }
                }
            }
            Flow::Open => match from.recv.peek() {
                Ok(None) => Step::Wait(Waits::Message),
                Ok(Some((header, payload))) => match to.send.send_from(&header, payload) {
                    Ok(false) => Step::Wait(Waits::Room),
                    Ok(true) => {
                        // Another relay's notice is no message of the ends.
                        if !notice::is_one(&header) {
                            moved.messages += 1;
                            moved.bytes += payload.len() as u64;
                        }
                        free(from, names)
                    }
                    Err(Error::PeerLost { .. }) => {
                        *to_dead = true;
                        Step::Become(Flow::Void)
                    }
                    Err(e) => Step::Break(names.reason(&e)),
                },
                Err(e @ Error::PeerLost { .. }) => Step::Become(Flow::Notice(names.reason(&e))),
                Err(e) => Step::Break(names.reason(&e)),
            },
            Flow::Void => match from.recv.peek() {
                Ok(None) => Step::Wait(Waits::Message),
                Ok(Some(_)) => free(from, names),
                Err(_) => Step::Become(Flow::Done),
            },
        };
        let mut waits = Waits::Nothing;
        let goes_on = match step {
            Step::Went => true,
            Step::Become(next) => {
                *flow = next;
                true
            }
            Step::Wait(what) => {
                waits = what;
                false
            }
            Step::Break(reason) => {
                self.end(&reason);
                true
            }
        };
        if let Some(slot) = self.waits.get_mut(direction) {
            *slot = waits;
        }
        goes_on
    }

    /// Makes both directions end with a notice of `reason`; messages that have not gone on by now do not.
    fn end(&mut self, reason: &str) {
        for flow in self.flows.iter_mut().filter(|flow| matches!(flow, Flow::Open | Flow::Void)) {
            *flow = Flow::Notice(reason.to_owned());
        }
    }

    /// Notifies both ends that the relay leaves.
    pub(crate) fn leave(&mut self) {
        self.end(&self.names.say("closed its communicator and left"));
    }

    /// Returns true once nothing is left to do: the end that is still there has been notified that the other one is
    /// gone.
    pub(crate) fn is_over(&self) -> bool {
        let told = |(direction, flow): (usize, &Flow)| match flow {
            Flow::Done => {
                let to = 1 - direction;
                let dead = self.dead.get(to) == Some(&true);
                Some(dead || self.links.get(to).is_none_or(|link| link.send.is_flushed()))
            }
            Flow::Notice(_) => Some(false),
            // Its receiver is gone, or its sender is about to be notified that everything is over.
            Flow::Open | Flow::Void => None,
        };
        let mut told = self.flows.iter().enumerate().filter_map(told).peekable();
        told.peek().is_some() && told.all(|told| told)
    }

    /// Asks every half that is waited for to wake the thread; true when one is ready.
    pub(crate) fn arm(&mut self, interests: &mut Vec<Interest>) -> bool {
        let mut ready = false;
        self.awaited(|half| {
            // An error is one that the next step gives, too.
            let (armed, interest) = match half {
                Half::Recv(recv) => (recv.recv.arm(), recv.recv.interest()),
                Half::Send(send) => (send.send.arm(), send.send.interest()),
            };
            ready |= armed.unwrap_or(true);
            interests.push(interest);
        });
        ready
    }

    /// Takes [`Junction::arm`] back, and looks after the peers when the thread has slept.
    pub(crate) fn disarm(&mut self, slept: bool) {
        self.awaited(|half| {
            // A loss is known to the half from now on.
            let _ = match half {
                Half::Recv(link) => {
                    link.recv.disarm();
                    if slept { link.recv.check_peer() } else { Ok(()) }
                }
                Half::Send(link) => {
                    link.send.disarm();
                    if slept { link.send.check_peer() } else { Ok(()) }
                }
            };
        });
    }

    /// The halves that this junction waits for.
    fn awaited(&mut self, mut f: impl FnMut(Half<'_>)) {
        let waits = self.waits;
        for (index, link) in self.links.iter_mut().enumerate() {
            // Direction `index` comes from this link, the other one goes to it.
            if waits.get(index) == Some(&Waits::Message) {
                f(Half::Recv(link));
            }
            let unflushed = !link.send.is_flushed() && self.dead.get(index) == Some(&false);
            if waits.get(1 - index) == Some(&Waits::Room) || unflushed {
                f(Half::Send(link));
            }
        }
    }
}

/// A link, and which of its halves is meant.
enum Half<'a> {
    Recv(&'a mut LinkPair),
    Send(&'a mut LinkPair),
}

/// Frees the oldest message of a link.
fn free(from: &mut LinkPair, names: Names) -> Step {
    match from.recv.release() {
        Ok(()) => Step::Went,
        Err(e) => Step::Break(names.reason(&e)),
    }
}
