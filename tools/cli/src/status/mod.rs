//! `status`: the jobs that run on this host, the call that each rank is in, and the rank that the others wait for.

mod ras;
mod records;
mod torch;
pub(crate) mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use program_kit::end::Usage;
use serde::Serialize;
use tinynccl::Config;
use tinynccl::status::ask::{self, Answers};
use tinynccl::status::view::{View, view};
use tinynccl::status::{Finding, findings, place, text};

/// Exit status: a rank waits, a communicator has failed, or a process is gone or stopped.
const ODD: i32 = 1;
/// Exit status: there is no job.
const NONE: i32 = 3;

/// Shows the jobs of this user on this host: communicators, the call that each rank is in and since when, and the rank
/// that the others wait for. It reads the reports of the processes from their sockets (TINYNCCL_STATUS), and changes
/// nothing in them.
///
/// Exit status: 0 nothing odd, 1 a rank waits or a call failed, 2 wrong usage, 3 no job.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    what: What,
    /// Writes JSON.
    #[arg(long)]
    json: bool,
    /// Makes the processes write the last 4,096 calls of each rank, to DIR/JOB/rank_RANK.json, and writes them for
    /// PyTorch's flight-recorder analyser (torchfrtrace DIR/JOB).
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "tinynccl-dump")]
    dump: Option<PathBuf>,
    /// Writes a folder's records for PyTorch's analyser, too.
    #[arg(long, requires = "address", conflicts_with = "dump")]
    torch: bool,
}

/// The jobs that are looked at, and how.
#[derive(Debug, Args)]
struct What {
    /// A process id: the jobs of this process alone. HOST:PORT: the report of NCCL's RAS protocol there, as libnccl.so
    /// and NVIDIA's library give it (localhost:28028). A folder: the records in it (--dump, or TINYNCCL_DUMP).
    address: Option<String>,
    /// Adds the last calls of each rank, and the events of each process.
    #[arg(long, short)]
    verbose: bool,
    /// Shorter waits count as normal.
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    after: Duration,
    /// Time limit for the answer of a process.
    #[arg(long, value_name = "SECONDS", default_value = "3", value_parser = seconds)]
    timeout: Duration,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected seconds, like 2.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "expected a finite number of seconds, 0 or more".to_owned())
}

/// The output of `--json`.
#[derive(Serialize)]
struct Document<'a> {
    /// Nothing is odd.
    ok: bool,
    findings: &'a [Finding],
    #[serde(flatten)]
    view: &'a View,
}

/// A page, and the exit status that belongs to it.
struct Look {
    page: String,
    code: i32,
}

/// Place where processes are asked: the folders of their sockets, and the process that was named.
struct Asked {
    folders: Vec<PathBuf>,
    pid: Option<u32>,
}

/// The exit status.
///
/// # Errors
/// Errors of [`look`], and of a record that cannot be written.
pub(crate) fn run(options: &Options) -> Result<i32> {
    let Options { what, json, dump, torch } = options;
    let Look { page, code } = match (dump, what.address.as_deref().map(Path::new)) {
        (Some(into), _) => records::dump(&asked(what)?, into, what.timeout)?,
        (None, Some(folder)) if *torch => {
            records::for_torch(folder)?;
            look(what, *json)?
        }
        _ => look(what, *json)?,
    };
    crate::print(&page)?;
    Ok(code)
}

/// Looks once.
///
/// # Errors
/// No folder of sockets can be read, or other users can write to it; no process answers at the address; a record is
/// none.
fn look(what: &What, json: bool) -> Result<Look> {
    match what.address.as_deref() {
        Some(folder) if Path::new(folder).is_dir() => {
            let answers = records::answers(Path::new(folder))?;
            return show(&answers, "no job: the records have no communicators", what, json);
        }
        Some(address) if address.contains(':') => return ras::look(address, what, json),
        _ => {}
    }
    let Asked { folders, pid } = asked(what)?;
    let answers = ask::all(&folders, what.timeout);
    if let (Some(why), true) = (answers.unread.first(), answers.unread.len() == folders.len()) {
        bail!("{why}");
    }
    for why in &answers.unread {
        eprintln!("not looked at: {why}");
    }
    let places: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let of = pid.map_or_else(String::new, |pid| format!(" in process {pid}"));
    let none = format!("no job{of}: no process of this user has a communicator (sockets in {})", places.join(", "));
    show(&of_process(answers, pid), &none, what, json)
}

/// Returns the place where processes are asked.
fn asked(what: &What) -> Result<Asked> {
    let pid = match what.address.as_deref() {
        Some(text) => match text.parse::<u32>() {
            Ok(pid) => Some(pid),
            Err(_) => bail!(Usage(format!("{text:?} is no address: expected a process id, HOST:PORT, or a folder"))),
        },
        None => None,
    };
    let folders = place::folders(&Config::from_env()?.status);
    if folders.is_empty() {
        bail!(Usage("TINYNCCL_STATUS=off: there are no sockets to look at".to_owned()));
    }
    Ok(Asked { folders, pid })
}

/// The view of the answers, or `none` if there is no job in them.
fn show(answers: &Answers, none: &str, what: &What, json: bool) -> Result<Look> {
    let view = view(answers);
    let found = findings(&view, what.after);
    let empty = view.comms.is_empty() && view.starts.is_empty() && view.silent.is_empty();
    let page = if json {
        let document = Document { ok: found.is_empty(), findings: &found, view: &view };
        serde_json::to_string_pretty(&document)? + "\n"
    } else if empty {
        format!("{none}\n")
    } else {
        text::page(&view, &found, what.verbose)
    };
    let code = match (empty, found.is_empty()) {
        (true, _) => NONE,
        (false, true) => 0,
        (false, false) => ODD,
    };
    Ok(Look { page, code })
}

/// Keeps the jobs of one process, with the other processes in them.
fn of_process(mut answers: Answers, pid: Option<u32>) -> Answers {
    let Some(pid) = pid else { return answers };
    let jobs: Vec<String> = answers
        .reports
        .iter()
        .filter(|report| report.pid == pid)
        .flat_map(|report| report.jobs.iter().map(|job| job.job.clone()))
        .collect();
    for report in &mut answers.reports {
        report.comms.retain(|member| jobs.contains(&member.job));
        report.jobs.retain(|job| jobs.contains(&job.job));
        if report.pid != pid {
            report.starts.clear();
        }
    }
    answers.reports.retain(|report| report.pid == pid || !report.comms.is_empty());
    let place =
        |other: u32| answers.reports.iter().flat_map(|r| &r.jobs).any(|j| j.ranks.iter().any(|p| p.pid == other));
    let silent: Vec<_> =
        answers.silent.iter().filter(|silent| silent.pid == pid || place(silent.pid)).cloned().collect();
    Answers { silent, ..answers }
}
