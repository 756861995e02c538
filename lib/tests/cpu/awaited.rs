//! Asynchronous calls that tasks await.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tinynccl::{Comm, Error, ReduceOp, Result};

use crate::common::{config, run_tasks};

/// Ranks as tasks of one thread: they get through only if no poll waits.
#[test]
fn ranks_can_be_tasks_of_one_thread() {
    async fn rank(comm: &Comm) -> Result<()> {
        let (rank, n) = (comm.rank(), comm.size());
        for round in 0..50 {
            let sum = comm.all_reduce_in_place_async(vec![(rank + round) as u64; 1000], ReduceOp::Sum)?;
            let all = comm.all_gather_async(vec![rank as u8], vec![9; n])?;
            // In another order than they were made.
            assert_eq!(all.await?.1, (0..n as u8).collect::<Vec<_>>());
            assert_eq!(sum.await?, vec![(3 + 3 * round) as u64; 1000]);
        }
        Ok(())
    }
    let comms = Comm::threads(3, config()).expect("three ranks");
    let tasks = comms.iter().map(|comm| Box::pin(rank(comm)) as Pin<Box<dyn Future<Output = Result<()>>>>);
    run_tasks(tasks.collect()).into_iter().for_each(|outcome| outcome.expect("every rank"));
}

#[test]
fn a_call_that_is_done_before_it_is_awaited_is_awaited_at_once() {
    let comms = Comm::threads(1, config()).expect("a rank");
    let work = comms[0].all_reduce_in_place_async(vec![5i32], ReduceOp::Sum).expect("queued");
    comms[0].barrier().expect("after it");
    assert!(work.is_done());
    assert_eq!(run_tasks(vec![Box::pin(work)]).remove(0).expect("done"), [5]);
}

#[test]
fn a_peer_that_does_not_call_ends_the_wait_of_a_task_at_the_deadline() {
    let mut short = config();
    short.timeout = Duration::from_millis(200);
    let comms = Comm::threads(2, short).expect("two ranks");
    let work = comms[0].all_reduce_in_place_async(vec![1f32; 8], ReduceOp::Sum).expect("queued");
    let outcome = run_tasks(vec![Box::pin(work)]).remove(0);
    assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
}
