use tinynccl::process_group::ProcessGroup;
use tinynccl::{Comm, Config};

use super::*;

/// Runs `train` on `ranks` threads and returns each rank's outcome.
fn run(ranks: usize, options: &Options) -> Vec<Result<Vec<Epoch>>> {
    run_without(None, ranks, options)
}

/// [`run`] with a fault.
fn run_without(fault: Option<Fault>, ranks: usize, options: &Options) -> Vec<Result<Vec<Epoch>>> {
    let comms = Comm::threads(ranks, Config::default()).unwrap();
    let groups: Vec<ProcessGroup> = comms.into_iter().map(ProcessGroup::from).collect();
    std::thread::scope(|scope| {
        // A rank that panics takes its communicator with it, so the others fail instead of waiting.
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || train(&group, options, fault, |_| ()))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn small() -> Options {
    let training = Training { epochs: 12, batch: 24, rate: 0.1, hidden: 16, seed: 1 };
    Options { training, points: 32, bucket_bytes: 512 }
}

fn with_batch(batch: usize) -> Options {
    Options { training: Training { batch, ..small().training }, ..small() }
}

#[test]
fn the_loss_curve_does_not_depend_on_the_number_of_ranks() {
    let one = run(1, &small()).remove(0).unwrap();
    assert!(one[11].loss < 0.9 * one[0].loss, "it learns: {one:?}");
    for ranks in [2, 3, 4] {
        for (rank, curve) in run(ranks, &small()).into_iter().enumerate() {
            for (a, b) in one.iter().zip(&curve.unwrap()) {
                // The sums have another order; 48 steps amplify the rounding of f32 a little.
                let close = approx::relative_eq!(a.loss, b.loss, max_relative = 1e-5);
                assert!(close, "{ranks} ranks, rank {rank}: {a:?} {b:?}");
            }
        }
    }
}

#[test]
fn all_ranks_report_the_same_and_a_second_run_repeats_it() {
    let first: Vec<_> = run(2, &small()).into_iter().map(Result::unwrap).collect();
    let second: Vec<_> = run(2, &small()).into_iter().map(Result::unwrap).collect();
    assert_eq!(first[0], first[1]);
    assert_eq!(first, second);
}

#[test]
fn without_the_broadcast_the_proof_fails_before_the_first_step_on_every_rank() {
    for outcome in run_without(Some(Fault::Broadcast), 3, &small()) {
        let e = format!("{:#}", outcome.unwrap_err());
        // The biases start at zero everywhere: three weights of six parameters differ.
        assert!(e.contains("before the first step") && e.contains("layer0.weight") && e.contains("3 of 6"), "{e}");
    }
}

#[test]
fn without_the_average_the_proof_fails_after_the_first_epoch_on_every_rank() {
    for outcome in run_without(Some(Fault::Average), 2, &small()) {
        let e = format!("{:#}", outcome.unwrap_err());
        assert!(e.contains("after epoch 1") && e.contains("6 of 6") && e.contains("own shard"), "{e}");
    }
}

#[test]
fn one_replica_cannot_diverge() {
    for fault in [Fault::Broadcast, Fault::Average] {
        let training = Training { epochs: 1, ..small().training };
        run_without(Some(fault), 1, &Options { training, ..small() }).remove(0).unwrap();
    }
}

#[test]
fn a_batch_that_cannot_be_shared_is_refused() {
    let e = run(3, &with_batch(25)).remove(0).unwrap_err().to_string();
    assert!(e.contains("25") && e.contains("multiple of 3"), "{e}");
    let e = run(1, &with_batch(1000)).remove(0).unwrap_err().to_string();
    assert!(e.contains("larger than the data (96 points)"), "{e}");
}
