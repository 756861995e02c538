//! Waits for the ranks: passes signals on, and ends the others when one fails.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::SIGINT;

use super::signals::Signals;
use super::{Launcher, output};
use tinynccl_sys::threads::{deadline_after, left, poll};
use tinynccl_transport::bootstrap::Server;

/// Children are looked at this often even if no signal came.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// Stage of ending the ranks.
#[derive(Debug, Clone, Copy)]
enum Ending {
    /// No rank is being ended.
    No,
    /// The ranks may end by themselves until then.
    Grace(Instant),
    /// The ranks got SIGTERM and may go on until then.
    Terminated(Instant),
    /// The ranks got SIGKILL; we wait no longer than this for the kernel.
    Killed(Instant),
}

/// A rank that ended.
#[derive(Debug, Clone, Copy)]
struct Ended {
    rank: usize,
    status: ExitStatus,
    /// We had sent it a signal to end.
    made_to: bool,
}

struct Ranks<'a> {
    launcher: &'a Launcher,
    server: &'a Server,
    /// `None` once it has ended.
    children: Vec<Option<Child>>,
    /// In the order in which we noticed.
    ended: Vec<Ended>,
    /// The first of `ended` that [`Ranks::name_lost`] has not seen.
    told: usize,
    /// The failure that was named.
    named: Option<Ended>,
    ending: Ending,
    /// A signal came to us: the ranks end because of it, which is no failure of theirs.
    interrupted: bool,
}

