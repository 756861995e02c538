//! Milestone 13: several ranks train an MLP on three spirals and prove after every epoch that their weights are the
//! same.

mod backward;
mod loss;
mod plot;
mod proof;
mod step;
mod train;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use course_kit::train::options::{self, Options, Ranks, Training};
use tinynccl::process_group::{BackendType, ProcessGroup};

use train::{Event, Fault, train};

/// Data-parallel training of an MLP, with a proof that the weights are identical on all ranks.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(flatten)]
    ranks: Ranks,
    /// Library that carries the gradients: auto, tinynccl, mpi (needs the cargo feature `mpi`, and mpirun), or nccl
    /// (fails, as it carries no host memory).
    #[arg(long, default_value = "auto")]
    backend: BackendType,
    #[command(flatten)]
    options: Options,
    /// Leave a part out on purpose, so that the proof fails.
    #[arg(long = "break", value_name = "WHAT")]
    fault: Option<Fault>,
    /// Draw loss and accuracy over the epochs into this file.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let plot = args.plot.as_deref();
    let check = |ranks| args.options.check(ranks).and_then(|()| plot.map_or(Ok(()), options::plot));
    let result = args.ranks.start(args.backend, check, |group| run(group, &args.options, args.fault, plot));
    program_kit::exit_code(result, |_| false)
}

fn run(group: ProcessGroup, options: &Options, fault: Option<Fault>, picture: Option<&Path>) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let Training { epochs: last, batch, hidden, .. } = options.training;
    let every = last.div_ceil(12);
    let epochs = train(&group, options, fault, |event| match event {
        _ if rank != 0 => (),
        Event::Start(start) => {
            println!(
                "{ranks} ranks, MLP 2-{hidden}-{hidden}-3 with {} parameters in {} buckets, {} points, \
                 global batch {} ({} per rank)\n",
                start.parameters,
                start.buckets,
                start.samples,
                batch,
                batch / ranks
            );
            println!("epoch     loss  accuracy  weights (compared over all ranks)");
            println!("{:>5} {:>8} {:>9}  {:016x} identical", 0, "-", "-", start.weights);
        }
        Event::Epoch(e) if e.number == 1 || e.number == last || e.number.is_multiple_of(every) => {
            let accuracy = 100.0 * e.accuracy;
            println!("{:>5} {:>8.5} {accuracy:>7.1} %  {:016x} identical", e.number, e.loss, e.weights);
        }
        Event::Epoch(_) => (),
    })?;
    group.close()?;
    if rank == 0 {
        if let Some(path) = picture {
            plot::write(path, &epochs, ranks)?;
        }
        println!("\nOK: world of size {ranks}, {} comparisons, the same bits each time", epochs.len() + 1);
    }
    Ok(())
}
