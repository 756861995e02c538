//! The driver of the storm: starts, kills and stops processes, and compares what they report.

use std::io::Write;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use program_kit::port::Port;
use rustix::process::Signal;

use super::history::{Era, History};
use super::process::{Fate, Line, Process, SHORTEST_DEADLINE};
use super::{EXCLUDED, MOST, ROOM, TICKET, seconds};
use crate::storm::setting;
use crate::survive::{HEARTBEAT, LIMIT};

/// A process that was stopped for longer may be left out: far below the four heartbeats of silence that it takes.
const LONG: Duration = HEARTBEAT.saturating_mul(2);
/// Most descriptors, threads and mappings of a process, whatever the number of changes behind it.
const POSSESSIONS: [usize; 3] = [64, 24, 16];
/// [`POSSESSIONS`] over rails and RDMA, whose links have several streams or queue pairs each.
const MORE: [usize; 3] = [200, 48, 16];

type Random<'a> = &'a mut dyn FnMut(usize) -> usize;

/// A group of processes, killed when the test ends, however it ends.
pub(super) struct Storm {
    /// Held while rank 0 has yet to listen.
    port: Port,
    transport: String,
    seed: u64,
    all: Vec<Process>,
    lines: Receiver<Line>,
    sender: Sender<Line>,
    log: Vec<String>,
    history: History,
    /// The group of the last round, and the processes in it that were lost since.
    group: u64,
    lost: usize,
    /// The group in which a process was stopped for so long that it proposes nothing without a majority of all.
    strict: u64,
    /// No process was stopped for long since the last round.
    calm: bool,
    ending: bool,
    events: usize,
    /// Print all lines of the processes.
    show: bool,
    /// Files of shared memory before.
    files: Vec<String>,
}

impl Storm {
    /// Starts `ranks` ranks, and waits until they train.
    pub(super) fn start(transport: &str, seed: u64, ranks: usize) -> Storm {
        let (sender, lines) = channel();
        let mut storm = Storm {
            port: Port::loopback(),
            transport: transport.to_owned(),
            seed,
            all: Vec::new(),
            lines,
            sender,
            log: Vec::new(),
            history: History::default(),
            group: 0,
            lost: 0,
            strict: 0,
            calm: true,
            ending: false,
            events: 0,
            show: setting("SHOW", 0) == 1,
            files: shared_memory_files(),
        };
        for rank in 0..ranks {
            let environment = storm.port.environment(rank, ranks);
            storm.add(|command| command.envs(environment));
        }
        storm.settle();
        storm
    }

    fn add(&mut self, set: impl FnOnce(&mut Command) -> &mut Command) -> usize {
        let number = self.all.len();
        self.all.push(Process::start(number, &self.transport, &self.sender, set));
        self.note(format!("process {number} starts"));
        number
    }

    fn note(&mut self, event: String) {
        let line = format!("{:.3} s: {event}", seconds());
        eprintln!("storm: {line}");
        self.log.push(line);
    }

    /// Ends the test with all that is known.
    fn fail(&self, why: &str) -> ! {
        let mut text = format!(
            "{why}\nstorm over {}, TINYNCCL_TEST_STORM_SEED={}, {} events, the last of them:\n",
            self.transport, self.seed, self.events
        );
        self.log.iter().skip(self.log.len().saturating_sub(100)).for_each(|line| text.push_str(&format!("  {line}\n")));
        for (number, process) in self.all.iter().enumerate() {
            let recent = number + 2 * MOST >= self.all.len();
            if recent || matches!(process.fate, Fate::Runs | Fate::Stopped) {
                let Process { fate, group, step, possessions, .. } = process;
                text.push_str(&format!("process {number}: {fate:?}, step {step} of {group}, has {possessions:?}\n"));
                process.words.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
            }
        }
        panic!("{text}");
    }

    /// The processes that run.
    fn running(&self) -> Vec<usize> {
        (0..self.all.len()).filter(|&number| self.all[number].fate == Fate::Runs).collect()
    }

