//! Every kernel once, at sizes that compute-sanitizer gets through (`scripts/gpu-tests.sh sanitize`).

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use tinynccl::comm::RawCall;
use tinynccl::cuda::{Choice, DeviceComm, Framing, Protocol};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Config, DType, ReduceOp};

use super::gpus;
use crate::common::lengths;
use crate::ranks::COLLECTIVES;

const PROTOCOLS: [Protocol; 11] = [
    Protocol::OneShot,
    Protocol::TwoShot,
    Protocol::OneShot128,
    Protocol::TwoShot128,
    Protocol::Simple,
    Protocol::Schedule(Algorithm::Ring, Framing::Simple),
    Protocol::Schedule(Algorithm::Ring, Framing::Ll),
    Protocol::Schedule(Algorithm::Tree, Framing::Simple),
    Protocol::Schedule(Algorithm::Tree, Framing::Ll),
    Protocol::Schedule(Algorithm::Ring, Framing::Ll128),
    Protocol::Schedule(Algorithm::Tree, Framing::Ll128),
];

/// One rank's part in a call.
struct Part<B> {
    collective: Collective,
    count: usize,
    input: B,
    output: B,
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank + 1) * (i % 7 + 1)) as f32
}

impl<B: DevicePtr<f32> + DevicePtrMut<f32>> Part<B> {
    /// `output` must be zeroed; both may be longer than the call needs.
    fn begin(
        comm: &DeviceComm,
        stream: &Arc<CudaStream>,
        (collective, count, choice): (Collective, usize, Choice),
        mut input: B,
        output: B,
    ) -> Part<B> {
        let n = comm.size();
        let values: Vec<f32> = (0..lengths(collective, n, count).0).map(|i| value(comm.rank(), i)).collect();
        stream.memcpy_htod(&values, &mut input).unwrap();
        let (from, to) = (input.device_ptr(stream).0, output.device_ptr(stream).0);
        let (dtype, op, root) = (DType::F32, ReduceOp::Sum, n - 1);
        let call = RawCall::on_device(Call::new(collective, dtype, op, root, count), from, to);
        // SAFETY: as long as the collective needs, alive until `check` has waited.
        unsafe { comm.enqueue_as(stream, &call, choice) }.unwrap();
        Part { collective, count, input, output }
    }

    fn check(&self, comm: &DeviceComm, stream: &Arc<CudaStream>, what: &str) {
        comm.synchronize().unwrap_or_else(|e| panic!("{what}: {e}"));
        let got = stream.clone_dtoh(&self.output).unwrap();
        check(self.collective, (comm.rank(), comm.size(), self.count), &got, what);
        drop(stream.clone_dtoh(&self.input).unwrap());
    }
}

/// The output of a call whose inputs are [`value`]s.
fn check(collective: Collective, (rank, n, count): (usize, usize, usize), got: &[f32], what: &str) {
    let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<f32>();
    for (i, &got) in got.iter().take(lengths(collective, n, count).1).enumerate() {
        let expected = match collective {
            Collective::AllReduce => sum(i),
            Collective::Reduce if rank == n - 1 => sum(i),
            Collective::Reduce => 0.0,
            Collective::Broadcast => value(n - 1, i),
            Collective::AllGather => value(i / count, i % count),
            Collective::ReduceScatter => sum(rank * count + i),
            _ => value(i / count, rank * count + i % count),
        };
        assert_eq!(got, expected, "{what}, rank {rank}, element {i}");
    }
}

/// All collectives, by the ranks that this process has.
pub(super) fn every_call(ranks: &[(DeviceComm, Arc<CudaStream>)]) {
    for collective in COLLECTIVES {
        for protocol in PROTOCOLS {
            for count in [1, 1003] {
                let choice = Choice { protocol, blocks: 2 };
                if !ranks[0].0.fits(collective, choice, 4 * count) {
                    continue;
                }
                let begin = |(comm, stream): &(DeviceComm, Arc<CudaStream>)| {
                    let (from, to) = lengths(collective, comm.size(), count);
                    let (input, output) = (stream.alloc_zeros(from).unwrap(), stream.alloc_zeros(to).unwrap());
                    Part::begin(comm, stream, (collective, count, choice), input, output)
                };
                let parts: Vec<_> = ranks.iter().map(begin).collect();
                for ((comm, stream), part) in ranks.iter().zip(&parts) {
                    part.check(comm, stream, &format!("{collective} of {count}, {protocol}"));
                }
            }
        }
    }
    groups(ranks);
    // In lines, and in slots.
    for count in [1, 1003, 5001] {
        let messages = ranks.iter().map(|(comm, stream)| {
            let (n, rank) = (comm.size(), comm.rank());
            let values: Vec<f32> = (0..count).map(|i| value(rank, i)).collect();
            let (input, mut output) = (stream.clone_htod(&values).unwrap(), stream.alloc_zeros::<f32>(count).unwrap());
            comm.send_recv(stream, &input, (rank + 1) % n, &mut output, (rank + n - 1) % n).unwrap();
            (input, output)
        });
        let messages: Vec<_> = messages.collect();
        for ((comm, stream), (_, output)) in ranks.iter().zip(&messages) {
            comm.synchronize().unwrap();
            let from = (comm.rank() + comm.size() - 1) % comm.size();
            let got = stream.clone_dtoh(output).unwrap();
            assert!((0..count).all(|i| got[i] == value(from, i)), "{count} from {from}");
        }
    }
}