/// Waits until all ranks have ended; the exit code of the launcher.
pub(super) fn supervise(children: Vec<Child>, launcher: &Launcher, server: &Server, signals: &Signals) -> i32 {
    let mut ranks = Ranks {
        launcher,
        server,
        children: children.into_iter().map(Some).collect(),
        ended: Vec::new(),
        told: 0,
        named: None,
        ending: Ending::No,
        interrupted: false,
    };
    let mut signals_seen = 0;
    loop {
        for came in signals.take() {
            signals_seen += 1;
            if signals_seen == 1 {
                ranks.interrupted = true;
                server.interrupted();
                let name = signal_hook::low_level::signal_name(came.signal).unwrap_or("a signal");
                output::say(&launcher.stderr, &format!("interrupted ({name})"));
            }
            // The terminal sends Ctrl-C to its whole foreground group: the ranks have it.
            if !(came.signal == SIGINT && came.from_kernel)
                && let Some(signal) = Signal::from_named_raw(came.signal)
            {
                ranks.kill(signal);
            }
            if signals_seen == 2 && matches!(ranks.ending, Ending::No | Ending::Grace(_)) {
                ranks.ending = Ending::Grace(Instant::now());
            }
        }
        ranks.reap();
        if ranks.children.iter().all(Option::is_none) || !ranks.escalate() {
            if launcher.elastic && ranks.ended.iter().any(|e| e.status.success()) {
                return 0;
            }
            ranks.name(true);
            return ranks.named.map_or(0, |named| exit_code(named.status));
        }
        let nap = ranks.deadline().map_or(LONGEST_NAP, |at| left(at).min(LONGEST_NAP));
        let mut fds = [PollFd::from_borrowed_fd(signals.fd(), PollFlags::IN)];
        if poll(&mut fds, nap).is_err() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Ranks<'_> {
    /// Takes note of the ranks that have ended.
    fn reap(&mut self) {
        for (rank, slot) in self.children.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            let status = match child.try_wait() {
                Ok(None) => continue,
                Ok(Some(status)) => status,
                // Somebody else waited for it: we cannot know how it ended.
                Err(_) => ExitStatus::from_raw(1 << 8),
            };
            *slot = None;
            if !status.success() {
                self.server.rank_failed(rank, how(status));
                log::info!("rank {rank} {}", how(status));
            }
            let made_to = !matches!(self.ending, Ending::No | Ending::Grace(_));
            self.ended.push(Ended { rank, status, made_to });
        }
        if self.launcher.elastic {
            return self.name_lost();
        }
        if let (Ending::No, true) = (self.ending, self.ended.iter().any(|e| !e.status.success())) {
            self.ending = Ending::Grace(deadline_after(self.launcher.grace));
        }
        self.name(false);
    }

    /// Names each rank that failed while others go on.
    fn name_lost(&mut self) {
        let others = self.children.iter().flatten().count();
        for Ended { rank, status, .. } in self.ended.iter().skip(self.told).filter(|e| !e.status.success()) {
            let (how, others) = (how(*status), if others == 1 { "1 goes on" } else { &format!("{others} go on") });
            output::say(&self.launcher.stderr, &format!("rank {rank} {how}; {others}"));
        }
        self.told = self.ended.len();
    }

    /// Names the rank that failed first, once that is known, or now. The ranks that wait for it fail as well, and may
    /// be gone before it is: the store has seen which one went first. Of those that it has not seen, one that a signal
    /// killed is the cause, and one that exited has noticed it.
    fn name(&mut self, now: bool) {
        let went = self.server.went();
        let place = |rank: usize| went.iter().position(|(other, _)| *other == rank).unwrap_or(went.len());
        let order = |e: &&Ended| (e.made_to, place(e.rank), e.status.signal().is_none());
        let Some(&first) = self.ended.iter().filter(|e| !e.status.success()).min_by_key(order) else { return };
        if let Some(named) = self.named {
            // The kernel closes a killed process's sockets before we learn of its end.
            if !self.interrupted && named.status.signal().is_none() && first.status.signal().is_some() {
                self.named = Some(first);
                let how = how(first.status);
                output::say(&self.launcher.stderr, &format!("rank {} {how}, which is likely the cause", first.rank));
            }
            return;
        }
        // Those that went before it: still on their way out, or without a report although they call it a success.
        let before = &went[..place(first.rank)];
        if !now && before.iter().any(|(rank, _)| self.children.get(*rank).is_some_and(Option::is_some)) {
            return;
        }
        self.named = Some(first);
        let others = self.children.iter().flatten().count();
        let then = if others == 0 { "" } else { "; the other ranks are being ended" };
        let status_of = |rank: usize| self.ended.iter().find(|e| e.rank == rank).map(|e| how(e.status));
        let cause = before.iter().find_map(|(rank, why)| Some((*rank, why.as_ref()?))).map(|(rank, why)| {
            let status = status_of(rank).unwrap_or_else(|| "has not ended".to_owned());
            format!("rank {rank} failed first ({why}; it {status}), then ")
        });
        if !self.interrupted {
            let cause = cause.unwrap_or_default();
            output::say(&self.launcher.stderr, &format!("{cause}rank {} {}{then}", first.rank, how(first.status)));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self.ending {
            Ending::No => None,
            Ending::Grace(at) | Ending::Terminated(at) | Ending::Killed(at) => Some(at),
        }
    }

    /// Takes the next step when its time has come; false when there is no further.
    fn escalate(&mut self) -> bool {
        if self.deadline().is_none_or(|at| Instant::now() < at) {
            return true;
        }
        let kill_grace = self.launcher.kill_grace;
        self.ending = match self.ending {
            Ending::No => Ending::No,
            Ending::Grace(_) => {
                self.name(true);
                self.kill(Signal::TERM);
                Ending::Terminated(deadline_after(kill_grace))
            }
            Ending::Terminated(_) => {
                output::say(&self.launcher.stderr, &format!("{} did not end after SIGTERM: killed", self.alive()));
                self.kill(Signal::KILL);
                Ending::Killed(deadline_after(Duration::from_secs(5)))
            }
            Ending::Killed(_) => {
                output::say(
                    &self.launcher.stderr,
                    &format!("{} cannot be killed (in the kernel?): leaving", self.alive()),
                );
                return false;
            }
        };
        true
    }

    fn alive(&self) -> String {
        let ranks: Vec<String> =
            self.children.iter().enumerate().filter(|(_, c)| c.is_some()).map(|(r, _)| r.to_string()).collect();
        if ranks.len() == 1 { format!("rank {}", ranks.concat()) } else { format!("ranks {}", ranks.join(", ")) }
    }

    fn kill(&self, signal: Signal) {
        for child in self.children.iter().flatten() {
            // Not waited for yet, so the number is still its own; it fails only if it has ended.
            let _ = kill_process(Pid::from_child(child), signal);
        }
    }
}

/// Exit code as a shell gives it.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(1)
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
            format!("was killed by signal {signal} ({name})")
        }
        (None, None) => "ended in an unknown way".to_owned(),
    }
}
