//! Failures to reproduce, to hunt and to mend: one command each. The pages are in docs/book/src/labs.

mod card;
mod cases;
mod gpu;
mod labs;
mod outputs;
mod pages;
mod ranks;
mod waits;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use tinynccl::launch;

use card::scenes::{self, Scene};
use labs::Lab;

/// Exit status of a lab whose failure appeared.
const FAILED_AS_ANNOUNCED: u8 = 3;
/// Exit status of a lab that this machine cannot do; test runners know it as "skipped".
const CANNOT_RUN_HERE: u8 = 77;

/// Breaks a job in one way, so that you can hunt the cause.
///
/// Exit status of a lab: 3 its failure appeared; 0 it did not (as with --fixed); 1 something else happened; 2 wrong
/// usage; 77 this machine cannot run it, and the last line says why.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Leaves out the lines about the lab before and after a run.
    #[arg(long, hide = true)]
    bare: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[command(flatten)]
    Lab(Lab),
    /// Lists the labs.
    List,
    /// Reports from a trace (TINYNCCL_TRACE) how long messages took on each link, and which rank waited for which.
    Waits {
        /// The trace.
        trace: PathBuf,
    },
    /// Prints the packets of a trace (TINYROCE_TRACE).
    Packets {
        /// The trace.
        trace: PathBuf,
    },
    /// Shows what passes between two queue pairs of the card in user space.
    Wire {
        /// Request, and the fate of its packets.
        scene: Scene,
    },
    /// Runs labs and writes their output into a folder, with the parts masked that differ between runs.
    Outputs(Outputs),
}

#[derive(Debug, Args)]
pub(crate) struct Outputs {
    /// The folder: docs/book/src/labs/outputs.
    folder: PathBuf,
    /// Compares with the files in the folder instead of writing; exit status 1 and a message if they differ.
    #[arg(long)]
    check: bool,
    /// Only these labs.
    labs: Vec<String>,
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).format_timestamp(None).init();
    let matches = command().get_matches();
    let options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let run = || run(&options.command).unwrap_or_else(|error| ranks::failure(&error));
    let code = match (&options.command, matches.subcommand()) {
        // A rank is a part of a run.
        (Command::Lab(_), Some((lab, arguments))) if !options.bare && !launch::is_rank() => {
            pages::around(lab, arguments.get_flag("fixed"), run)
        }
        _ => run(),
    };
    ExitCode::from(code)
}

/// The command line: a lab is also called by the number of its page, `3` or `03`.
fn command() -> clap::Command {
    pages::Page::all().fold(Options::command(), |command, page| {
        let numbers = page.numbers();
        command.mut_subcommand(page.lab, |lab| lab.aliases(numbers))
    })
}

fn run(command: &Command) -> Result<u8> {
    match command {
        Command::Lab(lab) => lab.run(),
        Command::List => Ok(pages::list()),
        Command::Waits { trace } => waits::print(trace).map(|()| 0),
        Command::Packets { trace } => card::shown::print(trace).map(|()| 0),
        Command::Wire { scene } => scenes::run(*scene),
        Command::Outputs(options) => outputs::run(options),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lab_is_called_by_name_or_number() {
        for word in ["dead-rank", "03", "3"] {
            let matches = command().try_get_matches_from(["labs", word]).unwrap();
            assert_eq!(matches.subcommand_name(), Some("dead-rank"), "{word}");
        }
        assert!(command().try_get_matches_from(["labs", "99"]).is_err());
    }
}
