//! Milestone 04: a GPU's memory over verbs. See README.md beside Cargo.toml.

use std::process::ExitCode;

use clap::Parser;
use cuda_verbs::cli::Cli;
use cuda_verbs::why::Why;
use verbs_kit::unavailable;

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let result = cuda_verbs::run::run(&cli);
    let missing = result.as_ref().is_err_and(|error| error.downcast_ref::<Why>().is_some());
    let code = unavailable::exit_code(result);
    if missing { ExitCode::from(unavailable::EXIT_UNAVAILABLE) } else { code }
}