    /// Handles what the processes report, until `there`; fails with `what` after [`LIMIT`].
    fn until(&mut self, what: &str, mut there: impl FnMut(&mut Storm) -> bool) {
        let start = Instant::now();
        while !there(self) {
            match self.lines.recv_timeout(LIMIT.saturating_sub(start.elapsed())) {
                Ok((number, line)) => self.take(number, line),
                Err(_) => self.fail(&format!("no {what} within {LIMIT:?}")),
            }
        }
    }

    /// A line of a process, or the end of its output.
    fn take(&mut self, number: usize, line: Option<String>) {
        match line {
            Some(line) => self.hear(number, line),
            None => self.end(number),
        }
    }

    /// A line of a process.
    fn hear(&mut self, number: usize, line: String) {
        if self.show {
            eprintln!("process {number}: {line}");
        }
        // A dead rank or newcomer is noticed: no rank waits for it until a deadline.
        let own = line.contains("@error ") || line.contains(": grow: ");
        if own && self.calm && is_at_deadline(&line) {
            self.all[number].keep(line);
            self.fail(&format!("process {number} has waited to a deadline, though none was stopped for long"));
        }
        let message = line.split_once('@').map(|(_, message)| message.trim().to_owned());
        let process = &mut self.all[number];
        let Some(message) = message else { return process.keep(line) };
        let (word, rest) = message.split_once(' ').unwrap_or((&message, ""));
        let words: Vec<u64> = rest.split([' ', ',']).map_while(|word| word.parse().ok()).collect();
        let lives = matches!(process.fate, Fate::Runs | Fate::Stopped);
        match (word, &*words) {
            ("ticket", _) => rest.clone_into(&mut process.ticket),
            ("changed", &[group, start, hash, from, ref members @ ..]) => {
                process.group = group;
                let era = Era { start, hash, from, members: members.to_vec() };
                self.history.note(group, era).unwrap_or_else(|why| self.fail(&why));
            }
            ("at", &[group, step, descriptors, threads, mappings]) => {
                (process.group, process.step) = (group, step);
                process.possessions = [descriptors, threads, mappings].map(|count| count as usize);
                // Too often for the words of a failure.
                return;
            }
            ("excluded", _) if process.may_leave || !lives => {}
            ("refused", _) if process.may_leave || !lives || self.ending => {}
            ("ended", &[group, step, hash]) => {
                process.step = step;
                match self.history.hash_before(group, step) {
                    Ok(right) if right == hash => {}
                    Ok(right) => self.fail(&format!("process {number}: weights {hash} at the end, not {right}")),
                    Err(why) => self.fail(&why),
                }
            }
            ("error", _) => {}
            _ => {
                process.keep(message);
                self.fail(&format!("process {number}: its last line is an error here"))
            }
        }
        let process = &mut self.all[number];
        process.keep(message);
    }

    /// The end of a process.
    fn end(&mut self, number: usize) {
        let process = &mut self.all[number];
        let status = process.child.wait().expect("its end");
        let excluded = status.code() == Some(EXCLUDED);
        process.fate = match process.fate {
            Fate::Killed => Fate::Killed,
            _ if status.success() && self.ending => Fate::Ended,
            _ if excluded && (process.may_leave || self.ending) => Fate::Left,
            _ => self.fail(&format!("process {number} has ended by itself: {status}")),
        };
        self.note(format!("process {number} has ended: {status}"));
    }

