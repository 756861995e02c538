//! An all-reduce of one size: checked exactly, then timed, with the traffic of its links counted.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use program_kit::size;
use tinynccl::{Comm, Config, ReduceOp};

/// The cost of an all-reduce by one algorithm.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Seconds per call, of the slowest rank.
    pub seconds: f64,
    /// The traffic counted during the calls, per call and rank, if available.
    pub counted: Option<f64>,
}

/// A counter of the links' traffic.
#[derive(Debug, Clone, Copy)]
pub enum Count {
    /// The kernel's, for all ranks on this machine.
    Machine(fn() -> Option<u64>),
    /// Each rank's own.
    Process(fn() -> u64),
}

impl Count {
    fn read(self) -> Option<u64> {
        match self {
            Count::Machine(read) => read(),
            Count::Process(read) => Some(read()),
        }
    }

    /// The traffic of all ranks since `before`.
    fn since(self, before: Option<u64>, comm: &Comm) -> Result<Option<u64>> {
        let Some(since) = self.read().zip(before).map(|(after, before)| after.saturating_sub(before)) else {
            return Ok(None);
        };
        let mut total = [since];
        if matches!(self, Count::Process(_)) {
            comm.all_reduce_in_place(&mut total, ReduceOp::Sum).context("adding the ranks' counters")?;
        }
        Ok(Some(total[0]))
    }
}

/// Rank `rank`'s element `i`. Whole numbers: their sum over up to 256 ranks is exact in f32, whatever the order.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 13) % 1000) as f32
}

/// A buffer of `count` values. A lack of memory is an error, not an abort.
pub fn buffer(count: usize, of: impl Fn(usize) -> f32) -> Result<Vec<f32>> {
    let mut data = Vec::new();
    data.try_reserve_exact(count).with_context(|| format!("a buffer of {count} f32"))?;
    data.extend((0..count).map(of));
    Ok(data)
}

/// This rank's input.
pub fn input(comm: &Comm, count: usize) -> Result<Vec<f32>> {
    buffer(count, |i| value(comm.rank(), i))
}

/// Checks `output` on every rank. A wrong value on any rank is an error on all ranks.
fn check(comm: &Comm, output: &[f32], what: &str) -> Result<()> {
    let expected = |i| (0..comm.size()).map(|r| value(r, i)).sum::<f32>();
    let wrong = output.iter().enumerate().filter(|&(i, v)| *v != expected(i));
    let mut total = [wrong.clone().count() as u64];
    let first = wrong.clone().next().map(|(i, v)| format!("; here element {i} is {v}, expected {}", expected(i)));
    comm.all_reduce_in_place(&mut total, ReduceOp::Sum).context("counting wrong elements")?;
    ensure!(total[0] == 0, "{what}: {} wrong elements over all ranks{}", total[0], first.unwrap_or_default());
    Ok(())
}

/// Calls `run` once and checks its output.
pub fn verify(
    comm: &Comm,
    what: &str,
    output: &mut [f32],
    mut run: impl FnMut(&mut [f32]) -> tinynccl::Result<()>,
) -> Result<()> {
    output.fill(f32::NAN);
    run(output).with_context(|| what.to_owned())?;
    check(comm, output, what)
}

/// Calls `run` once and checks the result, then times `iters` calls. `output` must not hold the answer beforehand.
pub fn time(
    comm: &Comm,
    iters: usize,
    what: &str,
    output: &mut [f32],
    count: Option<Count>,
    mut run: impl FnMut(&mut [f32]) -> tinynccl::Result<()>,
) -> Result<Timing> {
    verify(comm, what, output, &mut run)?;
    // Read before the barrier, so that the count includes every rank's first call. It also includes the barrier's few
    // headers.
    let before = count.and_then(Count::read);
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..iters {
        run(output).with_context(|| what.to_owned())?;
    }
    let mut seconds = [start.elapsed().as_secs_f64() / iters as f64];
    // No rank leaves the barrier before all have finished, so the counter includes all traffic.
    comm.barrier()?;
    let counted = match count {
        Some(count) => count.since(before, comm)?,
        None => None,
    };
    comm.all_reduce_in_place(&mut seconds, ReduceOp::Max)?;
    check(comm, output, what)?;
    let counted = counted.map(|total| total as f64 / iters as f64 / comm.size() as f64);
    Ok(Timing { seconds: seconds[0], counted })
}

/// Returns true if all ranks share one network namespace of one kernel, so that its counters see all their traffic.
pub fn one_network(comm: &Comm) -> Result<bool> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut ours = [0u8; 96];
    let name = format!("{} {}", boot.trim(), network.display());
    for (to, from) in ours.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    let mut all = vec![0u8; ours.len() * comm.size()];
    comm.all_gather(&ours, &mut all).context("comparing the ranks' networks")?;
    Ok(all.chunks_exact(ours.len()).all(|theirs| theirs == ours))
}