/// Groups of all collectives, as one launch: of one block, of more, and of lines of LL128.
fn groups(ranks: &[(DeviceComm, Arc<CudaStream>)]) {
    // Those of this process may be few of them.
    let n = ranks[0].0.size();
    for count in [1, 700, 40_001] {
        let segment = |i: usize| i * n * count;
        let values = |rank: usize| (0..segment(6)).map(|i| value(rank, i % segment(1))).collect::<Vec<f32>>();
        let memory: Vec<_> = ranks
            .iter()
            .map(|(comm, stream)| {
                let output = stream.alloc_zeros::<f32>(segment(6)).unwrap();
                (stream.clone_htod(&values(comm.rank())).unwrap(), output)
            })
            .collect();
        let calls = |stream: &Arc<CudaStream>, (input, output): &(CudaSlice<f32>, CudaSlice<f32>)| {
            let (from, to) = (input.device_ptr(stream).0, output.device_ptr(stream).0);
            let call = |(i, collective)| {
                let at = 4 * segment(i) as u64;
                RawCall::on_device(Call::new(collective, DType::F32, ReduceOp::Sum, n - 1, count), from + at, to + at)
            };
            COLLECTIVES.into_iter().enumerate().map(call).collect::<Vec<_>>()
        };
        let calls: Vec<_> = ranks.iter().zip(&memory).map(|((_, stream), memory)| calls(stream, memory)).collect();
        for ((comm, _), calls) in ranks.iter().zip(&calls) {
            comm.prepare(calls).unwrap();
        }
        for ((comm, stream), calls) in ranks.iter().zip(&calls) {
            // SAFETY: as long as the collectives need, alive until the checks have waited.
            unsafe { comm.enqueue_group(stream, calls) }.unwrap();
        }
        for ((comm, stream), (_, output)) in ranks.iter().zip(&memory) {
            comm.synchronize().unwrap();
            let got = stream.clone_dtoh(output).unwrap();
            for (i, collective) in COLLECTIVES.into_iter().enumerate() {
                let what = format!("{collective} of {count} in a group");
                check(collective, (comm.rank(), n, count), &got[segment(i)..segment(i + 1)], &what);
            }
        }
    }
}

/// All collectives between registered buffers of the ranks of one process.
fn every_direct_call(ranks: &[(DeviceComm, Arc<CudaStream>)]) {
    let comms: Vec<&DeviceComm> = ranks.iter().map(|(comm, _)| comm).collect();
    let streams: Vec<Arc<CudaStream>> = ranks.iter().map(|(_, stream)| stream.clone()).collect();
    let before: u64 = comms.iter().map(|comm| comm.direct_calls().unwrap()).sum();
    for collective in COLLECTIVES {
        for count in [1, 1003, 1004] {
            let choice = Choice { protocol: Protocol::Direct, blocks: 2 };
            if !comms[0].fits(collective, choice, 4 * count) {
                continue;
            }
            let memory = || DeviceComm::alloc_local::<f32>(&comms, &streams, count * ranks.len()).unwrap();
            let pairs = memory().into_iter().zip(memory());
            let begin = |((comm, stream), (input, output)): (&(DeviceComm, _), _)| {
                Part::begin(comm, stream, (collective, count, choice), input, output)
            };
            let parts: Vec<_> = ranks.iter().zip(pairs).map(begin).collect();
            for ((comm, stream), part) in ranks.iter().zip(&parts) {
                part.check(comm, stream, &format!("{collective} of {count}, registered"));
            }
        }
    }
    assert!(comms.iter().map(|comm| comm.direct_calls().unwrap()).sum::<u64>() > before, "all calls were copied");
}

fn local(devices: &[usize]) {
    let Some(contexts) = gpus(devices.iter().max().map_or(1, |most| most + 1)) else { return };
    let contexts: Vec<_> = devices.iter().map(|&device| contexts[device].clone()).collect();
    let comms = DeviceComm::local(&contexts, &Config::default()).unwrap();
    let ranks: Vec<_> =
        comms.into_iter().zip(&contexts).map(|(comm, context)| (comm, context.new_stream().unwrap())).collect();
    every_call(&ranks);
    every_direct_call(&ranks);
}

#[test]
fn every_kernel_on_one_gpu() {
    local(&[0, 0]);
    local(&[0, 0, 0]);
}

#[test]
fn every_kernel_on_two_gpus() {
    local(&[0, 1]);
    local(&[0, 1, 0]);
}
