//! `cargo xtask`: work through the milestones.

use std::io::{Error, ErrorKind, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use program_kit::end::{green, red};
use xtask::check::Scope;
use xtask::course::{self, STEPS, Step};
use xtask::interview::{self, End, Wanted};
use xtask::learn::Learn;
use xtask::predict::{self, Request};
use xtask::progress::{Passed, Progress};
use xtask::save::Saved;
use xtask::verdict::Verdict;
use xtask::{check, exercise, files, hint, library, new, stub, verdict};

/// Work through the sixteen milestones: write the core functions of each yourself.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

/// STEP is a number or a name: 7, 07, 07-allreduce-tcp, allreduce-tcp.
#[derive(Debug, Subcommand)]
enum Task {
    /// Show my progress, and where to go on.
    Status,
    /// Show where to go on.
    Next,
    /// List what there is to write in each milestone, and how long it takes.
    List,
    /// Ask for my predictions, lock them, then show the answers beside them.
    Predict {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// Ask this question only.
        question: Option<usize>,
        /// The prediction; several times for several open questions. Without it they are read from the input, a line
        /// each.
        #[arg(long, value_name = "TEXT")]
        answer: Vec<String>,
        /// Predict again what is locked; the first prediction is kept, and shown.
        #[arg(long)]
        again: bool,
    },
    /// Ask me interview questions: answers when I want them, follow-ups, and at the end a task on the whiteboard.
    Interview(Interview),
    /// Give me the milestone with its exercises to be written, in learn/.
    Start {
        #[arg(value_parser = Step::find)]
        step: Step,
    },
    /// Run the milestone's tests on what I wrote.
    Check {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// Check this exercise only; the others may be unwritten.
        exercise: Option<u32>,
        /// Run over the kernel's RDMA device, in the virtual machine of scripts/rxe-vm.sh.
        #[arg(long)]
        vm: bool,
    },
    /// Check again at each save, until it passes.
    Watch {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// Check this exercise only.
        exercise: Option<u32>,
    },
    /// Show the hint for an exercise.
    Hint {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// The exercise [default: the first that is not written].
        exercise: Option<u32>,
    },
    /// Write a program of two ranks over the library to PATH, for me to change.
    New {
        path: PathBuf,
    },
    /// List the library's files that a milestone introduces, and my own version of them; without STEP all files.
    Library {
        #[arg(value_parser = Step::find)]
        step: Option<Step>,
    },
    /// Put what I wrote aside, in learn/backup, and start again.
    Reset {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
    /// Compare what I wrote with our solution: `-` is yours, `+` ours.
    Solution {
        #[arg(value_parser = Step::find)]
        step: Step,
        /// Show our solution of this exercise only.
        exercise: Option<u32>,
    },
    Dist(xtask::dist::Options),
}

#[derive(Debug, clap::Args)]
struct Interview {
    /// Ask the questions of one milestone [default: of all].
    #[arg(value_parser = Step::find)]
    step: Option<Step>,
    /// sockets, rdma, gpu, ranks, collectives, performance, python or training.
    #[arg(long)]
    topic: Option<String>,
    /// 1: for people who name the topic; 2: for people who have worked with it; 3: for people who build it.
    #[arg(long)]
    level: Option<u8>,
    /// Draw this many at random [default: all, in the order of the course].
    #[arg(long)]
    count: Option<usize>,
    /// Draw the same questions again: a walk that draws prints its seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Hold a mock interview of this many minutes: ten questions at random (or `--count`), a mark for each, a score.
    #[arg(long, value_name = "MINUTES", num_args = 0..=1, default_missing_value = "20", conflicts_with = "sheet")]
    mock: Option<u64>,
    /// Write a page to print, in place of the walk.
    #[arg(long, value_name = "FILE.html")]
    sheet: Option<PathBuf>,
}

/// Prints a line; an error where the reader has gone.
macro_rules! say {
    ($($words:tt)*) => { writeln!(std::io::stdout(), $($words)*) };
}

fn main() -> ExitCode {
    match start(&Cli::parse().task) {
        // As in `cargo xtask list | head`: no process reads on.
        Err(error) if error.downcast_ref::<Error>().is_some_and(|e| e.kind() == ErrorKind::BrokenPipe) => {
            ExitCode::SUCCESS
        }
        result => program_kit::exit_code(result, |_| false),
    }
}

/// Returns the exit status: 1 when a check failed, 77 when it could not be made here.
fn start(task: &Task) -> Result<i32> {
    let folder = std::env::var("TINYNCCL_LEARN").unwrap_or_else(|_| "learn".to_owned());
    let learn = Learn::new(&course::checkout(), &folder)?;
    match task {
        Task::Status => status(&learn)?,
        Task::Next => say!("{}", next(&learn, None)?)?,
        Task::List => list(&learn)?,
        Task::Predict { step, question, answer, again } => {
            let request = Request { only: *question, answers: answer, again: *again };
            predict::session(&learn, step, request, &mut std::io::stdin().lock(), &mut std::io::stdout().lock())?;
        }
        Task::Interview(wanted) => return Ok(i32::from(!interviewed(&learn, wanted)?)),
        Task::Start { step } => {
            learn.start(step)?;
            begun(&learn, step)?;
        }
        Task::Check { step, exercise, vm } => return checked(&learn, step, Scope { vm: *vm, only: *exercise }),
        Task::Watch { step, exercise } => return watched(&learn, step, Scope { vm: false, only: *exercise }),
        Task::Hint { step, exercise } => hinted(&learn, step, *exercise)?,
        Task::New { path } => {
            let folder = new::make(&learn.root, path)?;
            say!(
                "{} is a program of two ranks. Build and run it, with a first build of some minutes:",
                path.display()
            )?;
            say!("  cd {} && cargo run", folder.display())?;
            say!("It prints\n  {}\nThe mean of 0 and 1 is 0.5, and the sum of two of them 1.", new::PRINTS)?;
        }
        Task::Library { step } => write!(std::io::stdout(), "{}", library::shown(&learn.root, step.as_ref())?)?,
        Task::Reset { step, yes } => {
            ensure!(*yes || agreed(&learn, step)?, "nothing was changed");
            let old = learn.reset(step)?;
            say!("The old one is in {}.", learn.shown(&old))?;
            begun(&learn, step)?;
        }
        Task::Dist(options) => {
            for file in xtask::dist::run(&learn.root, options)? {
                say!("{}", file.display())?;
            }
        }
        Task::Solution { step, exercise: None } => difference(&learn, step)?,
        Task::Solution { step, exercise: Some(number) } => ours(&learn, step, *number)?,
    }
    Ok(0)
}

/// False when the whiteboard was wrong.
fn interviewed(learn: &Learn, asked: &Interview) -> Result<bool> {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() % 10_000);
    let seed = asked.seed.unwrap_or_else(now);
    let Interview { step, topic, level, mock, .. } = asked;
    let count = asked.count.or(mock.map(|_| 10));
    let wanted = Wanted { topic: topic.clone(), level: *level, step: *step, count, seed };
    let all = interview::all(learn)?;
    let tasks = all.1.clone();
    let (questions, task) = wanted.choose(all)?;
    if let Some(file) = &asked.sheet {
        std::fs::write(file, interview::sheet(&questions, &tasks))
            .with_context(|| format!("writing {}", file.display()))?;
        say!("{} questions in {}: open it in a browser, and print it", questions.len(), file.display())?;
        return Ok(true);
    }
    if count.is_some() {
        say!("--seed {seed} draws the same ones")?;
    }
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    if let Some(minutes) = mock {
        let (begin, limit) = (Instant::now(), Duration::from_secs(minutes * 60));
        interview::mock(&questions, limit, &|| begin.elapsed(), &mut input, &mut output)?;
        return Ok(true);
    }
    let end = interview::walk(&questions, task.as_ref(), &learn.root, &mut input, &mut output)?;
    writeln!(output)?;
    Ok(end != End::Wrong)
}

/// Progress of one step.
enum State {
    NotStarted,
    /// With the number of exercises that are to be written, and of all.
    Started(usize, usize),
    /// Passed before, and since then put aside.
    Again,
    Passed(Passed),
}

fn state(learn: &Learn, step: &Step, progress: &Progress) -> Result<State> {
    if !learn.started(step) {
        return Ok(State::NotStarted);
    }
    let all = exercise::of(step, &step.solution(&learn.root))?;
    let open = stub::open(step, &learn.step(step), &all)?;
    Ok(match progress.of(step.number) {
        Some(_) if open.len() == all.len() => State::Again,
        Some(passed) => State::Passed(passed),
        None => State::Started(open.len(), all.len()),
    })
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            State::NotStarted => f.write_str("not started"),
            State::Started(0, _) => f.write_str("started, everything is written: check it"),
            State::Started(open, all) => write!(f, "started, {open} of {all} exercises to be written"),
            State::Again => f.write_str("passed before, started again"),
            State::Passed(Passed::Whole) => f.write_str("passed"),
            State::Passed(Passed::InPart) => f.write_str("passed, but for what could not be checked where it ran"),
        }
    }
}