    /// Waits until all processes that run are in one group (as many as have room in it) that goes on.
    fn settle(&mut self) {
        // Reports that have come meanwhile say nothing about the time after the last event.
        while let Ok((number, line)) = self.lines.try_recv() {
            self.take(number, line);
        }
        let before = self.all.iter().map(|process| process.step).max().unwrap_or(0);
        self.until("group of all that run, which goes on", |storm| {
            let running = storm.running();
            let size = running.len().min(ROOM);
            let Some(group) = running.iter().map(|&number| storm.all[number].group).find(|group| {
                let era = storm.history.eras.get(group);
                era.is_some_and(|era| {
                    era.members.len() == size && era.members.iter().all(|&member| running.contains(&(member as usize)))
                })
            }) else {
                return false;
            };
            let most = if matches!(storm.transport.as_str(), "shm" | "tcp") { POSSESSIONS } else { MORE };
            let mut members = storm.history.eras[&group].members.iter().map(|&member| &storm.all[member as usize]);
            members.all(|one| {
                let few = one.possessions.iter().zip(most).all(|(has, most)| *has <= most);
                one.group == group && one.step > before + 2 && few
            }) && {
                storm.group = group;
                true
            }
        });
        let group = self.group;
        if let Err(why) = self.history.hash_before(group, self.history.eras[&group].start) {
            self.fail(&why);
        }
        self.lost = 0;
        let names = self.members();
        // They have made calls with the others since.
        names.iter().for_each(|&member| self.all[member].may_leave = false);
        self.note(format!("the group is {names:?}"));
    }

    /// The members of the group of the last round.
    fn members(&self) -> Vec<usize> {
        self.history
            .eras
            .get(&self.group)
            .map_or_else(Vec::new, |era| era.members.iter().map(|&one| one as usize).collect())
    }

    /// True if one more member of the group may be lost: a rank with the weights stays, and wherever a process is or
    /// was stopped, a majority that runs.
    fn may_lose(&self, stops: bool) -> bool {
        let (size, lost) = (self.members().len(), self.lost + 1);
        let majority = stops || self.strict == self.group || self.all.iter().any(|one| one.fate == Fate::Stopped);
        if majority { size > 2 * lost } else { size > lost }
    }

    /// A few events, a moment or longer apart, and what must come of them.
    pub(super) fn round(&mut self, random: Random<'_>) {
        self.calm = true;
        for _ in 0..=random(3) {
            let few = self.running().len() < 4;
            match random(60) {
                0..12 => (0..=random(3)).for_each(|_| self.come(random)),
                12..20 => self.brief_newcomer(random),
                20..28 if few => self.come(random),
                20..38 => self.kill(random),
                38..44 => (0..=random(4)).for_each(|_| self.kill(random)),
                44..58 => self.stop_shortly(random),
                58 => self.stop_for_longer(random),
                _ => self.stop_for_good(random),
            }
            let longest = [1, 5, 50, 500][random(4)];
            pause(random(longest));
        }
        self.settle();
        for number in (0..self.all.len()).filter(|&number| self.all[number].fate == Fate::Stopped).collect::<Vec<_>>() {
            self.proceed(number);
            self.until("end of a process that the others left behind", |storm| storm.all[number].fate == Fate::Left);
        }
    }

    /// Starts a newcomer with the ticket of any member.
    fn newcomer(&mut self, random: Random<'_>) -> Option<usize> {
        let running = self.running();
        let members: Vec<usize> = self.members().into_iter().filter(|member| running.contains(member)).collect();
        if running.len() >= MOST || members.is_empty() {
            return None;
        }
        self.events += 1;
        let ticket = self.all[members[random(members.len())]].ticket.clone();
        Some(self.add(|command| command.env(TICKET, ticket)))
    }

    fn come(&mut self, random: Random<'_>) {
        let _ = self.newcomer(random);
    }

    /// A newcomer that is killed at any time: before it has come, while it waits or starts, and when it is a rank.
    fn brief_newcomer(&mut self, random: Random<'_>) {
        if let Some(number) = self.newcomer(random) {
            pause(random(150));
            self.lose(number);
        }
    }

    /// Kills any process.
    fn kill(&mut self, random: Random<'_>) {
        let running = self.running();
        let number = running[random(running.len())];
        let counts = self.members().contains(&number);
        if counts && !self.may_lose(false) || !counts && !self.may_lose_newcomers() {
            return;
        }
        self.lost += usize::from(counts);
        self.lose(number);
    }

    /// Newcomers that died count for a process that was stopped.
    fn may_lose_newcomers(&self) -> bool {
        self.strict != self.group && self.all.iter().all(|one| one.fate != Fate::Stopped)
    }

