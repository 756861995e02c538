//! The outputs on the pages: written by a run of the labs, and compared with later runs.

use std::collections::BTreeSet;
use std::io::{Read as _, Seek as _};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use program_kit::Usage;
use regex::Regex;

use crate::CANNOT_RUN_HERE;
use crate::cases::{CASES, Case, PINNING};

/// The output of a case.
struct Run {
    /// Exit status of the last step; `None` if it has none.
    code: Option<i32>,
    /// Lines of each step.
    steps: Vec<Vec<String>>,
}

impl Run {
    fn lines(&self) -> impl Iterator<Item = &String> {
        self.steps.iter().flatten()
    }

    fn text(&self) -> String {
        self.lines().map(|line| format!("{line}\n")).collect()
    }
}

pub(crate) fn run(options: &crate::Outputs) -> Result<u8> {
    let chosen = |case: &&Case| options.labs.is_empty() || options.labs.iter().any(|lab| lab == case.lab());
    let cases: Vec<&Case> = CASES.iter().filter(chosen).collect();
    if let Some(unknown) = options.labs.iter().find(|lab| !CASES.iter().any(|case| case.lab() == lab.as_str())) {
        bail!(Usage(format!("there is no lab {unknown:?}: see `labs list`")));
    }
    let mut different = 0;
    for case in cases {
        let run = case.run().with_context(|| format!("running {}", case.command()))?;
        if run.code == Some(CANNOT_RUN_HERE.into()) {
            println!("SKIPPED: {}: {}", case.name, run.lines().last().map_or("", String::as_str));
            continue;
        }
        let path = options.folder.join(format!("{}.txt", case.name));
        case.holds(&run).map_err(|why| anyhow::anyhow!("{}: {why}\n{}", case.command(), run.text()))?;
        if !options.check {
            std::fs::write(&path, case.page(&run)).with_context(|| format!("writing {}", path.display()))?;
            println!("{}: written", case.name);
        } else if let Err(why) = case.compare(&run, &path) {
            different += 1;
            println!("{}: {why}", case.name);
        } else {
            println!("{}: as in the book", case.name);
        }
    }
    match different {
        0 => Ok(0),
        n => bail!("{n} outputs differ from the book's: `labs outputs {}` writes them anew", options.folder.display()),
    }
}

impl Case {
    /// The lab that it belongs to.
    pub(crate) fn lab(&self) -> &'static str {
        self.steps.first().and_then(|step| step.split(' ').find(|word| !word.contains('='))).unwrap_or_default()
    }

    /// The first command, as one types it.
    fn command(&self) -> String {
        self.steps.first().map_or_else(String::new, |step| typed(step))
    }

    fn run(&self) -> Result<Run> {
        let folder = tempfile::tempdir()?;
        let mut run = Run { code: None, steps: Vec::new() };
        for step in self.steps {
            let mut output = tempfile::tempfile()?;
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("--bare");
            for (name, _) in std::env::vars_os() {
                let text = name.to_string_lossy();
                // Where NVIDIA's library is, is this machine's affair.
                if ["TINYNCCL_", "TINYROCE_"].iter().any(|ours| text.starts_with(ours)) && text != "TINYNCCL_NCCL_LIB"
                    || ["RANK", "WORLD_SIZE", "RUST_LOG", "RUST_BACKTRACE"].contains(&&*text)
                {
                    command.env_remove(name);
                }
            }
            for word in step.split(' ') {
                match word.split_once('=') {
                    Some((name, value)) if !word.starts_with('-') => command.env(name, value),
                    _ => command.arg(word),
                };
            }
            let status = command
                .current_dir(folder.path())
                .stdin(Stdio::null())
                .stdout(output.try_clone()?)
                .stderr(output.try_clone()?)
                .status()?;
            let mut text = String::new();
            output.rewind()?;
            output.read_to_string(&mut text)?;
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            // Of ranks that run at once, any line may come first: by rank, the launcher last.
            lines.sort_by_key(|line| speaker(line));
            run.steps.push(lines);
            run.code = status.code();
        }
        Ok(run)
    }

    /// Checks that a run is the failure, or the success, that the page is about; the error is the difference.
    fn holds(&self, run: &Run) -> Result<(), String> {
        if run.code != Some(self.code) {
            return Err(format!("exit code {:?}, expected {}", run.code, self.code));
        }
        let text = run.text();
        let missing: Vec<&&str> = self.says.iter().filter(|words| !text.contains(**words)).collect();
        if missing.is_empty() { Ok(()) } else { Err(format!("no {missing:?} in what it says")) }
    }

    /// The file of the book.
    fn page(&self, run: &Run) -> String {
        let mut page = String::new();
        for (step, lines) in self.steps.iter().zip(&run.steps) {
            page.push_str(&format!("$ {}\n", typed(step)));
            lines.iter().for_each(|line| page.push_str(&format!("{line}\n")));
        }
        if self.code != 0 {
            page.push_str(&format!("(exit status {})\n", self.code));
        }
        page
    }

    /// Compares with the file of the book: no line of another shape than there, or than the case allows. Numbers do not
    /// count, unless the case is exact.
    fn compare(&self, run: &Run, path: &Path) -> Result<(), String> {
        let stored = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        if self.exact {
            return if stored == self.page(run) { Ok(()) } else { Err(format!("prints\n{}", self.page(run))) };
        }
        if let Some(words) = self.says.iter().find(|words| !stored.contains(**words)) {
            return Err(format!("{} does not say {words:?}", path.display()));
        }
        let shapes: BTreeSet<String> = stored.lines().map(shape).collect();
        let may: Vec<Regex> = self.may.iter().filter_map(|line| Regex::new(line).ok()).collect();
        let new = run.lines().find(|line| !shapes.contains(&shape(line)) && !may.iter().any(|m| m.is_match(line)));
        new.map_or(Ok(()), |line| Err(format!("a line that the book does not have: {line}")))
    }
}