fn status(learn: &Learn) -> Result<()> {
    let progress = Progress::read(&learn.folder)?;
    let mut passed = 0;
    for step in &STEPS {
        let state = state(learn, step, &progress)?;
        passed += usize::from(matches!(state, State::Passed(_)));
        say!("  {:02}  {:<18} {state}", step.number, step.name)?;
    }
    say!("\n{passed} of {} passed. {}", STEPS.len(), next(learn, None)?)?;
    Ok(())
}

/// The first step that is begun and not done, else the first that is not begun, of those behind `done` if there are any.
fn next(learn: &Learn, done: Option<&Step>) -> Result<String> {
    let progress = Progress::read(&learn.folder)?;
    let mut left = Vec::new();
    for step in &STEPS {
        if !matches!(state(learn, step, &progress)?, State::Passed(_)) {
            left.push(step);
        }
    }
    let behind = |s: &&&Step| done.is_some_and(|done| s.number > done.number);
    let found = left.iter().find(|s| learn.started(s)).or(left.iter().find(behind)).or(left.first());
    Ok(match found {
        None => "That is all of them.".to_owned(),
        Some(step) => {
            let verb = if learn.started(step) { "check" } else { "start" };
            let readme = format!("milestones/{}/README.md", step.folder());
            format!("Go on with {}: `cargo xtask {verb} {:02}`; read {readme}", step.folder(), step.number)
        }
    })
}

