//! Milestone 16's training, of which ranks and spares are killed before steps of the reader's choice.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Parser as _;
use ddp_gpt::cli::Cli;
use program_kit::Usage;
use rustix::process::{Pid, Signal, kill_process};
use tinynccl::{Comm, launch};

use crate::FAILED_AS_ANNOUNCED;

const RANKS: usize = 4;
const SPARES: usize = 2;
const STEPS: usize = 60;
/// Folder of the loss curve.
const OUT: &str = "out/kill-any-rank";
/// Long enough to learn something from.
const TEXT: &str = include_str!("../../../../milestones/16-ddp-gpt/README.md");
/// Deadline for the spares to be there.
const READY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Kill no process.
    #[arg(long)]
    fixed: bool,
    /// Processes to kill, each with the step before which it dies. 0 to 3 train at first, 4 and 5 are the spares.
    #[arg(long, value_name = "RANK@STEP", value_delimiter = ',', default_value = "5@10,0@20,2@30")]
    kill: Vec<Death>,
}

/// End of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Death {
    rank: usize,
    step: usize,
}

impl FromStr for Death {
    type Err = String;

    fn from_str(text: &str) -> Result<Death, String> {
        let parts = text.split_once('@').and_then(|(rank, step)| Some((rank.parse().ok()?, step.parse().ok()?)));
        match parts {
            Some((rank, step)) if rank < RANKS + SPARES && step < STEPS => Ok(Death { rank, step }),
            _ => Err(format!("expected a rank below {}, '@' and a step below {STEPS}, as 0@20", RANKS + SPARES)),
        }
    }
}

/// The deaths of this run.
static DEATHS: OnceLock<Vec<Death>> = OnceLock::new();

pub(crate) fn run(options: &Options) -> Result<u8> {
    let deaths = if options.fixed { Vec::new() } else { options.kill.clone() };
    let several = |death: &&Death| deaths.iter().filter(|other| other.rank == death.rank).count() > 1;
    if let Some(Death { rank, .. }) = deaths.iter().find(several) {
        bail!(Usage(format!("--kill names rank {rank} twice")));
    }
    let text = Path::new(OUT).join("text.txt");
    if launch::is_rank() {
        let rank = std::env::var("RANK").context("RANK")?;
        fs::write(place(rank.parse()?), std::process::id().to_string())?;
    } else {
        fs::create_dir_all(OUT).and_then(|()| fs::write(&text, TEXT)).with_context(|| format!("writing {OUT}"))?;
    }
    let any = !deaths.is_empty();
    DEATHS.set(deaths).map_err(|_| anyhow!("a second run in one process"))?;
    // With the preset's rate, three times as high, roundings alone show in the third digit after sixty steps.
    let line = format!(
        "ddp-gpt --elastic --ranks {RANKS} --spare {SPARES} --preset tiny --lr 0.003 --steps {STEPS} --threads 1 \
         --log-every 20 --eval-every 20 --sample-chars 0 --out {OUT} --data {}",
        text.display()
    );
    let arguments = Cli::try_parse_from(line.split_whitespace())?.train;
    match ddp_gpt::run::start(&arguments, before_step)? {
        0 if any && !launch::is_rank() => Ok(FAILED_AS_ANNOUNCED),
        0 => Ok(0),
        code => Err(anyhow!("the job ended with code {code}: no rank has finished")),
    }
}

/// File with the number of a rank's process, until that is killed.
fn place(rank: usize) -> PathBuf {
    Path::new(OUT).join(format!("{rank}.pid"))
}

/// The group's rank 0 kills whatever is to die before this step: itself, or a process that is somewhere in its own.
fn before_step(comm: &Comm, step: usize) -> Result<()> {
    if comm.rank() != 0 {
        return Ok(());
    }
    if step == 0 {
        // A spare that does not know the group yet could not find it without rank 0.
        let began = Instant::now();
        while comm.waiting() < SPARES {
            ensure!(began.elapsed() < READY, "{} of {SPARES} spares wait after {READY:?}", comm.waiting());
            thread::sleep(Duration::from_millis(1));
        }
    }
    for death in DEATHS.get().into_iter().flatten().filter(|death| death.step <= step) {
        let file = place(death.rank);
        // None if it is dead: a step may be repeated.
        let Ok(text) = fs::read_to_string(&file) else { continue };
        fs::remove_file(&file)?;
        let process = text.parse().ok().and_then(Pid::from_raw).with_context(|| format!("{file:?}: {text:?}"))?;
        kill_process(process, Signal::KILL)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_is_a_rank_and_a_step() {
        assert_eq!("4@7".parse(), Ok(Death { rank: 4, step: 7 }));
        for wrong in ["", "4", "4@", "@7", "6@7", "4@60", "4@-1"] {
            assert!(wrong.parse::<Death>().is_err(), "{wrong}");
        }
    }
}
