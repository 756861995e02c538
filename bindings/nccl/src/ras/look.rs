//! The jobs of this host, as their processes report them.

use std::time::{Duration, Instant};

use cudarc::driver::sys;
use tinynccl::bootstrap::interface;
use tinynccl::status::view::{Comm, Rank, Source, State, View, view};
use tinynccl::status::{Finding, ask, findings, here, place};

use crate::env::{settings, version};

/// Waits shorter than this are nothing odd.
const AFTER: Duration = Duration::from_secs(5);

/// One look at the jobs.
#[derive(Debug, Default)]
pub(super) struct Look {
    pub(super) view: View,
    pub(super) findings: Vec<Finding>,
    /// Time that it took.
    pub(super) took: Duration,
    /// Name of this host, and the address by which others know it.
    pub(super) host: (String, String),
}

/// Asks all processes of this user on this host, each for at most `limit`. Where the sockets are turned off, or cannot
/// be trusted, this process is all there is.
pub(super) fn look(limit: Duration) -> Look {
    let begin = Instant::now();
    let config = settings::config().unwrap_or_default();
    let mut answers = ask::all(&place::folders(&config.status), limit);
    for why in &answers.unread {
        log::debug!("RAS: processes are not asked: {why}");
    }
    if answers.reports.is_empty() {
        answers.reports.push(here());
    }
    let mut view = view(&answers);
    // Those of CPUs have no place in NCCL's report.
    view.comms.retain(|comm| comm.ranks.iter().any(|rank| rank.device.is_some()));
    let findings = findings(&view, AFTER);
    let name = answers.reports.iter().find(|report| report.pid == std::process::id()).map(|own| own.host.clone());
    let name = name.unwrap_or_else(|| here().host);
    let outside = interface::local_addresses(&config).ok();
    let outside = outside.and_then(|all| all.iter().find(|one| !one.loopback).map(|one| one.ip.to_string()));
    Look { view, findings, took: begin.elapsed(), host: (name, outside.unwrap_or_else(|| "127.0.0.1".to_owned())) }
}

impl Look {
    /// Address of the host of a rank, as NCCL's report has it; its name where no address is known.
    pub(super) fn host(&self, rank: &Rank) -> String {
        let (name, address) = &self.host;
        match rank.place.address {
            Some(address) => address.to_string(),
            None if rank.place.host == *name => address.clone(),
            None => rank.place.host.clone(),
        }
    }
}

/// True for a rank whose process has reported it.
pub(super) fn reports(rank: &Rank) -> bool {
    rank.source == Source::Process
}

/// Error of a communicator, as NCCL's table has it.
pub(super) fn error(comm: &Comm) -> &'static str {
    let has = |state: State| comm.ranks.iter().any(|rank| rank.state == state);
    let begun = |rank: &Rank| rank.standing.as_ref().map(|standing| standing.begun);
    let mut reporting = comm.ranks.iter().filter(|rank| reports(rank)).map(begun);
    let first = reporting.next();
    match () {
        () if has(State::Failed) => "ERROR",
        () if has(State::Lost) || has(State::Stopped) || has(State::Silent) => "INCOMPLETE",
        () if comm.ranks.iter().any(|rank| !reports(rank)) => "INCOMPLETE",
        () if reporting.any(|other| Some(other) != first) => "MISMATCH",
        () => "OK",
    }
}

/// The version of NCCL that this library stands for, as text.
pub(super) fn nccl_version() -> String {
    let version = version::version();
    match version {
        10_000.. => format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100),
        _ => format!("{}.{}.{}", version / 1000, version / 100 % 10, version % 100),
    }
}

/// The version of CUDA that the driver offers; 0 if it is not known.
pub(super) fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: writes the number, and needs no context.
    let status = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if status == sys::CUresult::CUDA_SUCCESS { version } else { 0 }
}

/// The time of day here, as NCCL writes it: `2026-11-30 12:34:56`.
pub(super) fn now() -> String {
    // SAFETY: both functions write into memory of ours of the right size; a zeroed `tm` is valid.
    unsafe {
        let seconds = libc::time(std::ptr::null_mut());
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&raw const seconds, &raw mut parts).is_null() {
            return String::new();
        }
        let libc::tm { tm_year, tm_mon, tm_mday, tm_hour, tm_min, tm_sec, .. } = parts;
        let (year, month) = (tm_year + 1900, tm_mon + 1);
        format!("{year:04}-{month:02}-{tm_mday:02} {tm_hour:02}:{tm_min:02}:{tm_sec:02}")
    }
}
