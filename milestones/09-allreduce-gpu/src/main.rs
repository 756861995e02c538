//! Milestone 09: all-reduce between GPUs. See README.md beside Cargo.toml.

mod cli;
mod host;
mod measure;
mod run;
mod values;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Error, cuda};

use cli::Options;

/// Exit status of a program that lacks what it needs. Test runners know 77 as "skipped".
const EXIT_UNAVAILABLE: u8 = 77;

fn main() -> ExitCode {
    env_logger::init();
    match start(&Options::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            let missing = matches!(error.downcast_ref(), Some(Error::Unsupported { .. }));
            ExitCode::from(if missing { EXIT_UNAVAILABLE } else { 1 })
        }
    }
}

fn start(options: &Options) -> Result<u8> {
    if launch::is_rank() {
        run::rank(options)?;
        return Ok(0);
    }
    // Here, so that it is said once and not by every rank.
    let gpus = cuda::device_count()?;
    if gpus == 0 {
        return Err(Error::Unsupported { what: "CUDA".to_owned(), detail: "the driver sees no GPU".to_owned() }.into());
    }
    let ranks = if options.ranks == 0 { gpus.clamp(2, 8) } else { options.ranks };
    let code = Launcher::new(ranks).plain_rank0(true).run_self()?;
    Ok(u8::try_from(code).unwrap_or(1))
}
