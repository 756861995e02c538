//! One rank's life, from its start to the last line; started by hand, the ranks are launched first.

use std::time::Instant;

use anyhow::{Context, Result};
use tinynccl::process_group::ProcessGroup;
use tinynccl::{Comm, Config, launch};

use crate::cli::{self, Device, Job, TrainArgs};
use crate::cpu::{gradients, local::LocalSteps, step::Cpu};
use crate::data::Corpus;
use crate::elastic;
use crate::gpu;
use crate::report::{Report, loss_curve};
use crate::sample::{Sampling, sample};
use crate::train::{BeforeStep, Engine, Plan, State, train};

/// As a rank of a launcher's, trains; started by hand, launches the ranks first. Calls `before_step` on every rank.
/// Gives the exit code.
pub fn start(args: &TrainArgs, before_step: BeforeStep) -> Result<i32> {
    let mut comm;
    let job;
    // A spare trains once a rank is lost.
    let mut is_spare = false;
    if launch::is_rank() {
        let mut config = Config::from_env()?;
        config.transport = args.transport.unwrap_or(config.transport);
        comm = Comm::from_env_with(config.clone())?;
        if args.elastic {
            // For those who want to kill one.
            println!("rank {} is process {}", comm.rank(), std::process::id());
        }
        let here = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|text| text.parse().ok()).unwrap_or(comm.size());
        let ranks = comm.size().checked_sub(args.spare).filter(|&ranks| ranks > 0);
        let ranks = ranks.context("--spare: there must be ranks that are no spares")?;
        job = cli::prepare(args, ranks, here.saturating_sub(args.spare).max(1))?;
        if args.spare > 0 {
            let place = elastic::divide(&comm, args.spare)?;
            drop(comm);
            is_spare = place.is_err();
            comm = place.or_else(|ticket| Comm::from_ticket(&ticket, config))?;
        }
    } else {
        // Whatever is wrong shows once, here, before any rank starts.
        job = cli::prepare(args, args.ranks, args.ranks)?;
        if args.device == Device::Cuda {
            gpu::count()?;
        }
        if args.ranks + args.spare > 1 {
            drop(job);
            return Ok(launch::Launcher::new(args.ranks + args.spare)
                .plain_rank0(true)
                .elastic(args.elastic)
                .run_self()?);
        }
        comm = Comm::threads(1, Config::default())?.remove(0);
    }
    let Job { corpus, plan, resume, notes } = job;
    let plan = Plan { before_step, ..plan };
    plan.threads.install().context("cannot start the threads")?;
    let mut state = match resume {
        Some(checkpoint) => State::resume(checkpoint, &plan.config, comm.rank()),
        None => State::new(plan.model, &plan.config),
    };
    let mut group = ProcessGroup::from(comm);
    if group.rank() == 0 {
        notes.iter().for_each(|note| println!("{note}"));
    }
    // Steps at which the group changed, as far as this rank was there.
    let mut changes = Vec::new();
    let mut outcome = if is_spare {
        go_on(args, &group, &corpus, &plan, &mut state, &mut changes, "")
    } else {
        work(args, &group, &corpus, &plan, &mut state, &changes).map(|()| true)
    };
    while args.elastic
        && let Err(error) = outcome
    {
        let lost = format!("{error:#}");
        group = ProcessGroup::from(elastic::regroup(group.comm(), error, plan.places)?);
        outcome = go_on(args, &group, &corpus, &plan, &mut state, &mut changes, &lost);
    }
    if outcome?
        && args.spare > 0
        && let Err(error) = elastic::dismiss_spares(&mut state, group.comm())
    {
        log::warn!("{error:#}");
    }
    match group.close() {
        // A rank that is lost after the last step is no loss.
        Err(error) if args.elastic => log::warn!("{error}"),
        closed => closed?,
    }
    Ok(0)
}

