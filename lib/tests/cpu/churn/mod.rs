//! A storm of lost and gained members: up to nine processes train as a group over shared memory, then over TCP, while
//! ranks are killed (any of them, several at once), stopped and continued, and newcomers come, some of which are killed
//! before they are in. After each round all that live are in one group, hold the weights that its history gives, and go
//! on. This test binary runs itself again, once per process.
//!
//! `scripts/storm.sh -m` runs it for longer. Settings of the environment, all optional:
//!
//! | setting | |
//! |---|---|
//! | `TINYNCCL_TEST_STORM_SECONDS` | seconds that it lasts, equal parts of them over each transport; 20 |
//! | `TINYNCCL_TEST_STORM_TRANSPORTS` | `shm,tcp`; also `verbs` (the card in user space) and `rails` (TCP over all NICs) |
//! | `TINYNCCL_TEST_STORM_SEED` | seed of what is drawn: a seed gives the same draws, not the same moments in a call |
//! | `TINYNCCL_TEST_STORM_SHOW` | 1: print all lines of the processes |

mod driver;
mod history;
mod process;
mod rank;

use std::time::{Duration, Instant};

use driver::Storm;

use crate::storm::{numbers, setting};
use crate::survive::now;

/// Set for a process of the storm: its number.
const NUMBER: &str = "TINYNCCL_TEST_CHURN";
/// Set for a newcomer: its ticket.
const TICKET: &str = "TINYNCCL_TEST_TICKET";
/// Exit code of a process that the others went on without.
const EXCLUDED: i32 = 3;
/// Most ranks of a group. More processes wait as spares.
const ROOM: usize = 7;
/// Most processes.
const MOST: usize = 9;

/// A time that is the same in all processes.
fn seconds() -> f64 {
    now() as f64 * 1e-9
}

#[test]
fn a_storm_of_lost_and_gained_members_costs_no_step() {
    let (seed, length) = (setting("SEED", 1), Duration::from_secs(setting("SECONDS", 20)));
    let mut random = numbers(seed);
    let chosen = std::env::var("TINYNCCL_TEST_STORM_TRANSPORTS").unwrap_or_else(|_| "shm,tcp".to_owned());
    let transports: Vec<_> = chosen.split(',').collect();
    for &transport in &transports {
        let mut storm = Storm::start(transport, seed, 2 + random(4));
        let start = Instant::now();
        while start.elapsed() < length / transports.len() as u32 {
            storm.round(&mut random);
        }
        eprintln!("storm: {}", storm.finish());
    }
}
