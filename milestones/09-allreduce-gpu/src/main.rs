//! Milestone 09: all-reduce between GPUs. See README.md beside Cargo.toml.

mod cli;
mod host;
mod measure;
mod one_shot;
mod run;
mod values;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use tinynccl::launch::{self, Launcher};
use tinynccl::{Error, cuda};

use cli::Options;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let options = Options::parse();
    let done = options.replay.around(launch::is_rank(), || start(&options));
    program_kit::exit_code(done, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}

fn start(options: &Options) -> Result<i32> {
    if launch::is_rank() {
        run::rank(options)?;
        return Ok(0);
    }
    // Checked before the ranks start, so the error appears once and not once per rank.
    let gpus = cuda::device_count()?;
    if gpus == 0 {
        return Err(Error::Unsupported { what: "CUDA".to_owned(), detail: "the driver sees no GPU".to_owned() }.into());
    }
    let ranks = if options.ranks == 0 { gpus.clamp(2, 8) } else { options.ranks };
    // What a rank has on the host at one time: its input, and the expected or the received output.
    let buffers = options.bytes.iter().copied().max().unwrap_or(0).saturating_mul(2 * ranks) as u64;
    program_kit::memory::suffices(format_args!("{ranks} ranks"), buffers, "a smaller --bytes, or fewer --ranks,")?;
    Ok(Launcher::new(ranks).plain_rank0(true).run_self()?)
}