    fn lose(&mut self, number: usize) {
        self.events += 1;
        self.all[number].fate = Fate::Killed;
        self.all[number].signal(Signal::KILL);
        self.note(format!("process {number} is killed"));
    }

    /// Stops any process for less than the time after which it may be left out.
    fn stop_shortly(&mut self, random: Random<'_>) {
        let running = self.running();
        let number = running[random(running.len())];
        if self.may_lose(true) {
            self.stop(number);
            let since = Instant::now();
            pause(random(800));
            self.continued(number, since.elapsed());
        }
    }

    /// Stops a member for a time after which it may be left out, or be too late for that.
    fn stop_for_longer(&mut self, random: Random<'_>) {
        if let Some(number) = self.member(random) {
            self.stop(number);
            let since = Instant::now();
            pause(2500 + random(12_000));
            self.continued(number, since.elapsed());
        }
    }

    /// Stops a member until the others have gone on.
    fn stop_for_good(&mut self, random: Random<'_>) {
        if let Some(number) = self.member(random) {
            self.stop(number);
            self.lost += 1;
            (self.all[number].may_leave, self.calm) = (true, false);
        }
    }

    /// A member that runs, if it may be lost though its death is not proven.
    fn member(&self, random: Random<'_>) -> Option<usize> {
        let running = self.running();
        let members: Vec<usize> = self.members().into_iter().filter(|member| running.contains(member)).collect();
        let may = self.may_lose(true) && !members.is_empty();
        may.then(|| members[random(members.len())])
    }

    fn stop(&mut self, number: usize) {
        self.events += 1;
        self.all[number].signal(Signal::STOP);
        self.all[number].fate = Fate::Stopped;
        self.note(format!("process {number} is stopped"));
    }

    fn continued(&mut self, number: usize, after: Duration) {
        if after > LONG {
            (self.all[number].may_leave, self.calm) = (true, false);
            self.strict = self.group;
            self.lost += usize::from(self.members().contains(&number));
        }
        self.proceed(number);
    }

    fn proceed(&mut self, number: usize) {
        self.all[number].signal(Signal::CONT);
        self.all[number].fate = Fate::Runs;
        self.note(format!("process {number} continues"));
    }

    /// Ends the storm: all that run end well, with the right weights. Returns a line about it.
    pub(super) fn finish(mut self) -> String {
        self.ending = true;
        for member in self.members() {
            let input = self.all[member].child.stdin.as_mut().expect("piped");
            writeln!(input, "end").expect("it reads");
        }
        self.until("end of all", |storm| storm.running().is_empty());
        let members = self.members();
        if let Some(member) = members.iter().find(|&&member| self.all[member].fate != Fate::Ended) {
            self.fail(&format!("process {member} has left the group at its end"));
        }
        // Those of other tests that run at the same time have other names.
        let left: Vec<String> = shared_memory_files().into_iter().filter(|file| !self.files.contains(file)).collect();
        if let Some(file) = left.iter().find(|file| file.contains("tinynccl")) {
            self.fail(&format!("/dev/shm/{file} is left"));
        }
        let steps = self.all[members[0]].step;
        let groups = self.history.eras.len();
        format!("{}, seed {}: {} events, {groups} groups, {steps} steps", self.transport, self.seed, self.events)
    }
}

/// True for the error of a wait that has reached its deadline. One that others have given up says so after less.
fn is_at_deadline(line: &str) -> bool {
    ["made no progress for ", "found no store for "].iter().any(|words| {
        let waited = line.split_once(words).and_then(|(_, rest)| rest.split_once('s'));
        waited.and_then(|(seconds, _)| seconds.parse::<f64>().ok()).is_some_and(|seconds| seconds > SHORTEST_DEADLINE)
    })
}

fn shared_memory_files() -> Vec<String> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).collect()
}

/// Lets milliseconds pass: the moment of the next event.
fn pause(time: usize) {
    std::thread::sleep(Duration::from_millis(time as u64));
}
