//! Checks the lines of a whiteboard task from standard input. The milestones' READMEs state the tasks, each with the
//! command that checks it; `cargo xtask interview` asks them.
//!
//! ```text
//! table        lines of words and numbers against those that were computed
//! tasks/ring   a schedule, proved by the verifier of tinynccl-plan
//! tasks/order  blocking sends and receives, played
//! tasks/…      figures: each computed by doing what the task describes
//! ```

mod table;
mod tasks;

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use program_kit::end::{green, red};
use tasks::Task;

/// Checks the lines that are written on a whiteboard: from the input, to its end (Ctrl-D).
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Print our lines instead.
    #[arg(long, global = true)]
    show: bool,
    #[command(subcommand)]
    task: Task,
}

fn main() -> ExitCode {
    program_kit::exit_code(run(&Options::parse()), |_| false)
}

/// 0: right, or shown. 1: wrong.
fn run(options: &Options) -> Result<i32> {
    let mut out = std::io::stdout();
    if options.show {
        writeln!(out, "{}", options.task.ours()?.join("\n"))?;
        return Ok(0);
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let faults = options.task.faults(&lines)?;
    let terminal = out.is_terminal();
    if faults.is_empty() {
        writeln!(out, "{}: {}", green("right", terminal), options.task.proof())?;
        return Ok(0);
    }
    for fault in &faults {
        writeln!(out, "{}: {fault}", red("wrong", terminal))?;
    }
    writeln!(out, "--show prints ours")?;
    Ok(1)
}
