//! Routes that have not answered lately.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::rails::address::ports::Route;
use tinynccl_sys::threads::lock;

/// Time for which a path that did not answer is left out where another one does.
const UNRESPONSIVE: Duration = Duration::from_secs(10);

/// Routes that have not answered lately, of all connections.
#[derive(Debug, Default)]
pub(in crate::rails) struct Unresponsive(Mutex<HashMap<Route, Instant>>);

impl Unresponsive {
    pub(in crate::rails) fn is(&self, route: &Route) -> bool {
        let mut all = lock(&self.0);
        all.retain(|_, at| at.elapsed() < UNRESPONSIVE);
        all.contains_key(route)
    }

    pub(in crate::rails) fn note(&self, route: &Route) {
        lock(&self.0).insert(route.clone(), Instant::now());
    }
}
