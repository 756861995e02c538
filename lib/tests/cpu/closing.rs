//! Ranks that close their communicators at other times than the others do.

use std::time::Duration;

use tinynccl::{Comm, Config, ReduceOp, Result};

use crate::common::{FABRICS, run_ok};

/// More than a store might remember by their number.
const MANY: usize = 150;

fn patient() -> Config {
    let mut config = crate::common::config();
    // No close comes to that.
    config.timeout = Duration::from_secs(100);
    config.heartbeat = Duration::from_millis(20);
    config
}

fn split(comm: &Comm) -> Result<Comm> {
    let half = comm.split(Some(0), 0)?.expect("all have the same colour");
    half.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum)?;
    Ok(half)
}

/// Rank 0 closes each at once; rank 1 all of them after the last, the newest or the oldest first.
#[test]
fn a_rank_may_close_its_communicators_long_after_the_others() {
    for fabric in FABRICS {
        for newest_first in [true, false] {
            run_ok(fabric, 2, &patient(), |comm| {
                let mut kept = Vec::new();
                for _ in 0..MANY {
                    let half = split(&comm)?;
                    match comm.rank() {
                        0 => half.close()?,
                        _ => kept.push(half),
                    }
                }
                comm.barrier()?;
                if newest_first {
                    kept.reverse();
                }
                kept.into_iter().try_for_each(Comm::close)?;
                comm.close()
            });
        }
    }
}
