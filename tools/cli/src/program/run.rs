//! `program`: proves a schedule of a file, and runs it on ranks of this machine.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use program_kit::{size, stats};
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, ReduceOp};
use tinynccl_plan::schedule::verify::verify;
use tinynccl_plan::schedule::{Program, Schedule, Shape};

/// Bytes of an element.
const ELEMENT: usize = size_of::<f32>();

/// Proves a schedule from a file (tinynccl's format, MSCCL's XML, an execution plan of mscclpp), and runs it: starts
/// its ranks as processes of this machine, or acts as one where a launcher has started them. Every element of every
/// result is checked.
#[derive(Debug, Args)]
pub(crate) struct Options {
    file: PathBuf,
    /// Only proves the schedule.
    #[arg(long)]
    prove: bool,
    /// Sizes in bytes, separated by commas; K, M and G are powers of 1024. A size is that of a rank's input or output,
    /// whichever is larger.
    #[arg(short, long, default_value = "64K,1M", value_delimiter = ',', value_parser = size::parse)]
    size: Vec<usize>,
    /// Timed calls per size.
    #[arg(long, default_value_t = 20, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    iters: usize,
}

/// The exit status.
pub(crate) fn run(options: &Options) -> Result<i32> {
    let schedule = super::read(&options.file)?;
    if launch::is_rank() && !options.prove {
        ranks(options, &schedule)?;
        return Ok(0);
    }
    crate::print(&summary(&schedule)?)?;
    match options.prove {
        true => Ok(0),
        false => Ok(Launcher::new(schedule.shape().ranks).plain_rank0(true).run_self()?),
    }
}

/// Words for what was proved.
fn summary(schedule: &Schedule) -> Result<String> {
    let (shape, programs) = (schedule.shape(), schedule.programs());
    let report = verify(programs, shape, 2, 1, false).context("the schedule is wrong")?;
    let most = |of: fn(&Program) -> usize| programs.iter().map(of).max().unwrap_or(0);
    let root = if shape.collective.has_root() { format!(", root {}", shape.root) } else { String::new() };
    let order = match (shape.collective.reduces(), report.rank_order) {
        (false, _) => "",
        (true, true) => ", sums in rank order",
        (true, false) => ", sums in another order than that of ranks, the same on all",
    };
    let place = if schedule.in_place().is_ok() { "in place or not" } else { "not in place" };
    Ok(format!(
        "{}, {} ranks{root}: proved, {place}{order}\n\
         parts of a segment {}, lanes of a rank {}, steps of a lane {}, messages {}, chain of messages {}, \
         segments of scratch memory {}\n",
        shape.collective,
        shape.ranks,
        most(|program| program.parts),
        most(|program| program.lanes.len()),
        report.steps,
        report.messages.iter().sum::<u64>(),
        report.hops,
        most(|program| program.scratch_segments),
    ))
}

/// A small whole number, so that sums of them do not round.
fn input(rank: usize, segment: usize, at: usize) -> f32 {
    ((rank * 31 + segment * 17 + at * 7) % 64) as f32
}

fn expected(shape: &Shape, rank: usize, segment: usize, at: usize) -> f32 {
    let (from, ranks) = shape.result(rank, segment).unwrap_or((0, 0..0));
    ranks.map(|rank| input(rank, from, at)).sum()
}

/// Runs it as one of its ranks.
fn ranks(options: &Options, schedule: &Schedule) -> Result<()> {
    let comm = Comm::from_env().context("joining the other ranks")?;
    let (rank, shape) = (comm.rank(), schedule.shape());
    let segments = [shape.input_segments(rank), shape.output_segments(rank)];
    let most = (0..shape.ranks).map(|rank| shape.input_segments(rank).max(shape.output_segments(rank))).max();
    if rank == 0 {
        println!("\n{:>12} {:>12} {:>10}", "bytes", "us", "GB/s");
    }
    for &bytes in &options.size {
        let count = bytes / ELEMENT / most.unwrap_or(1).max(1);
        let values = |of: fn(usize, usize, usize) -> f32, segments: usize| -> Vec<f32> {
            (0..segments * count).map(|place| of(rank, place / count, place % count)).collect()
        };
        let given = values(input, segments[0]);
        let mut output = vec![f32::NAN; segments[1] * count];
        let mut times = vec![];
        // The first call opens links.
        for call in 0..=options.iters {
            comm.barrier()?;
            let begin = Instant::now();
            comm.run_program(schedule, &given, &mut output, ReduceOp::Sum)?;
            if call > 0 {
                times.push(begin.elapsed().as_secs_f64());
            }
        }
        for (place, &got) in output.iter().enumerate() {
            let (segment, at) = (place / count, place % count);
            let wanted = expected(shape, rank, segment, at);
            ensure!(got == wanted, "rank {rank}, segment {segment}, element {at}: expected {wanted}, got {got}");
        }
        let time = stats::median(&times).unwrap_or(0.0);
        let slowest = &mut [time];
        comm.all_reduce_in_place(slowest, ReduceOp::Max)?;
        if rank == 0 {
            println!("{bytes:>12} {:>12.1} {:>10.3}", slowest[0] * 1e6, bytes as f64 / slowest[0].max(1e-9) / 1e9);
        }
    }
    if rank == 0 {
        println!("\nEvery element was checked on every rank: OK. The median call of the slowest rank.");
    }
    comm.close()?;
    Ok(())
}
