//! The path through the hosts' memory beside its bounds: the two copies alone, and the host's collective alone.

use std::time::Instant;

use anyhow::Result;
use tinynccl::comm::RawCall;
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use super::Bench;
use super::task::Task;
use crate::table;

impl Bench<'_> {
    /// Prints a table for each operation. `bound / hosted` is the time of the slowest of the three stages over the
    /// total: 1 is the bound of one worker.
    pub(super) fn stages(&self) -> Result<()> {
        self.say(&format!(
            "{} ranks, {}: {} ({}); {:?}, {} MiB of host memory each",
            self.comm.size(),
            self.device.context().name()?,
            self.device.path(),
            self.device.path_reason(),
            self.comm.config().transport,
            self.device.window_bytes() >> 20
        ));
        let head = ["bytes", "hosted us", "busbw GB/s", "down us", "up us", "host us", "bound / hosted"];
        let head = table::head(&head.map(str::to_owned));
        for &operation in &self.options.operation {
            self.say(&format!("\n{operation:?}\n{head}"));
            for task in self.tasks(operation) {
                let row = self.stages_of(&task)?;
                self.say(&table::row(&row));
            }
        }
        Ok(())
    }

    fn stages_of(&self, task: &Task) -> Result<[String; 7]> {
        let (stream, bytes) = (&self.stream, task.bytes);
        let buffers = task.buffers(stream, self.comm.rank(), None)?;
        let hosted = self.time(|| task.enqueue(&self.device, stream, &buffers))?;
        self.device.check()?;

        // Bytes to copy down and up on this rank, as nccl-tests count the buffer's bytes.
        let (root, part) = (self.comm.rank() == 0, bytes / self.comm.size());
        let (down, up) = match task.collective {
            Collective::AllGather => (part, bytes - part),
            Collective::ReduceScatter => (bytes, part),
            Collective::AllToAll => (bytes - part, bytes - part),
            Collective::Gather => {
                if root {
                    (0, bytes - part)
                } else {
                    (part, 0)
                }
            }
            Collective::Scatter => {
                if root {
                    (bytes - part, 0)
                } else {
                    (0, part)
                }
            }
            _ => (bytes, bytes),
        };
        // SAFETY: written before it is read. Flags 0: cached by the CPU.
        let mut pinned = unsafe { stream.context().alloc_pinned_with_flags::<u8>(bytes, 0) }?;
        pinned.as_mut_slice()?.fill(0);
        let mut memory = stream.alloc_zeros::<u8>(bytes)?;
        let down = self.time(|| Ok(stream.memcpy_dtoh(&memory.slice(..down), &mut pinned.as_mut_slice()?[..down])?))?;
        let up = self.time(|| Ok(stream.memcpy_htod(&pinned.as_slice()?[..up], &mut memory.slice_mut(..up))?))?;

        let host = self.host(task)?;
        let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
        let bound = format!("{:.2}", down.max(up).max(host) / hosted);
        let busbw = format!("{:.2}", task.busbw(hosted));
        Ok([bytes.to_string(), us(hosted), busbw, us(down), us(up), us(host), bound])
    }

    /// Seconds of the host's collective, one thread per rank, from memory that the ranks of a host share (f32).
    fn host(&self, task: &Task) -> Result<f64> {
        let (comm, rank, size) = (self.comm, self.comm.rank(), self.comm.size());
        let len = task.bytes / 4;
        let (input, mut output) = (comm.alloc::<f32>(len)?, comm.alloc::<f32>(len)?);
        let count = Task::new(task.collective, DType::F32, task.bytes, size).map_or(0, |task| task.count);
        let call = Call::new(task.collective, DType::F32, ReduceOp::Sum, 0, count);
        let in_place = matches!(task.collective, Collective::AllReduce | Collective::Broadcast);
        let iters = self.options.iters.min(5);
        self.slowest(self.options.rounds.min(5), || {
            let begin = Instant::now();
            for _ in 0..iters {
                if task.collective == Collective::SendRecv {
                    comm.send_recv(&input, (rank + 1) % size, &mut output, (rank + size - 1) % size)?;
                    continue;
                }
                let to = output.as_mut_ptr().cast::<u8>();
                let from = if in_place { to.cast_const() } else { input.as_ptr().cast() };
                // SAFETY: both buffers are as long as nccl-tests count, and only this call uses them.
                unsafe { comm.run_raw(&[RawCall::new(call, from, to)]) }?;
            }
            Ok(begin.elapsed().as_secs_f64() / f64::from(iters))
        })
    }
}
