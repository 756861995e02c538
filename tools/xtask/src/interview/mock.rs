//! A mock interview: questions against a clock, a mark for each answer, and at the end a score and what to read next.

use std::io::{BufRead, Write};
use std::time::Duration;

use anyhow::Result;

use super::{Question, TOPICS, walk};

/// Best mark of an answer.
const BEST: u32 = 2;

/// Result of a mock interview.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Marks of all answers together.
    pub marks: u32,
    /// Number of questions that were answered.
    pub answered: u32,
}

/// Asks until the questions or the time, `limit`, are used up. `now` is the time since the begin.
///
/// # Errors
/// The terminal is gone.
pub fn mock(
    questions: &[Question],
    limit: Duration,
    now: &dyn Fn() -> Duration,
    input: &mut dyn BufRead,
    output: &mut dyn Write,
) -> Result<Score> {
    let mut marked: Vec<(&Question, u32)> = Vec::new();
    writeln!(
        output,
        "{} questions, {} minutes. Answer aloud, in a minute or two each.",
        questions.len(),
        limit.as_secs() / 60
    )?;
    for (at, question) in (1..).zip(questions) {
        let begin = now();
        let Some(left) = limit.checked_sub(begin).filter(|left| !left.is_zero()) else {
            writeln!(output, "\nThe time is over.")?;
            break;
        };
        let Question { step, topic, level, text, answer, .. } = question;
        writeln!(
            output,
            "\n{at} of {}, {} left  ({topic}, level {level}, {})\n",
            questions.len(),
            clock(left),
            step.folder()
        )?;
        walk::said(output, text)?;
        if asked("Enter when you have answered", input, output)?.is_none() {
            break;
        }
        writeln!(output, "\n   {}. Ours:\n", clock(now().saturating_sub(begin)))?;
        walk::said(output, answer)?;
        let Some(mark) = mark(input, output)? else { break };
        marked.push((question, mark));
    }
    let score = Score { marks: marked.iter().map(|(_, mark)| mark).sum(), answered: marked.len() as u32 };
    report(&marked, &score, now(), output)?;
    Ok(score)
}

/// The line that was typed; `None` at the end of the input.
fn asked(words: &str, input: &mut dyn BufRead, output: &mut dyn Write) -> Result<Option<String>> {
    write!(output, "\n   [{words}] ")?;
    output.flush()?;
    let mut line = String::new();
    Ok((input.read_line(&mut line)? > 0).then(|| line.trim().to_owned()))
}

fn mark(input: &mut dyn BufRead, output: &mut dyn Write) -> Result<Option<u32>> {
    loop {
        let Some(line) = asked("yours: 2 right, 1 in part, 0 wrong", input, output)? else { return Ok(None) };
        match line.parse() {
            Ok(mark) if mark <= BEST => return Ok(Some(mark)),
            _ => writeln!(output, "   '{line}': expected 0, 1 or 2")?,
        }
    }
}

fn report(marked: &[(&Question, u32)], score: &Score, took: Duration, output: &mut dyn Write) -> Result<()> {
    writeln!(output, "\nScore: {} of {} in {}", score.marks, score.answered * BEST, clock(took))?;
    for topic in TOPICS {
        let of_topic: Vec<u32> = marked.iter().filter(|(q, _)| q.topic == topic).map(|(_, mark)| *mark).collect();
        if !of_topic.is_empty() {
            writeln!(output, "  {topic:<12} {} of {}", of_topic.iter().sum::<u32>(), of_topic.len() as u32 * BEST)?;
        }
    }
    let mut folders: Vec<String> = marked.iter().filter(|(_, m)| *m < BEST).map(|(q, _)| q.step.folder()).collect();
    folders.dedup();
    if !folders.is_empty() {
        writeln!(output, "Read next:")?;
        for folder in folders {
            writeln!(output, "  milestones/{folder}/README.md")?;
        }
    }
    Ok(())
}

/// Minutes and seconds, like `12:05`.
fn clock(time: Duration) -> String {
    format!("{}:{:02}", time.as_secs() / 60, time.as_secs() % 60)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::course::Step;

    fn question(step: &str, topic: &'static str) -> Question {
        let (text, answer) = (format!("Why {topic}?"), "So.".to_owned());
        Question { step: Step::find(step).unwrap(), topic, level: 2, text, answer, follow_up: None }
    }

    /// Every look at the clock takes 40 seconds.
    fn run(typed: &str, minutes: u64) -> (Score, String) {
        let questions = [question("5", "rdma"), question("7", "collectives"), question("8", "rdma")];
        let (time, mut output) = (Cell::new(0), Vec::new());
        let now = || Duration::from_secs(time.replace(time.get() + 40));
        let limit = Duration::from_secs(60 * minutes);
        let score = mock(&questions, limit, &now, &mut typed.as_bytes(), &mut output).unwrap();
        (score, String::from_utf8(output).unwrap())
    }

    #[test]
    fn marks_become_a_score_and_a_list_to_read() {
        let (score, out) = run("\n2\n\n3\n0\n\n1\n", 30);
        assert_eq!(score, Score { marks: 3, answered: 3 });
        assert!(
            out.contains("1 of 3, 30:00 left  (rdma, level 2, 05-rdma-write)") && out.contains("2 of 3, 28:40 left"),
            "{out}"
        );
        assert!(out.contains("   0:40. Ours:\n\n   So.\n") && out.contains("'3': expected 0, 1 or 2"), "{out}");
        assert!(out.contains("Score: 3 of 6 in 4:00\n  rdma         3 of 4\n  collectives  0 of 2\n"), "{out}");
        assert!(
            out.ends_with(
                "Read next:\n  milestones/07-allreduce-tcp/README.md\n  milestones/08-allreduce-verbs/README.md\n"
            ),
            "{out}"
        );
    }

    #[test]
    fn the_clock_and_the_end_of_the_input_end_it() {
        let (score, out) = run("\n2\n\n2\n\n2\n", 2);
        assert_eq!(score.answered, 2, "{out}");
        assert!(out.contains("\nThe time is over.\n"), "{out}");
        assert_eq!(run("\n2\n\n", 30).0, Score { marks: 2, answered: 1 });
    }
}
