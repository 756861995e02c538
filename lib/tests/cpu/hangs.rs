//! Calls that can never end: the error at the deadline gives the reason.

use std::time::Duration;

use crate::common::{Fabric, run};
use tinynccl::{Comm, Config, Error, ReduceOp};

fn impatient() -> Config {
    let mut config = crate::common::config();
    // Longer than a few heartbeats, by which ranks know of each other.
    config.timeout = Duration::from_millis(1500);
    config
}

/// The texts of the ranks' errors, all of which must be a time-out or a report of one.
fn texts(errors: Vec<tinynccl::Result<()>>) -> Vec<String> {
    let text = |error: tinynccl::Result<()>| match error {
        Err(e @ (Error::Timeout { .. } | Error::Aborted { .. } | Error::PeerLost { .. })) => e.to_string(),
        other => panic!("{other:?}"),
    };
    errors.into_iter().map(text).collect()
}

#[test]
fn communicators_used_in_different_orders() {
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        // Also where both communicators have been used before; over TCP only there: the opening of a link has its own
        // error.
        for warm in [false, true].into_iter().filter(|&warm| warm || fabric != Fabric::Tcp) {
            let errors = run(fabric, 2, &impatient(), |world: Comm| {
                let two = [(); 2].map(|()| world.split(Some(0), 0).expect("split").expect("a colour"));
                let mut call = |comm: &Comm| comm.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum);
                if warm {
                    two.iter().try_for_each(&mut call)?;
                }
                let first = world.rank();
                call(&two[first]).and_then(|()| call(&two[1 - first]))
            });
            let texts = texts(errors);
            let told = |text: &&String| {
                text.contains("must use them in the same order") && text.contains("is in all_reduce #")
            };
            assert!(texts.iter().any(|text| told(&text)), "{fabric:?}, warm: {warm}: {texts:?}");
        }
    }
}

#[test]
fn everybody_sends_first() {
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        let errors = run(fabric, 2, &impatient(), |comm: Comm| {
            let (mine, mut theirs) = (vec![1u8; 64 << 20], vec![0u8; 64 << 20]);
            comm.send(&mine, 1 - comm.rank())?;
            comm.recv(&mut theirs, 1 - comm.rank())
        });
        let texts = texts(errors);
        let told = |text: &String| text.contains("which waits for rank") && text.contains("into one group");
        assert!(texts.iter().any(told), "{fabric:?}: {texts:?}");
    }
}

#[test]
fn the_deadline_tells_the_calls_of_both_ranks() {
    for fabric in [Fabric::Inproc, Fabric::Shm, Fabric::Tcp] {
        // Ranks that get no core for a while do not count as silent.
        let mut config = impatient();
        (config.timeout, config.heartbeat) = (Duration::from_secs(4), Duration::from_millis(900));
        let errors = run(fabric, 2, &config, |comm: Comm| {
            let all_reduce = || comm.all_reduce_in_place(&mut [1.0f32; 8], ReduceOp::Sum);
            // The links of messages are open.
            let (one, mut got) = ([1u8], [0u8]);
            comm.group(|g| match comm.rank() {
                0 => g.send(&one, 1),
                _ => g.recv(&mut got, 0),
            })?;
            all_reduce()?;
            if comm.rank() == 0 { all_reduce() } else { comm.recv(&mut [0u8; 8], 0) }
        });
        let texts = texts(errors);
        let told = |text: &String| {
            text.contains("the last one of rank 1 is all_reduce #1 of comm 0 (f32, sum, count 8)")
                || text.contains("the last collective of rank 0 is all_reduce #2 of comm 0 (f32, sum, count 8)")
        };
        assert!(texts.iter().any(told), "{fabric:?}: {texts:?}");
    }
}