/// Joins the other ranks: `asked`, or any number up to 256, for which the sums are exact.
///
/// # Errors
/// The launcher started another number; a rank does not come.
pub fn join(config: Config, asked: Option<usize>) -> Result<Comm> {
    let comm = Comm::from_env_with(config).context("joining the other ranks")?;
    let ranks = comm.size();
    ensure!(
        asked.is_none_or(|asked| asked == ranks),
        "--ranks {} but the launcher started {ranks}: leave --ranks out",
        asked.unwrap_or_default()
    );
    ensure!(ranks <= 256, "{ranks} ranks: this program checks exact sums for up to 256");
    Ok(comm)
}

/// Prints the number of bytes that each rank forwards between others in one ring call.
///
/// # Errors
/// A rank is lost.
pub fn forwarded(comm: &Comm, count: usize) -> Result<()> {
    let input = input(comm, count)?;
    let mut output = buffer(count, |_| 0.0)?;
    comm.barrier()?;
    let before = comm.census().relayed.bytes;
    comm.all_reduce(&input, &mut output, ReduceOp::Sum)?;
    comm.barrier()?;
    let relayed = [comm.census().relayed.bytes - before];
    let mut all = vec![0u64; comm.size()];
    comm.all_gather(&relayed, &mut all).context("asking the relays")?;
    for (rank, bytes) in all.iter().enumerate().filter(|(_, bytes)| comm.rank() == 0 && **bytes > 0) {
        println!(
            "Rank {rank} forwards {bytes} bytes between others in one ring call of {} bytes.",
            count * size_of::<f32>()
        );
    }
    Ok(())
}

/// The sizes of a table, and how often each is timed.
#[derive(Debug, Clone, clap::Args)]
pub struct Sizes {
    /// Ranks to start on this machine (default 4). Leave it out under torchrun, mpirun or srun.
    #[arg(long, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub ranks: Option<usize>,
    /// Sizes of the buffer in bytes, comma-separated; K, M and G may follow.
    #[arg(long, value_delimiter = ',', value_parser = size::of_f32(0..=usize::MAX), default_value = "1K,32K,1M,16M")]
    pub bytes: Vec<usize>,
    /// Size of the buffer in f32 elements, in place of --bytes.
    #[arg(long, conflicts_with = "bytes")]
    pub count: Option<usize>,
    /// Timed calls per size.
    #[arg(long, default_value_t = 20, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    pub iters: usize,
}

impl Sizes {
    /// Elements of each size.
    pub fn counts(&self) -> Vec<usize> {
        self.count.map_or_else(|| self.bytes.iter().map(|b| b / 4).collect(), |count| vec![count])
    }

    /// Number of ranks to start. Input and output of every rank, and `more` buffers of the largest size, must fit into
    /// memory.
    ///
    /// # Errors
    /// They do not fit.
    pub fn ranks(&self, more: usize) -> Result<usize> {
        let ranks = self.ranks.unwrap_or(4);
        let largest = self.counts().into_iter().max().unwrap_or(0) * size_of::<f32>();
        let bytes = largest.saturating_mul(2 * ranks + more) as u64;
        program_kit::memory::suffices(format_args!("{ranks} ranks"), bytes, "a smaller --bytes, or fewer --ranks,")?;
        Ok(ranks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::on_threads::{config, on_threads};

    #[test]
    fn sums_are_exact() {
        // 256 x 999 < 2^24, where f32 stops holding every whole number.
        assert!(256.0 * 999.0 < (1u32 << 24) as f32);
        assert!((0..2000).all(|i| value(3, i).fract() == 0.0 && value(3, i) < 1000.0));
        assert_ne!(value(0, 1), value(1, 1));
    }

    #[test]
    fn one_wrong_element_on_one_rank_is_an_error_on_all() {
        on_threads(2, config(), |comm| {
            let outcome = time(comm, 1, "broken", &mut [0.0; 8], None, |output| {
                let input = input(comm, 8).unwrap_or_default();
                comm.all_reduce(&input, output, ReduceOp::Sum)?;
                output[5] += comm.rank() as f32;
                Ok(())
            });
            let e = format!("{:#}", outcome.unwrap_err());
            assert!(e.contains("broken: 1 wrong elements"), "{e}");
        });
    }

    #[test]
    fn a_buffer_that_cannot_be_had_is_an_error() {
        assert!(buffer(usize::MAX / 8, |_| 0.0).is_err());
    }
}
