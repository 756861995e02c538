//! Milestone 10: correctness and microbenchmark of every collective, in the manner of nccl-tests.

mod args;
mod busbw;
mod call;
mod case;
mod choose;
mod csv;
mod explain;
mod measure;
mod memory;
mod pattern;
mod pin;
mod plot;
mod probe;
mod record;
mod room;
mod row;
mod session;
mod split;
mod stats;
mod sweep;
mod table;

use std::process::ExitCode;
use std::thread;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Parser as _;
use program_kit::memory::Lack;
use program_kit::output::Output;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Comm, Error, ReduceOp};

use args::{Args, Plan};
use split::Split;

/// Exit code when the machine or the build lacks something that the options need.
const CANNOT_RUN_HERE: u8 = 3;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let args = Args::parse();
    let plan = args.plan().unwrap_or_else(|error| error.exit());
    match args.replay.around(launch::is_rank(), || run(&args, &plan)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            if !error.is::<room::Said>() {
                eprintln!("error: {error:#}");
            }
            match error.downcast_ref::<Error>() {
                Some(Error::Unsupported { .. }) => ExitCode::from(CANNOT_RUN_HERE),
                _ if error.is::<Lack>() || error.is::<room::Said>() => ExitCode::from(CANNOT_RUN_HERE),
                _ if error.is::<program_kit::Usage>() => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn run(args: &Args, plan: &Plan) -> Result<u8> {
    let ranks = args.ranks as usize;
    if plan.threads || !launch::is_rank() {
        // Reports errors here, once and before any rank starts, that every rank would report.
        for path in [&args.json, &args.plot].into_iter().flatten() {
            drop(Output::create(path)?);
        }
    }
    if plan.threads {
        plan.cases(ranks).map_err(anyhow::Error::msg)?;
        room::on_this_machine(args, plan, ranks)?;
        return verdict(threads(args, plan, ranks)?, true);
    }
    if !launch::is_rank() {
        plan.cases(ranks).map_err(anyhow::Error::msg)?;
        plan.config()?;
        room::on_this_machine(args, plan, ranks)?;
        let code = Launcher::new(ranks).plain_rank0(true).run_self()?;
        return Ok(u8::try_from(code).unwrap_or(1));
    }
    let comm = Comm::from_env_with(plan.config()?)?;
    // Our own launcher has looked.
    if std::env::var_os("TINYNCCL_UNIQUE_ID").is_none() {
        room::on_every_host(&comm, args, plan)?;
    }
    let first = comm.rank() == 0;
    verdict(rank(comm, args, plan)?, first)
}

/// One rank, from its communicator to the end. Its failure ends the other ranks too, which would wait for it.
fn rank(comm: Comm, args: &Args, plan: &Plan) -> Result<u64> {
    let wrong = match (&args.split, args.explain) {
        (Some(split), _) => part(&comm, split, args, plan),
        (None, true) => explain::run(&comm, args, plan),
        (None, false) => session::run(&comm, comm.rank() == 0, args, plan),
    };
    let wrong = wrong.inspect_err(|error| comm.abort(&format!("{error:#}")))?;
    comm.close()?;
    Ok(wrong)
}

/// Runs this rank's group of a split; returns the wrong elements of all groups.
fn part(comm: &Comm, split: &Split, args: &Args, plan: &Plan) -> Result<u64> {
    let Some(part) = comm.split(Some(split.colour(comm.rank() as u32)), 0)? else {
        bail!("a rank with a colour got no part")
    };
    let wrong = session::run(&part, comm.rank() == 0, args, plan)?;
    // Every rank of a group has the group's count: only its rank 0 adds it.
    let mut all = [if part.rank() == 0 { wrong } else { 0 }];
    comm.all_reduce_in_place(&mut all, ReduceOp::Sum)?;
    part.close()?;
    Ok(all[0])
}

/// Ranks as threads of this process.
fn threads(args: &Args, plan: &Plan, ranks: usize) -> Result<u64> {
    let comms = Comm::threads(ranks, plan.config()?)?;
    let outcomes: Vec<Result<u64>> = thread::scope(|scope| {
        let mut started = Vec::new();
        for comm in comms {
            let run = move || rank(comm, args, plan);
            // A rank without a thread drops its communicator, so the others fail instead of waiting.
            started.push(thread::Builder::new().spawn_scoped(scope, run).context("cannot start a rank's thread"));
        }
        started.into_iter().map(|t| t?.join().unwrap_or_else(|_| Err(anyhow!("a rank's thread panicked")))).collect()
    });
    // Prefer the root cause to errors that only report another rank's failure.
    let secondary = |e: &anyhow::Error| {
        matches!(
            e.downcast_ref::<Error>(),
            Some(Error::PeerLost { .. } | Error::Aborted { .. } | Error::Timeout { .. })
        )
    };
    let (mut wrong, mut failure) = (0, None);
    for outcome in outcomes {
        match outcome {
            Ok(n) => wrong = n,
            Err(e) if failure.as_ref().is_none_or(|f| secondary(f) && !secondary(&e)) => failure = Some(e),
            Err(_) => {}
        }
    }
    failure.map_or(Ok(wrong), Err)
}

/// Wrong values are a failure, which rank 0 alone reports.
fn verdict(wrong: u64, first: bool) -> Result<u8> {
    if wrong > 0 && first {
        bail!("{wrong} elements were wrong; see the lines that name rank and element above");
    }
    Ok(0)
}
