//! Every kernel once, at sizes that compute-sanitizer gets through (`scripts/gpu-tests.sh sanitize`).

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use tinynccl::cuda::{Call, Choice, DeviceComm, Protocol};
use tinynccl::wire::Collective;
use tinynccl::{Config, DType, ReduceOp};

use super::gpus;

const COLLECTIVES: [Collective; 6] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
];

/// One rank's part in a call.
struct Part {
    collective: Collective,
    count: usize,
    input: CudaSlice<f32>,
    output: CudaSlice<f32>,
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank + 1) * (i % 7 + 1)) as f32
}

impl Part {
    fn begin(
        comm: &DeviceComm,
        stream: &Arc<CudaStream>,
        collective: Collective,
        count: usize,
        choice: Choice,
    ) -> Part {
        let n = comm.size();
        let (inputs, outputs) = match collective {
            Collective::AllGather => (1, n),
            Collective::ReduceScatter => (n, 1),
            Collective::AllToAll => (n, n),
            _ => (1, 1),
        };
        let values: Vec<f32> = (0..inputs * count).map(|i| value(comm.rank(), i)).collect();
        let input = stream.clone_htod(&values).unwrap();
        let output = stream.alloc_zeros(outputs * count).unwrap();
        let (from, to) = (input.device_ptr(stream).0, output.device_ptr(stream).0);
        let (dtype, op, root) = (DType::F32, ReduceOp::Sum, n - 1);
        let call = Call { collective, dtype, op, root, count, input: from, output: to };
        // SAFETY: as long as the collective needs, alive until `check` has waited.
        unsafe { comm.enqueue_as(stream, &call, choice) }.unwrap();
        Part { collective, count, input, output }
    }

    fn check(&self, comm: &DeviceComm, stream: &Arc<CudaStream>, what: &str) {
        comm.synchronize().unwrap_or_else(|e| panic!("{what}: {e}"));
        let (n, rank, count) = (comm.size(), comm.rank(), self.count);
        let got = stream.clone_dtoh(&self.output).unwrap();
        let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<f32>();
        for (i, got) in got.into_iter().enumerate() {
            let expected = match self.collective {
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
        drop(stream.clone_dtoh(&self.input).unwrap());
    }
}

/// All collectives, by the ranks that this process has.
pub(super) fn every_call(ranks: &[(DeviceComm, Arc<CudaStream>)]) {
    for collective in COLLECTIVES {
        for protocol in
            [Protocol::OneShot, Protocol::TwoShot, Protocol::OneShot128, Protocol::TwoShot128, Protocol::Simple]
        {
            for count in [1, 1003] {
                let choice = Choice { protocol, blocks: 2 };
                if !ranks[0].0.fits(collective, choice, 4 * count) {
                    continue;
                }
                let begin = |(comm, stream): &(DeviceComm, _)| Part::begin(comm, stream, collective, count, choice);
                let parts: Vec<Part> = ranks.iter().map(begin).collect();
                for ((comm, stream), part) in ranks.iter().zip(&parts) {
                    part.check(comm, stream, &format!("{collective} of {count}, {protocol}"));
                }
            }
        }
    }
    let messages = ranks.iter().map(|(comm, stream)| {
        let (n, rank) = (comm.size(), comm.rank());
        let values: Vec<f32> = (0..5001).map(|i| value(rank, i)).collect();
        let (input, mut output) = (stream.clone_htod(&values).unwrap(), stream.alloc_zeros::<f32>(5001).unwrap());
        comm.send_recv(stream, &input, (rank + 1) % n, &mut output, (rank + n - 1) % n).unwrap();
        (input, output)
    });
    let messages: Vec<_> = messages.collect();
    for ((comm, stream), (_, output)) in ranks.iter().zip(&messages) {
        comm.synchronize().unwrap();
        let from = (comm.rank() + comm.size() - 1) % comm.size();
        let got = stream.clone_dtoh(output).unwrap();
        assert!((0..5001).all(|i| got[i] == value(from, i)));
    }
}

fn local(devices: &[usize]) {
    let Some(contexts) = gpus(devices.iter().max().map_or(1, |most| most + 1)) else { return };
    let contexts: Vec<_> = devices.iter().map(|&device| contexts[device].clone()).collect();
    let comms = DeviceComm::local(&contexts, &Config::default()).unwrap();
    let ranks: Vec<_> =
        comms.into_iter().zip(&contexts).map(|(comm, context)| (comm, context.new_stream().unwrap())).collect();
    every_call(&ranks);
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
