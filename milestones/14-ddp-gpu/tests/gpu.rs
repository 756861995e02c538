//! Compares gradients with the CPU's, and the training of several ranks with that of one. Without a GPU it reports a
//! skip.

use course_kit::train::data::Dataset;
use course_kit::train::mlp::Mlp;
use course_kit::train::options::Options;
use course_kit::train::options::Training;
use course_kit::train::rng::Rng;
use cudarc::driver::CudaContext;
use ddp_gpu::check::{Alone, GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_difference};
use ddp_gpu::kernels::Kernels;
use ddp_gpu::replica::Exchange;
use ddp_gpu::time::{Settings, Way, time};
use ddp_gpu::train::{Outcome, train};
use program_kit::testing::skipped;
use tinynccl::cuda;
use tinynccl::process_group::{BackendType, Device, ProcessGroup, nccl_library};
use tinynccl::{Comm, Config};

/// The first `wanted` GPUs; where there are fewer, `None` and a line that says so.
fn gpus(test: &str, wanted: usize) -> Option<Vec<usize>> {
    let here = cuda::nvrtc().and_then(|_| cuda::device_count());
    let reason = match here {
        Ok(count) if count >= wanted => return Some((0..wanted).collect()),
        Ok(count) => format!("needs {wanted} GPUs, this machine has {count}"),
        Err(error) => error.to_string(),
    };
    skipped(test, &reason);
    None
}

/// Runs `work` on a thread per GPU, each a rank of a group of that backend.
fn on_each<T: Send>(
    gpus: &[usize],
    backend: BackendType,
    work: impl Fn(&ProcessGroup, &Kernels) -> T + Sync,
) -> Vec<T> {
    let comms = Comm::threads(gpus.len(), Config::default()).unwrap();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = comms
            .into_iter()
            .zip(gpus)
            .map(|(comm, &gpu)| {
                scope.spawn(move || {
                    let group = ProcessGroup::new(comm, backend, Device::Ordinal(gpu)).unwrap();
                    let kernels = Kernels::new(group.device().unwrap()).unwrap();
                    work(&group, &kernels)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

const OURS: BackendType = BackendType::Tinynccl;

fn small() -> Options {
    let training = Training { epochs: 12, batch: 24, rate: 0.1, hidden: 16, seed: 1 };
    Options { training, points: 32, bucket_bytes: 512 }
}

fn run(gpus: &[usize], backend: BackendType, options: &Options, how: Exchange) -> Vec<Outcome> {
    on_each(gpus, backend, |group, kernels| train(group, kernels, options, how, |_| ()).unwrap())
}

#[test]
fn gradients_are_the_cpus_in_every_shape() {
    let Some(gpus_here) = gpus("gradients_are_the_cpus_in_every_shape", 1) else { return };
    let kernels = Kernels::new(&CudaContext::new(gpus_here[0]).unwrap()).unwrap();
    let alone = Alone::new(gpus_here[0]).unwrap();
    // Less than a tile, full tiles, a remainder on either side, one sample.
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
    let Some(gpus_here) = gpus("one_rank_learns_as_milestone_13_does", 1) else { return };
    let kernels = Kernels::new(&CudaContext::new(gpus_here[0]).unwrap()).unwrap();
    let alone = Alone::new(gpus_here[0]).unwrap();
    let (device, cpu) = (alone.train(&kernels, &small()).unwrap(), alone.train_on_the_cpu(&small()).unwrap().unwrap());
    assert!(device.epochs[11].loss < 0.9 * device.epochs[0].loss, "it learns: {device:?}");
    assert!(loss_difference(&device.epochs, &cpu) <= LOSS_TOLERANCE, "{device:?} {cpu:?}");
    assert_eq!(device.epochs.len(), cpu.len());
}

#[test]
fn two_ranks_agree_and_follow_one() {
    let Some(gpus_here) = gpus("two_ranks_agree_and_follow_one", 2) else { return };
    let one = run(&gpus_here[..1], OURS, &small(), Exchange::Overlapped).remove(0);
    let two = run(&gpus_here, OURS, &small(), Exchange::Overlapped);
    assert_eq!(two[0].epochs, two[1].epochs);
    assert_eq!((one.starts, two[0].starts), (1, 2));
    assert!(loss_difference(&two[0].epochs, &one.epochs) <= LOSS_TOLERANCE, "{two:?} {one:?}");
    // Overlap moves work and changes no number.
    assert_eq!(run(&gpus_here, OURS, &small(), Exchange::AfterBackward)[0].epochs, two[0].epochs);
}

/// The average of two numbers has one rounding, in either library.
#[test]
fn over_nccl_the_weights_are_the_same_bits() {
    let test = "over_nccl_the_weights_are_the_same_bits";
    let Some(gpus_here) = gpus(test, 2) else { return };
    if let Err(missing) = nccl_library(&Config::default()) {
        skipped(test, &missing.to_string());
        return;
    }
    let ours = run(&gpus_here, OURS, &small(), Exchange::Overlapped);
    for how in [Exchange::Overlapped, Exchange::AfterBackward] {
        for rank in run(&gpus_here, BackendType::Nccl, &small(), how) {
            assert_eq!((rank.starts, rank.start), (2, ours[0].start));
            assert_eq!(rank.epochs, ours[0].epochs, "{how:?}");
        }
    }
}

#[test]
fn without_all_reduces_the_proof_fails() {
    let Some(gpus_here) = gpus("without_all_reduces_the_proof_fails", 2) else { return };
    let errors = on_each(&gpus_here, OURS, |group, kernels| {
        train(group, kernels, &small(), Exchange::Never, |_| ()).map(|_| ()).unwrap_err()
    });
    for error in errors {
        let text = format!("{error:#}");
        assert!(text.contains("after epoch 1") && text.contains("diverged"), "{text}");
    }
}

#[test]
fn overlap_of_many_buckets_changes_no_bit() {
    let Some(gpus_here) = gpus("overlap_of_many_buckets_changes_no_bit", 2) else { return };
    let settings = Settings { hidden: 300, layers: 6, batch: 64, bucket_bytes: 1 << 18, steps: 7, rounds: 2, seed: 5 };
    let way = |how, blocks| Way { how, blocks };
    let ways = [
        way(Exchange::AfterBackward, None),
        way(Exchange::Overlapped, None),
        // With two ranks a sum has the same bits, however the buffer is divided.
        way(Exchange::Overlapped, Some(1)),
        way(Exchange::Overlapped, Some(7)),
    ];
    let timed = on_each(&gpus_here, OURS, |group, kernels| time(group, kernels, &settings, &ways).unwrap());
    for rank in &timed {
        assert!(rank.iter().all(|way| way.weights == timed[0][0].weights && way.weights.is_some()), "{timed:?}");
        for transfer in rank.iter().flat_map(|way| &way.timeline.transfers) {
            assert!(transfer.produced <= transfer.begin && transfer.begin <= transfer.end, "{transfer:?}");
        }
    }
}
