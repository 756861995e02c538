//! Milestone 16: a character-level GPT trained with data parallelism.

use std::process::ExitCode;

use clap::Parser;
use ddp_gpt::cli::{Cli, Command};
use ddp_gpt::cpu::bench;
use ddp_gpt::run;
use tinynccl::{Error, launch};

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(Command::Bench(args)) => bench::run(args).map(|()| 0),
        None => cli.train.replay.around(launch::is_rank(), || run::start(&cli.train, |_, _| Ok(()))),
    };
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}
