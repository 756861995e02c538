//! Milestone 05: one-sided RDMA. See README.md beside Cargo.toml.

mod cli;
mod connect;
mod one_sided;
mod requester;
mod target;

use std::process::ExitCode;

use clap::Parser;
use verbs_kit::unavailable;

use cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    unavailable::exit_code(run(&cli))
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    use cli::Mode;
    use verbs_kit::{alone, say, side::Side, verbs};

    if let Some(side) = &cli.choice.side {
        verbs_kit::say::set_side(side);
    }
    let patience = cli.choice.timeout;
    match &cli.mode {
        Some(Mode::Server { listen }) => {
            let local = verbs::Local::open(&cli.choice)?;
            let listener = alone::listener(listen)?;
            target::run(&local, Side::accept(&listener, patience)?, cli.bytes, patience)
        }
        Some(Mode::Client { address }) => {
            let local = verbs::Local::open(&cli.choice)?;
            requester::run(&local, Side::connect(address, patience)?, cli.bytes, patience)
        }
        None => {
            // Already printed here, not by a child.
            let local = verbs::Local::open(&cli.choice)?;
            say!("device {}, port {}, GID {}", local.context.name(), local.gid.port, local.gid);
            alone::both_sides(&[], &[])
        }
    }
}
