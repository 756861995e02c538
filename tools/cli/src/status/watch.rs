//! `watch`: the view of `status`, again and again.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use tinynccl::status::text::MARK;

use super::{Look, What, seconds};

/// Repeats `status` every second until it is interrupted. In a terminal it repaints the page, with the ranks that the
/// others wait for in red. Elsewhere it prints the page when more than an age or a call's number has changed.
///
/// Exit status, with --count: that of the last report.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    what: What,
    /// Time from one report to the next.
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    every: Duration,
    /// Ends after this many reports.
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

/// The exit status.
///
/// # Errors
/// Errors of a single look.
pub(crate) fn run(options: &Options) -> Result<i32> {
    let terminal = io::stdout().is_terminal();
    let mut before = None;
    let mut looks = 0;
    loop {
        let Look { page, code } = super::look(&options.what, false)?;
        let text = if terminal {
            Some(painted(&page, size()))
        } else {
            let now = Some(lasting(&page));
            (before.replace(now.clone()) != Some(now)).then(|| page + "\n")
        };
        match text.map_or(Ok(()), |text| io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush())) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(code),
            written => written.context("writing to the standard output")?,
        }
        looks += 1;
        if options.count.is_some_and(|count| looks >= count) {
            return Ok(code);
        }
        std::thread::sleep(options.every);
    }
}

/// Columns and rows of the terminal.
fn size() -> (usize, usize) {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 1);
    size.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
}

/// The page over what is on the screen: each line to its end, and nothing below. Lines that the terminal wraps count as
/// several.
fn painted(page: &str, (columns, rows): (usize, usize)) -> String {
    let mut screen = "\x1b[H".to_owned();
    let lines: Vec<&str> = page.lines().collect();
    let mut left = rows - 1;
    for (at, line) in lines.iter().enumerate() {
        let takes = line.chars().count().div_ceil(columns).max(1);
        // The last row tells that there is more.
        if takes > left || (takes == left && at + 1 < lines.len()) {
            screen += &format!("{} more lines\x1b[K\n", lines.len() - at);
            break;
        }
        left -= takes;
        let (begin, end) = if line.starts_with(MARK) { ("\x1b[1;31m", "\x1b[0m") } else { ("", "") };
        screen += &format!("{begin}{line}{end}\x1b[K\n");
    }
    screen + "\x1b[J"
}

/// The page without what changes by itself: ages and the numbers of calls.
fn lasting(page: &str) -> String {
    let number = |word: &&str| word.parse::<f64>().is_ok();
    let unit = |word: Option<&&str>| {
        word.is_some_and(|word| matches!(word.trim_end_matches(|c: char| !c.is_alphabetic()), "s" | "min"))
    };
    let mut words = page.split_whitespace().peekable();
    let mut lasting = String::new();
    while let Some(word) = words.next() {
        if number(&word) && unit(words.peek()) {
            words.next();
        } else if !word.starts_with('#') {
            lasting += word;
            lasting.push(' ');
        }
    }
    lasting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_numbers_of_calls_are_no_change() {
        let page = |age: &str, number: u32, state: &str| {
            format!(
                "ranks 0, 1 wait in all_reduce #{number} (f32) for {age}, and rank 2\n  2  7@h  {state}  {age}  -\n"
            )
        };
        let first = lasting(&page("1.4 s", 17, "idle"));
        assert_eq!(lasting(&page("3 min 12 s", 18, "idle")), first);
        assert_ne!(lasting(&page("1.4 s", 17, "stopped")), first);
        assert!(first.contains("ranks 0, 1 wait in all_reduce (f32) for and rank 2"), "{first}");
    }

    #[test]
    fn a_page_fits_the_screen_and_the_missing_rank_is_red() {
        let page = "a sentence that is too long for a line\n\nc\n  0  idle\n> 2  idle\n";
        let screen = painted(page, (20, 24));
        assert!(screen.starts_with("\x1b[Ha sentence") && screen.ends_with("\x1b[K\n\x1b[J"), "{screen:?}");
        assert!(screen.contains("\n\x1b[1;31m> 2  idle\x1b[0m\x1b[K\n"), "{screen:?}");
        assert_eq!(painted(page, (20, 7)).matches('\n').count(), 5, "all of it in six rows and the cursor's");
        let cut = painted(page, (20, 5));
        assert!(cut.contains("\n3 more lines\x1b[K\n") && !cut.contains("idle"), "{cut:?}");
        assert!(painted("", (80, 24)).len() < 10);
    }
}