fn list(learn: &Learn) -> Result<()> {
    for step in &STEPS {
        say!("{}: {}", step.folder(), course::time(&learn.root, step)?)?;
        for e in exercise::of(step, &step.solution(&learn.root))? {
            let needs = e.needs.map_or(String::new(), |n| format!(" (its check needs {n})"));
            say!("  {}. `{}` in {}{needs}", e.number, e.function, e.file.display())?;
        }
    }
    Ok(())
}

/// Prints the exercises of a started step, and the next command.
fn begun(learn: &Learn, step: &Step) -> Result<()> {
    say!("{} is yours. Read milestones/{}/README.md, then write:", learn.shown(&learn.step(step)), step.folder())?;
    for e in exercise::of(step, &step.solution(&learn.root))? {
        say!("  {}. `{}` in {} (\"{}\"): {}", e.number, e.function, e.file.display(), e.section, e.text)?;
    }
    say!("Then `cargo xtask check {0:02}`, or `cargo xtask watch {0:02}`, which checks at each save;", step.number)?;
    say!(
        "`cargo xtask hint {:02} 1` helps with the first. `cargo run` in that folder runs your program.",
        step.number
    )?;
    Ok(())
}

fn checked(learn: &Learn, step: &Step, scope: Scope) -> Result<i32> {
    say!("building and testing {}", learn.shown(&learn.step(step)))?;
    let report = check::check(learn, step, scope)?;
    let passed = match (report.ok(), report.unchecked.is_empty()) {
        (false, _) => None,
        (true, true) => Some(Passed::Whole),
        (true, false) => Some(Passed::InPart),
    };
    if scope.only.is_none() {
        Progress::read(&learn.folder)?.note(step.number, passed)?;
    }
    if !report.ok() {
        write!(std::io::stdout(), "{}", report.output)?;
    }
    for line in &report.unchecked {
        say!("{line}")?;
    }
    if let (true, Some(_), false) = (report.ok(), scope.only, report.unchecked.is_empty()) {
        return Ok(program_kit::UNAVAILABLE.into());
    }
    let name = scope.only.map_or_else(|| step.folder(), |number| stub::tag(step, number));
    let terminal = std::io::stdout().is_terminal();
    let count = |n: usize| format!("{n} test{}", if n == 1 { "" } else { "s" });
    for verdict in &report.verdicts {
        say!("{}", coloured(verdict, terminal))?;
    }
    if report.ok() {
        say!("{name}: {}, {}", green("passed", terminal), count(report.passed))?;
        match scope.only {
            Some(number) => {
                say!("Ours: `cargo xtask solution {:02} {number}`", step.number)?;
                say!("Next: `cargo xtask check {:02}`, the whole milestone", step.number)?;
            }
            None => {
                say!("Yours beside ours: `cargo xtask solution {:02}`", step.number)?;
                say!("{}", next(learn, Some(step))?)?;
            }
        }
        return Ok(0);
    }
    let word = red("FAILED", terminal);
    let failed = format!("{} failed, {} passed", count(report.failed.len()), report.passed);
    let why = match (report.compiles, report.failed.len() + report.passed) {
        (false, _) => "it does not compile, so no test ran",
        (true, 0) => "it is not written, so no test ran",
        (true, _) => &failed,
    };
    say!("{name}: {word}: {why}")?;
    say!("hint: {}", report.hint)?;
    Ok(1)
}

