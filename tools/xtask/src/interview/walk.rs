//! The walk: question, answer, follow-up, its answer, each when the learner asks for it; then the whiteboard.

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};

use super::{Question, Whiteboard};
use crate::readme;

/// Result of the whiteboard task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// There was none, or the learner wrote nothing.
    Open,
    /// The checker accepted the lines.
    Right,
    /// It did not.
    Wrong,
}

/// Choice typed at a prompt.
enum Typed {
    Go,
    Skip,
    End,
}

fn prompt(words: &str, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<Typed> {
    write!(output, "\n   [{words}] ")?;
    output.flush()?;
    let mut line = String::new();
    if input.read_line(&mut line)? == 0 {
        return Ok(Typed::End);
    }
    Ok(match line.trim() {
        "s" => Typed::Skip,
        "q" => Typed::End,
        _ => Typed::Go,
    })
}

pub(super) fn said(output: &mut dyn Write, text: &str) -> Result<()> {
    Ok(writeln!(output, "   {}", readme::flowed(&readme::plain(text)).replace('\n', "\n   "))?)
}

/// Asks the questions and the task. The checker runs in `root`, the checkout.
///
/// # Errors
/// The terminal is gone, or the checker cannot be started.
pub fn walk(
    questions: &[Question],
    task: Option<&Whiteboard>,
    root: &Path,
    input: &mut dyn BufRead,
    output: &mut dyn Write,
) -> Result<End> {
    for (at, question) in (1..).zip(questions) {
        let Question { step, topic, level, text, answer, follow_up } = question;
        writeln!(output, "\n{at} of {}  ({topic}, level {level}, {})\n", questions.len(), step.folder())?;
        said(output, text)?;
        match prompt("say it aloud, then Enter; s skips, q ends", input, output)? {
            Typed::End => return Ok(End::Open),
            Typed::Skip => continue,
            Typed::Go => {}
        }
        writeln!(output)?;
        said(output, answer)?;
        let Some((next, its_answer)) = follow_up else { continue };
        writeln!(output)?;
        said(output, next)?;
        match prompt("Enter", input, output)? {
            Typed::End => return Ok(End::Open),
            Typed::Skip => continue,
            Typed::Go => {}
        }
        writeln!(output)?;
        said(output, its_answer)?;
    }
    task.map_or(Ok(End::Open), |task| board(task, root, input, output))
}

fn board(task: &Whiteboard, root: &Path, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<End> {
    writeln!(output, "\nWhiteboard  ({}, {})\n", task.topic, task.step.folder())?;
    said(output, &task.text)?;
    writeln!(output, "\n   Your lines; an empty one ends them:")?;
    output.flush()?;
    let mut lines = String::new();
    loop {
        let before = lines.len();
        if input.read_line(&mut lines)? == 0 || lines[before..].trim().is_empty() {
            break;
        }
    }
    if lines.trim().is_empty() {
        writeln!(output, "   Nothing was written. Later: {}", task.command)?;
        return Ok(End::Open);
    }
    // The README's own command, as its reader would type it: it quotes for a shell.
    let mut command = Command::new("sh");
    command.current_dir(root).args(["-c", &task.command]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("starting {}", task.command))?;
    // A checker that ends early does not read all: its verdict counts.
    let _ = child.stdin.take().context("no pipe")?.write_all(lines.as_bytes());
    let done = child.wait_with_output().with_context(|| format!("waiting for {}", task.command))?;
    writeln!(output)?;
    said(output, String::from_utf8_lossy(&done.stdout).trim_end())?;
    match done.status.code() {
        Some(0) => Ok(End::Right),
        Some(1) => {
            writeln!(output, "   Again, or ours with --show: {}", task.command)?;
            Ok(End::Wrong)
        }
        _ => anyhow::bail!("{} ended with {}", task.command, done.status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::course::Step;

    fn question(text: &str) -> Question {
        let follow_up = Some(("And then?".to_owned(), "Later.".to_owned()));
        let (text, answer) = (text.to_owned(), "**So** it is.".to_owned());
        Question { step: Step::find("5").unwrap(), topic: "rdma", level: 2, text, answer, follow_up }
    }

    fn walked(typed: &str, command: &str) -> (Result<End>, String) {
        let questions = [question("Why?"), question("How?")];
        let task = Whiteboard {
            step: Step::find("5").unwrap(),
            topic: "rdma",
            text: "Write four.".into(),
            command: command.into(),
        };
        let mut output = Vec::new();
        let end = walk(&questions, Some(&task), Path::new("."), &mut typed.as_bytes(), &mut output);
        (end, String::from_utf8(output).unwrap())
    }

    #[test]
    fn answers_come_when_they_are_asked_for() {
        let (end, out) = walked("", "true");
        assert_eq!(end.unwrap(), End::Open);
        assert!(out.contains("1 of 2  (rdma, level 2, 05-rdma-write)") && !out.contains("So it is"), "{out}");
        let (_, out) = walked("\n", "true");
        assert!(out.contains("So it is.") && out.contains("And then?") && !out.contains("Later."), "{out}");
        let (_, out) = walked("\n\ns\n", "true");
        assert!(out.contains("Later.") && out.contains("How?") && out.contains("Write four."), "{out}");
        assert_eq!(out.matches("So it is").count(), 1, "skipped: {out}");
        assert!(!walked("q\n", "true").1.contains("How?"));
    }

    #[test]
    fn the_checker_has_the_last_word() {
        let (end, out) = walked("s\ns\n4\n5\n\nnot read\n", "grep -c 4");
        assert_eq!(end.unwrap(), End::Right);
        assert!(out.trim_end().ends_with("\n   1"), "{out}");
        let (end, out) = walked("s\ns\n5\n", "grep 4");
        assert_eq!(end.unwrap(), End::Wrong);
        assert!(out.contains("with --show: grep 4"), "{out}");
        assert_eq!(walked("s\ns\n\n", "false").0.unwrap(), End::Open, "nothing was written");
        assert!(walked("s\ns\n5\n", "exit 2").0.unwrap_err().to_string().contains("exit 2 ended with"));
    }
}
