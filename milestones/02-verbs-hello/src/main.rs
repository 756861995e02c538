//! Milestone 02: RDMA verbs. See README.md beside Cargo.toml.

mod cli;
mod endpoint;
mod gid;
mod hello;
mod requests;
#[cfg(feature = "verbs")]
mod safe;
mod states;
mod steps;
mod talk;

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
    if let Some(side) = &cli.choice.side {
        verbs_kit::say::set_side(side);
    }
    match &cli.mode {
        Some(Mode::List) => list(&cli.choice),
        Some(Mode::Server { listen }) => talk::server(listen, &cli.choice, &cli.talk),
        Some(Mode::Client { address }) => talk::client(address, &cli.choice, &cli.talk),
        None => {
            list(&cli.choice)?;
            verbs_kit::say!("");
            // Both sides take the same steps, so only one of them prints all attributes.
            verbs_kit::alone::both_sides(&["--brief"], &[])
        }
    }
}

/// Prints the GID tables and the entry that a run would choose.
fn list(choice: &verbs_kit::choice::Choice) -> anyhow::Result<()> {
    use verbs_kit::{say, verbs};
    let devices = verbs::devices()?;
    let rows: Vec<_> = devices.iter().filter_map(|d| d.gids.as_ref().ok()).flatten().cloned().collect();
    for line in gid::table(&rows).lines() {
        say!("{line}");
    }
    for device in &devices {
        if let Err(cause) = &device.gids {
            say!("{}: {cause}", device.name);
        }
    }
    let local = verbs::Local::by_rank(choice, gid::rank)?;
    say!("");
    say!("chosen: {} port {}, GID {}: {}", local.context.name(), local.gid.port, local.gid, local.why);
    Ok(())
}
