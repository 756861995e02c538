//! On a GPU: gradients against the CPU's, and training of several ranks against one. Skipped, and said so, without a GPU.

use std::io::Write as _;
use std::sync::Arc;

use cudarc::driver::CudaContext;
use ddp_gpu::check::{Alone, GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_difference};
use ddp_gpu::compile::compiler_is_here;
use ddp_gpu::kernels::Kernels;
use ddp_gpu::replica::Exchange;
use ddp_gpu::time::{Settings, Way, time};
use ddp_gpu::train::{Outcome, train};
use ddp_train::data::Dataset;
use ddp_train::mlp::Mlp;
use ddp_train::rng::Rng;
use ddp_train::train::Options;
use tinynccl::cuda::{self, DeviceComm};
use tinynccl::{Comm, Config};

/// The first GPUs, `wanted` of them; `None`, said aloud, where there are fewer.
fn gpus(test: &str, wanted: usize) -> Option<Vec<Arc<CudaContext>>> {
    let here = compiler_is_here().and_then(|()| cuda::device_count());
    let reason = match here {
        Ok(count) if count >= wanted => return Some((0..wanted).map(|i| CudaContext::new(i).unwrap()).collect()),
        Ok(count) => format!("needs {wanted} GPUs, this machine has {count}"),
        Err(error) => error.to_string(),
    };
    // Not by a macro: the test harness would keep it to itself.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
    None
}

fn alone(context: &Arc<CudaContext>) -> Alone {
    let device = DeviceComm::local(std::slice::from_ref(context), &Config::default()).unwrap().remove(0);
    Alone::new(&device).unwrap()
}

/// Runs `work` on a thread per GPU, as processes would: each with a host and a device communicator.
fn on_each<T: Send>(contexts: &[Arc<CudaContext>], work: impl Fn(&Comm, &DeviceComm, &Kernels) -> T + Sync) -> Vec<T> {
    let comms = Comm::threads(contexts.len(), Config::default()).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms
            .into_iter()
            .zip(contexts)
            .map(|(comm, context)| {
                scope.spawn(move || {
                    let kernels = Kernels::new(context).unwrap();
                    let device = DeviceComm::new(&comm, context).unwrap();
                    work(&comm, &device, &kernels)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn small() -> Options {
    Options { epochs: 12, points: 32, batch: 24, hidden: 16, bucket_bytes: 512, ..Options::default() }
}

fn run(contexts: &[Arc<CudaContext>], options: &Options, how: Exchange) -> Vec<Outcome> {
    on_each(contexts, |comm, device, kernels| train(comm, device, kernels, options, how, |_| ()).unwrap())
}

#[test]
fn gradients_are_the_cpus_in_every_shape() {
    let Some(contexts) = gpus("gradients_are_the_cpus_in_every_shape", 1) else { return };
    let kernels = Kernels::new(&contexts[0]).unwrap();
    let alone = alone(&contexts[0]);
    // Less than a tile, tiles that are full, tiles with a rest on either side, one sample.
    let shapes: [(&[usize], usize); 6] = [
        (&[2, 7, 5, 3], 1),
        (&[2, 64, 64, 3], 32),
        (&[2, 65, 63, 3], 43),
        (&[2, 130, 70, 200, 3], 11),
        (&[2, 3], 5),
        (&[2, 256, 3], 100),
    ];
    for (sizes, per_class) in shapes {
        for bucket_bytes in [1, 4096, 1 << 30] {
            let model = Mlp::new(sizes, &mut Rng::new(7));
            let batch = Dataset::spiral(per_class, 7);
            let difference = alone.gradients_of(&kernels, &model, sizes, &batch, bucket_bytes).unwrap();
            assert!(difference <= GRADIENT_TOLERANCE, "{sizes:?}, {} samples: {difference:e}", batch.len());
        }
    }
}

#[test]
fn one_rank_learns_as_milestone_13_does() {
    let Some(contexts) = gpus("one_rank_learns_as_milestone_13_does", 1) else { return };
    let kernels = Kernels::new(&contexts[0]).unwrap();
    let alone = alone(&contexts[0]);
    let (device, cpu) = (alone.train(&kernels, &small()).unwrap(), alone.train_on_the_cpu(&small()).unwrap().unwrap());
    assert!(device.epochs[11].loss < 0.9 * device.epochs[0].loss, "it learns: {device:?}");
    assert!(loss_difference(&device.epochs, &cpu) <= LOSS_TOLERANCE, "{device:?} {cpu:?}");
    assert_eq!(device.epochs.len(), cpu.len());
}

#[test]
fn two_ranks_agree_and_follow_one() {
    let Some(contexts) = gpus("two_ranks_agree_and_follow_one", 2) else { return };
    let one = run(&contexts[..1], &small(), Exchange::Overlapped).remove(0);
    let two = run(&contexts, &small(), Exchange::Overlapped);
    assert_eq!(two[0].epochs, two[1].epochs);
    assert_eq!((one.starts, two[0].starts), (1, 2));
    assert!(loss_difference(&two[0].epochs, &one.epochs) <= LOSS_TOLERANCE, "{two:?} {one:?}");
    // Overlap moves work, it changes no number.
    assert_eq!(run(&contexts, &small(), Exchange::AfterBackward)[0].epochs, two[0].epochs);
}

#[test]
fn without_all_reduces_the_proof_fails() {
    let Some(contexts) = gpus("without_all_reduces_the_proof_fails", 2) else { return };
    let errors = on_each(&contexts, |comm, device, kernels| {
        train(comm, device, kernels, &small(), Exchange::Never, |_| ()).map(|_| ()).unwrap_err()
    });
    for error in errors {
        let text = format!("{error:#}");
        assert!(text.contains("after epoch 1") && text.contains("diverged"), "{text}");
    }
}

#[test]
fn overlap_of_many_buckets_changes_no_bit() {
    let Some(contexts) = gpus("overlap_of_many_buckets_changes_no_bit", 2) else { return };
    let settings = Settings { hidden: 300, layers: 6, batch: 64, bucket_bytes: 1 << 18, steps: 7, rounds: 2, seed: 5 };
    let way = |how, blocks| Way { how, blocks };
    let ways = [
        way(Exchange::AfterBackward, None),
        way(Exchange::Overlapped, None),
        // Two ranks: a sum of two numbers is the same however it is cut.
        way(Exchange::Overlapped, Some(1)),
        way(Exchange::Overlapped, Some(7)),
    ];
    let timed = on_each(&contexts, |comm, device, kernels| time(comm, device, kernels, &settings, &ways).unwrap());
    for rank in &timed {
        assert!(rank.iter().all(|way| way.weights == timed[0][0].weights && way.weights.is_some()), "{timed:?}");
        for transfer in rank.iter().flat_map(|way| &way.timeline.transfers) {
            assert!(transfer.produced <= transfer.begin && transfer.begin <= transfer.end, "{transfer:?}");
        }
    }
}
