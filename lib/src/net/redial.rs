//! Rails that were lost are dialed again. A path that does not answer is tried once in a while, however many
//! connections wait for it, so that it holds up no other one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Inner;
use super::dial::Redial;
use super::link::Link;
use super::ports::Way;
use super::rails::Up;
use super::stream::Stream;

/// Time before a lost rail is dialed, and longest time between two tries.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Time between two looks for something to dial.
pub(super) const LOOK: Duration = Duration::from_millis(500);
/// Time after which a path that lacks no stream is sound. One that answers and then carries nothing is tried less
/// often.
const SOUND: Duration = Duration::from_secs(1);

/// Time of the next try, and the pause after that if it fails.
struct Try {
    at: Instant,
    pause: Duration,
    /// Time since which no stream is missing; `None` while one is.
    whole: Option<Instant>,
}

impl Try {
    fn later() -> Try {
        Try { at: Instant::now() + AGAIN.0, pause: AGAIN.0, whole: None }
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.at
    }

    fn fails(&mut self) {
        self.at = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(AGAIN.1);
    }

    /// Notes that no stream is missing; true once that has been so for `SOUND`.
    fn is_sound(&mut self) -> bool {
        self.whole.get_or_insert_with(Instant::now).elapsed() >= SOUND
    }
}

/// Paths that were lost, with their next tries.
#[derive(Default)]
pub(super) struct Tries {
    /// Paths on which the peer does not answer.
    ways: HashMap<Way, Try>,
    /// Paths of connections that lack streams, by connection and number of the path.
    links: HashMap<(u32, usize), Try>,
}

impl Tries {
    /// Forgets all but these connections.
    pub(super) fn keep<'a>(&mut self, those: impl Iterator<Item = &'a Redial> + Clone) {
        self.links.retain(|(link, _), _| those.clone().any(|redial| redial.link == *link));
        self.ways.retain(|way, _| those.clone().any(|redial| redial.ways.contains(way)));
    }

    /// Makes a stream that replaces a lost one on each path of a connection where that is due.
    pub(super) fn mend(
        &mut self,
        inner: &Inner,
        (link, redial): (&Arc<Link>, &Redial),
        up: &Up,
        stopped: &dyn Fn() -> bool,
    ) {
        for (number, way) in redial.ways.iter().enumerate() {
            // One that stands still may not recover for as long as its NIC pair was disconnected.
            let works =
                |(index, stream): &(usize, &Stream)| redial.way_of(link, *index) == number && !stream.is_doubted();
            if link.alive().filter(works).count() >= redial.streams_of(number) {
                if self.links.get_mut(&(redial.link, number)).is_some_and(Try::is_sound) {
                    self.links.remove(&(redial.link, number));
                }
                continue;
            }
            let own = self.links.entry((redial.link, number)).or_insert_with(Try::later);
            if own.whole.take().is_some() {
                // It was lost again soon.
                own.fails();
            }
            let is_down = || up.as_ref().zip(way.from).is_some_and(|(up, from)| !up.contains(&from));
            if !own.is_due() || self.ways.get(way).is_some_and(|of| !of.is_due()) || is_down() {
                continue;
            }
            let failed = |detail| log::debug!("net: {}: {way} is not back: {detail}", link.name());
            match redial.open(inner, number, stopped) {
                Err(detail) => {
                    failed(detail);
                    self.ways.entry(way.clone()).or_insert_with(Try::later).fails();
                }
                Ok(socket) => {
                    self.ways.remove(way);
                    match redial.join(inner, link, (number, socket), stopped) {
                        Ok(index) => log::info!("net: {}: {way} is back, as stream {index}", link.name()),
                        Err(detail) => {
                            failed(detail);
                            own.fails();
                        }
                    }
                }
            }
        }
    }
}
