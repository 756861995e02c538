//! `--replay FILE.html`: the run's page, made when the run is over.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use program_kit::Usage;
use program_kit::output::Output;

use crate::{EVENTS, Recording, page};

const TRACE: &str = "TINYNCCL_TRACE";
const KEPT: &str = "TINYNCCL_TRACE_EVENTS";
/// Events that each communicator of a rank keeps: with more, a page of a few ranks would be cut anyway.
const EACH: &str = "32768";

/// The option of programs that start ranks.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Replay {
    /// Writes a page that plays what every rank did. The run's trace stays beside it, as FILE.trace.json, or where
    /// TINYNCCL_TRACE says.
    #[arg(long, value_name = "FILE.html")]
    replay: Option<PathBuf>,
}

impl Replay {
    /// Does the work of `main`, and then makes the page if it was asked for, also of a run that failed. To be called
    /// before this process has a second thread. `is_rank`: a launcher started this process as a rank.
    ///
    /// # Errors
    /// Those of `main`, or the page cannot be written.
    pub fn around<T>(&self, is_rank: bool, main: impl FnOnce() -> Result<T>) -> Result<T> {
        let Some(path) = &self.replay else { return main() };
        if is_rank {
            // The program that started the ranks makes the page when they are done.
            if std::env::var_os("TINYNCCL_UNIQUE_ID").is_none() || std::env::var_os(TRACE).is_none() {
                bail!(Usage(format!(
                    "--replay: another launcher started this rank, and no rank knows when all are done: set {TRACE}=FILE, \
                     then tinynccl-cli replay FILE --html {}",
                    path.display()
                )));
            }
            return main();
        }
        let output = Output::create(path)?;
        let trace = record(path)?;
        let outcome = main();
        let text = match made(&trace) {
            Ok((text, said)) => {
                output.finish(text.as_bytes())?;
                format!("replay: {} plays {said}; its trace is {}", path.display(), trace.display())
            }
            Err(_) if !trace.exists() => "replay: no page: no communicator was made".to_owned(),
            Err(error) if outcome.is_err() => format!("replay: no page: {error:#}"),
            Err(error) => return Err(error),
        };
        let _ = writeln!(std::io::stderr(), "{text}");
        outcome
    }
}

/// Sets what lets all ranks record, unless it is set. The trace's path.
fn record(page: &Path) -> Result<PathBuf> {
    let wanted = std::env::var_os(TRACE).filter(|path| !path.is_empty());
    if wanted.as_ref().is_some_and(|path| path.to_string_lossy().contains("%r")) {
        bail!(Usage(format!("--replay reads one trace: {TRACE} has %r, a file for each rank")));
    }
    let trace = wanted.map_or_else(|| page.with_extension("trace.json"), PathBuf::from);
    let trace = std::path::absolute(&trace).with_context(|| trace.display().to_string())?;
    // What an earlier run left must not be taken for this one's.
    match std::fs::remove_file(&trace) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("removing the trace of an earlier run, {}", trace.display()));
        }
        _ => {}
    }
    set(TRACE, trace.as_os_str())?;
    if std::env::var_os(KEPT).is_none() {
        set(KEPT, EACH.as_ref())?;
    }
    Ok(trace)
}

/// Sets a variable, for this process and those it starts.
fn set(name: &str, value: &std::ffi::OsStr) -> Result<()> {
    let threads = std::fs::read_dir("/proc/self/task").context("counting threads")?.count();
    if threads != 1 {
        bail!("--replay: {threads} threads run already, expected one: set {name}={} yourself", value.display());
    }
    // SAFETY: no other thread reads or writes the environment, because there is none: counted above, and only this one
    // could start another.
    unsafe { std::env::set_var(name, value) };
    Ok(())
}

/// The page of a trace, and what it plays.
fn made(trace: &Path) -> Result<(String, String)> {
    let run = Recording::read(trace, EVENTS)?;
    let said = run.to_string();
    Ok((page(&[run]), said))
}