/// A line on an exercise, green or red where it is known.
fn coloured(verdict: &Verdict, terminal: bool) -> String {
    let line = verdict.to_string();
    match verdict.state {
        verdict::State::Passed => green(&line, terminal),
        verdict::State::Failed | verdict::State::Panics => red(&line, terminal),
        _ => line,
    }
}

/// Checks, and again at each save, until it passes.
fn watched(learn: &Learn, step: &Step, scope: Scope) -> Result<i32> {
    let folder = learn.step(step);
    loop {
        let saved = if learn.started(step) { Some(Saved::now(&folder)?) } else { None };
        let status = checked(learn, step, scope)?;
        let (1, Some(saved)) = (status, saved) else { return Ok(status) };
        say!("\nwaiting for a save in {} (Ctrl-C ends it)", learn.shown(&folder))?;
        saved.wait(&folder)?;
    }
}

/// Prints the hint for an exercise.
fn hinted(learn: &Learn, step: &Step, number: Option<u32>) -> Result<()> {
    let all = exercise::of(step, &step.solution(&learn.root))?;
    let open = if learn.started(step) { stub::open(step, &learn.step(step), &all)? } else { Vec::new() };
    let number = number.or(open.first().copied()).unwrap_or(1);
    let e = exercise::find(step, &all, number)?;
    say!("exercise {number} (`{}` in {}):\n{}", e.function, e.file.display(), hint::of(learn, step, e)?)?;
    Ok(())
}

/// Asks at the terminal.
fn agreed(learn: &Learn, step: &Step) -> Result<bool> {
    ensure!(std::io::stdin().is_terminal(), "reset asks first, and there is no terminal: give --yes");
    print!("Put {} aside and start again? [y/N] ", learn.shown(&learn.step(step)));
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

/// The learner's files against ours, by git.
fn difference(learn: &Learn, step: &Step) -> Result<()> {
    ensure!(learn.started(step), "{} was not started: `cargo xtask start {:02}`", step.folder(), step.number);
    let (theirs, ours) = (learn.step(step), step.solution(&learn.root));
    let mut same = true;
    for part in ["src", "python", "compare", "tests"] {
        let (theirs, ours) = (theirs.join(part), ours.join(part));
        if !ours.is_dir() {
            continue;
        }
        // From the checkout, so that the names are short. Status 1 means that they differ.
        let status = Command::new("git")
            .current_dir(&learn.root)
            .args(["--no-pager", "diff", "--no-index", "--"])
            .args([learn.shown(&theirs), learn.shown(&ours)])
            .status()
            .context("starting git")?;
        match status.code() {
            Some(0) => {}
            Some(1) => same = false,
            _ => bail!("git could not compare {} with {} ({status})", theirs.display(), ours.display()),
        }
    }
    if same {
        say!("yours is ours")?;
    }
    Ok(())
}

/// Our solution of one exercise.
fn ours(learn: &Learn, step: &Step, number: u32) -> Result<()> {
    let folder = step.solution(&learn.root);
    let all = exercise::of(step, &folder)?;
    let e = exercise::find(step, &all, number)?;
    let text = files::read(&folder.join(&e.file))?.unwrap_or_default();
    say!("`{}` in milestones/{}/{}:\n", e.function, step.folder(), e.file.display())?;
    say!("{}", text[e.body.clone()].trim_end())?;
    Ok(())
}