/// The rest of the run, on the ranks of a new group, after the error `lost`. Returns false if a spare comes when all is
/// done.
fn go_on(
    args: &TrainArgs,
    group: &ProcessGroup,
    corpus: &Corpus,
    plan: &Plan,
    state: &mut State,
    changes: &mut Vec<usize>,
    lost: &str,
) -> Result<bool> {
    let Some(crc) = elastic::align(state, group.comm(), false)? else { return Ok(false) };
    changes.push(state.step);
    let plan = elastic::replan(plan, group.size());
    if group.rank() == 0 {
        println!("{lost}");
        println!(
            "step {:>5}  {} ranks go on with parameters {crc:08x}, {} sequences per step",
            state.step,
            group.size(),
            plan.config.batch
        );
    }
    work(args, group, corpus, &plan, state, changes).map(|()| true)
}

/// One rank's life in one group.
fn work(
    args: &TrainArgs,
    group: &ProcessGroup,
    corpus: &Corpus,
    plan: &Plan,
    state: &mut State,
    changes: &[usize],
) -> Result<()> {
    let started = Instant::now();
    let (comm, config, model) = (group.comm(), plan.config, plan.model);
    let report = if group.rank() == 0 { Report::new(config.steps, plan.log_every) } else { Report::quiet() };
    let (source, size, preset, millions) =
        (&corpus.source, corpus.size(), plan.preset, state.model.values.len() as f64 * 1e-6);
    report.note(&format!("{source}: {size} characters; {preset} preset: {model}; {millions:.2} M parameters"));
    let on = match args.device {
        Device::Cpu => format!("{} threads", plan.threads.count()),
        Device::Cuda => "1 GPU".to_owned(),
    };
    let (ranks, steps, batch, context, guess) =
        (group.size(), config.steps, config.batch, model.context, (model.vocab as f64).ln());
    let apart = config.outer.map_or(String::new(), |outer| format!(", {} between outer steps", outer.local_steps));
    report.note(&format!(
        "{ranks} ranks x {on}, {steps} steps of {batch} x {context} characters{apart}; a uniform guess has loss \
         {guess:.4}"
    ));
    let mut engine: Box<dyn Engine> = match (args.device, config.outer) {
        (Device::Cpu, Some(outer)) => Box::new(LocalSteps::new(plan, outer, corpus, comm, &state.model)?),
        (Device::Cpu, None) => {
            let gradients = gradients::of_group(group, &state.model.layout, plan.bucket_bytes)?;
            Box::new(Cpu::new(plan, corpus, comm, gradients)?)
        }
        (Device::Cuda, _) => gpu::engine(plan, &args.gpu, state, corpus, comm)?,
    };
    let validation = train(plan, state, corpus, comm, &mut *engine, &report)?;
    if args.elastic {
        let crc = elastic::same_parameters(state, comm)?;
        report.note(&format!("parameters {crc:08x} on all {ranks} ranks"));
    }
    if group.rank() == 0 {
        let curve = args.out.join("loss.svg");
        let title = format!("{preset} preset, {ranks} ranks, batch {batch}");
        loss_curve(&curve, &title, &state.history, changes)?;
        if args.sample_chars > 0 {
            let how = Sampling { temperature: args.temperature, seed: config.seed };
            let logits = |tokens: &[u32], last| engine.logits(&state.model, tokens, last);
            let text = sample(&corpus.tokenizer, model.context, args.sample_chars, how, logits)?;
            report.note(&format!("--- sample ---\n{}\n--------------", text.trim_start_matches('\n')));
        }
        let (tokens_per_second, communication) = engine.pace()?.rates(config.batch * model.context);
        report.note(&format!(
            "done: {} steps on {ranks} ranks in {:.0} s: validation loss {validation:.4}, training loss {:.4}, \
             {:.1}k tokens/s, communication {:.1} %; see {} and {}",
            state.step,
            started.elapsed().as_secs_f64(),
            state.history.iter().rev().find_map(|point| point.train).unwrap_or(f64::NAN),
            tokens_per_second / 1e3,
            100.0 * communication,
            curve.display(),
            plan.checkpoint.as_deref().unwrap_or(&args.out).display()
        ));
    }
    // The other ranks wait for rank 0's sample, so that no rank takes its absence for a failure.
    Ok(comm.barrier()?)
}
