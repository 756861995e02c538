//! Rails that were lost are dialed again. A path that does not answer is tried once in a while, however many
//! connections wait for it, so that it holds up no other one.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::bootstrap::interface;
use crate::rails::address::ports::Route;
use crate::rails::connect::Context;
use crate::rails::connect::dialer::Redial;
use crate::rails::connection::Connection;
use crate::rails::connection::core::DataStream;
use crate::rails::health::monitor::Up;
use crate::rails::health::watch::{Watch, WatchList};
use tinynccl_plan::error::Result;
use tinynccl_sys::threads::Thread;

/// Time before a lost rail is dialed, and longest time between two tries.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Time between two looks for something to dial.
const INTERVAL: Duration = Duration::from_millis(500);
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

/// The thread that dials lost rails again.
#[derive(Debug, Default)]
pub(in crate::rails) struct Redialer(Watch<Arc<Redial>>);

impl Redialer {
    /// Watches a new connection, which was dialed as `redial` says, until it ends.
    pub(in crate::rails) fn watch(
        &self,
        inner: &Arc<Context>,
        connection: &Arc<Connection>,
        redial: Redial,
    ) -> Result<()> {
        let inner = Arc::downgrade(inner);
        self.0.add(connection, Arc::new(redial), |list| {
            let what = "the thread that redials rails".to_owned();
            Thread::start("net", "tinynccl-redial".to_owned(), what, move || run(&list, &inner))
        })
    }

    /// Ends its thread, which stops to dial.
    pub(in crate::rails) fn stop(&self) {
        self.0.stop();
    }
}

fn run(list: &WatchList<Arc<Redial>>, inner: &Weak<Context>) {
    let mut tries = Tries::default();
    while !list.is_stopped() {
        let watched: Vec<(Weak<Connection>, Arc<Redial>)> = {
            let watched = list.wait(INTERVAL);
            watched.iter().map(|w| (w.connection.clone(), w.state.clone())).collect()
        };
        tries.keep(watched.iter().map(|(_, redial)| &**redial));
        let up = Up::new(interface::up);
        for (connection, redial) in &watched {
            let (Some(connection), Some(inner)) = (connection.upgrade(), inner.upgrade()) else { continue };
            tries.redial_lost(&inner, (&connection, redial), &up, &|| list.is_stopped());
        }
    }
}

/// Paths that were lost, with their next tries.
#[derive(Default)]
struct Tries {
    /// Paths on which the peer does not answer.
    routes: HashMap<Route, Try>,
    /// Paths of connections that lack streams, by connection and number of the path.
    by_connection: HashMap<(u32, usize), Try>,
}

impl Tries {
    /// Forgets all but these connections.
    fn keep<'a>(&mut self, those: impl Iterator<Item = &'a Redial> + Clone) {
        self.by_connection.retain(|(connection, _), _| those.clone().any(|redial| redial.connection == *connection));
        self.routes.retain(|route, _| those.clone().any(|redial| redial.routes.contains(route)));
    }

    /// Makes a stream that replaces a lost one on each path of a connection where that is due.
    fn redial_lost(
        &mut self,
        inner: &Context,
        (connection, redial): (&Arc<Connection>, &Redial),
        up: &Up,
        stopped: &dyn Fn() -> bool,
    ) {
        for (number, route) in redial.routes.iter().enumerate() {
            // One that is stalled may not recover for as long as its NIC pair was disconnected.
            let works = |(index, stream): &(usize, &DataStream)| {
                redial.route_of(connection, *index) == number && !stream.is_suspect()
            };
            if connection.alive().filter(works).count() >= redial.streams_of(number) {
                if self.by_connection.get_mut(&(redial.connection, number)).is_some_and(Try::is_sound) {
                    self.by_connection.remove(&(redial.connection, number));
                }
                continue;
            }
            let own = self.by_connection.entry((redial.connection, number)).or_insert_with(Try::later);
            if own.whole.take().is_some() {
                // It was lost again soon.
                own.fails();
            }
            let is_down = || up.as_ref().zip(route.from).is_some_and(|(up, from)| !up.contains(&from));
            if !own.is_due() || self.routes.get(route).is_some_and(|of| !of.is_due()) || is_down() {
                continue;
            }
            let failed = |detail| log::debug!("net: {}: {route} is not back: {detail}", connection.name());
            match redial.open(inner, number, stopped) {
                Err(detail) => {
                    failed(detail);
                    self.routes.entry(route.clone()).or_insert_with(Try::later).fails();
                }
                Ok(socket) => {
                    self.routes.remove(route);
                    match redial.join(inner, connection, (number, socket), stopped) {
                        Ok(index) => log::info!("net: {}: {route} is back, as stream {index}", connection.name()),
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