/// A step as one types it: `labs` is the program, and variables stand before it.
pub(crate) fn typed(step: &str) -> String {
    let (variables, arguments): (Vec<&str>, Vec<&str>) =
        step.split(' ').partition(|word| word.contains('=') && !word.starts_with('-'));
    let variables: String = variables.iter().map(|word| format!("{word} ")).collect();
    let program = match arguments.first() {
        Some(lab) if PINNING.contains(lab) => "scripts/rxe-vm.sh --pair target/debug/labs",
        _ => "cargo run -p labs --",
    };
    format!("{variables}{program} {}", arguments.join(" "))
}

/// Sort key of a line by its origin: lines without one, then the ranks, errors and warnings, the launcher.
fn speaker(line: &str) -> usize {
    let rank =
        line.strip_prefix("[rank ").and_then(|rest| rest.split_once(']')).and_then(|(rank, _)| rank.parse().ok());
    match rank {
        Some(rank) => 1 + usize::min(rank, 1 << 20),
        None if line.starts_with("[launcher]") => usize::MAX,
        None if line.starts_with("error: ") || line.starts_with("[WARN") => 1 << 30,
        None => 0,
    }
}

/// A line without its numbers.
fn shape(line: &str) -> String {
    let mut shape = String::with_capacity(line.len());
    let mut digits = false;
    for c in line.trim_end().chars() {
        let number = c.is_ascii_digit() || (digits && c == '.');
        match c {
            _ if number && digits => {}
            _ if number => shape.push('N'),
            ' ' if shape.ends_with(' ') => {}
            _ => shape.push(c),
        }
        digits = number;
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_no_numbers_and_no_columns() {
        assert_eq!(shape("[rank 12] 2.0s at 127.0.0.1:4711,   8 B"), "[rank N] Ns at N:N, N B");
        assert_ne!(shape("rank 1 lost rank 2"), shape("rank 1 left"));
    }

    #[test]
    fn lines_go_by_their_speaker() {
        let mut lines = ["[launcher] x", "[rank 10] b", "[rank 2] a", "error: z", "title"];
        lines.sort_by_key(|line| speaker(line));
        assert_eq!(lines, ["title", "[rank 2] a", "[rank 10] b", "error: z", "[launcher] x"]);
    }

    #[test]
    fn a_step_is_shown_as_it_is_typed() {
        assert_eq!(typed("TINYNCCL_TRACE=x.json slow-link"), "TINYNCCL_TRACE=x.json cargo run -p labs -- slow-link");
        assert_eq!(typed("missing-group --bytes=4096"), "cargo run -p labs -- missing-group --bytes=4096");
    }

    #[test]
    fn every_lab_has_a_failure_and_a_mended_version() {
        let labs: BTreeSet<&str> = CASES.iter().map(Case::lab).filter(|lab| *lab != "waits").collect();
        assert!(labs.len() >= 12, "{labs:?}");
        for lab in labs {
            assert!(CASES.iter().any(|case| case.name == lab && case.code == 3), "{lab} has no failure");
            assert!(
                CASES.iter().any(|case| case.name == format!("{lab}-fixed") && case.code == 0),
                "{lab} is not mended"
            );
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/labs/outputs");
        for case in CASES {
            assert!(folder.join(format!("{}.txt", case.name)).is_file(), "{}", case.name);
        }
        let regexes = CASES.iter().flat_map(|case| case.may);
        assert!(regexes.into_iter().all(|line| Regex::new(line).is_ok()));
    }
}
