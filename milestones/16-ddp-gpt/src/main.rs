//! Milestone 16: a character-level GPT trained with data parallelism.

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use ddp_gpt::cli::{self, BenchArgs, Cli, Command, Device, Job, TrainArgs};
use ddp_gpt::distributed::{CommRanks, DistributedGradients};
use ddp_gpt::gpu::device::{self, Gpu};
use ddp_gpt::gpu::error::Unavailable;
use ddp_gpt::gpu::reducer::{self, Reducer};
use ddp_gpt::gpu::train::train as gpu_train;
use ddp_gpt::gradients::{Gradients, LocalGradients, OneRank, Ranks};
use ddp_gpt::ops::parallel::Threads;
use ddp_gpt::report::{Console, Report, Silent};
use ddp_gpt::train::{State, train};
use ddp_gpt::{bench, params, plot, sample};
use tinynccl::cuda::DeviceComm;
use tinynccl::process_group::ProcessGroup;
use tinynccl::{Comm, Config, launch};

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(Command::Bench(args)) => run_bench(args).map(|()| 0),
        None => run_training(&cli.train),
    };
    program_kit::exit_code(done, |error| error.is::<Unavailable>())
}

/// As a rank of a launcher's, trains; started by hand, launches the ranks first. Gives the exit code.
fn run_training(args: &TrainArgs) -> Result<i32> {
    if launch::is_rank() {
        let mut config = Config::from_env()?;
        config.transport = args.transport.unwrap_or(config.transport);
        let group = ProcessGroup::from(Comm::from_env_with(config)?);
        let comm = group.comm();
        let here = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|text| text.parse().ok());
        let job = cli::prepare(args, comm.size(), here.unwrap_or(comm.size()))?;
        match args.device {
            Device::Cpu => {
                let mut gradients =
                    DistributedGradients::new(&group, &params::layout(&job.model), args.bucket_bytes())?;
                work(args, job, &mut CommRanks(comm), On::Cpu(&mut gradients))?;
            }
            Device::Cuda => {
                let gpu = Gpu::open(comm.local_rank())?;
                // Alive until the communicator has waited for what is on it.
                let _side = gpu.side.clone();
                let device = DeviceComm::new(comm, &gpu.context)?;
                let reducer = reducer::Device { comm: &device, blocks: args.comm_blocks };
                work(args, job, &mut CommRanks(comm), On::Gpu(gpu, &reducer))?;
            }
        }
        group.close()?;
        return Ok(0);
    }
    // Whatever is wrong shows once, here, before any rank starts.
    if args.device == Device::Cuda {
        device::count()?;
    }
    let job = cli::prepare(args, args.ranks, args.ranks)?;
    if args.ranks == 1 {
        match args.device {
            Device::Cpu => {
                let mut gradients = LocalGradients::new(&params::layout(&job.model));
                work(args, job, &mut OneRank, On::Cpu(&mut gradients))?;
            }
            Device::Cuda => work(args, job, &mut OneRank, On::Gpu(Gpu::open(0)?, &reducer::Alone))?,
        }
        return Ok(0);
    }
    drop(job);
    Ok(launch::Launcher::new(args.ranks).plain_rank0(true).run_self()?)
}

/// What a rank computes on, and what averages its gradients.
enum On<'a> {
    Cpu(&'a mut dyn Gradients),
    Gpu(Gpu, &'a dyn Reducer),
}

/// One rank's life.
fn work(args: &TrainArgs, mut job: Job, ranks: &mut dyn Ranks, on: On<'_>) -> Result<()> {
    let (config, threads) = (job.plan.config, job.plan.threads);
    threads.install().context("cannot start the threads")?;
    let mut state = match job.resume.take() {
        Some(checkpoint) => State::resume(checkpoint),
        None => State::new(job.model, config.seed),
    };
    let first = ranks.rank() == 0;
    let mut console;
    let report: &mut dyn Report = if first {
        console = Console::new(config.steps, state.step, args.log_every);
        &mut console
    } else {
        &mut Silent
    };
    if first {
        job.notes.iter().for_each(|note| report.note(note));
        report.note(&format!(
            "{}: {} characters; {} preset: {}; {:.2} M parameters",
            job.corpus.source,
            job.corpus.len(),
            job.plan.preset,
            job.model,
            state.model.values.len() as f64 * 1e-6
        ));
        report.note(&format!(
            "{} ranks x {}, {} steps of {} x {} characters; a uniform guess has loss {:.4}",
            ranks.size(),
            match &on {
                On::Cpu(_) => format!("{} threads", threads.count()),
                On::Gpu(..) => "1 GPU".to_owned(),
            },
            config.steps,
            config.batch,
            job.model.context,
            (job.model.vocab as f64).ln()
        ));
    }
    let (summary, drawn) = match on {
        On::Cpu(gradients) => (train(&job.plan, &mut state, &job.corpus, ranks, gradients, report)?, None),
        On::Gpu(gpu, reducer) => {
            let how = args.gpu_plan();
            let (plan, corpus) = (&job.plan, &job.corpus);
            gpu_train(plan, &how, gpu, &mut state, corpus, ranks, reducer, &job.sampling, report)?
        }
    };
    if first {
        let curve = job.out.join("loss.svg");
        let title = format!("{} preset, {} ranks, batch {}", job.plan.preset, ranks.size(), config.batch);
        plot::loss_curve(&curve, &title, &state.history)?;
        if args.sample_chars > 0 {
            let on_cpu =
                || sample::sample(&state.model, &job.corpus.tokenizer, "\n", args.sample_chars, &job.sampling, threads);
            let text = drawn.unwrap_or_else(on_cpu);
            report.note(&format!("--- sample ---\n{}\n--------------", text.trim_start_matches('\n')));
        }
        report.note(&format!(
            "done: {} steps on {} ranks in {:.0} s: validation loss {:.4}, training loss {:.4}, {:.1}k tokens/s, \
             communication {:.1} %; see {} and {}",
            state.step,
            ranks.size(),
            summary.elapsed.as_secs_f64(),
            summary.validation,
            summary.train.unwrap_or(f64::NAN),
            summary.tokens_per_second / 1e3,
            100.0 * summary.communication,
            curve.display(),
            job.plan.checkpoint.as_deref().unwrap_or(&job.out).display()
        ));
    }
    // The other ranks wait for rank 0's sample, so that nobody takes its absence for a failure.
    ranks.barrier()
}

fn run_bench(args: &BenchArgs) -> Result<()> {
    let threads = Threads::new(args.threads.unwrap_or_else(|| cli::default_threads(1)));
    threads.install().context("cannot start the threads")?;
    let mut notes = Vec::new();
    let corpus = cli::find_corpus(args.data.as_deref(), &mut notes)?;
    let batch = args.batch.unwrap_or(args.preset.train().batch);
    println!("{} preset, batch {batch}, {} threads, {} steps", args.preset, threads.count(), args.steps);
    println!("{}", bench::run(args.preset, batch, args.steps, threads, &corpus)?);
    Ok(())
}
