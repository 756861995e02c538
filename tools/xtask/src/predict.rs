//! Predictions: taken before the answers are shown, kept in `predictions.json` of the learner's folder, never changed.
//! Questions and answers are those of the README's section *Predict first*; its bold numbers are compared.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use program_kit::Usage;
use serde_json::{Value, json};

use crate::course::Step;
use crate::learn::Learn;
use crate::quantity::{self, Quantity};
use crate::readme;

/// A question with the answer that a learner sees after a prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// From 1.
    pub number: usize,
    /// As the README has it.
    pub text: String,
    /// As the README has it.
    pub answer: String,
}

impl Question {
    /// The answer's numbers that a prediction is compared with: those in bold.
    pub fn numbers(&self) -> Vec<Quantity> {
        self.answer.split("**").skip(1).step_by(2).flat_map(quantity::parse).collect()
    }
}

/// The questions of a README.
///
/// # Errors
/// The section, its answers, or one of them is missing.
pub fn questions(readme: &str) -> Result<Vec<Question>> {
    let section = readme::section(readme, "Predict first").context("the README has no section 'Predict first'")?;
    let (asked, _) = section.split_once("<details>").context("the section 'Predict first' has no folded answers")?;
    let asked = readme::numbered(asked);
    let answers = readme::folded(section).first().map(|(_, body)| readme::numbered(body)).unwrap_or_default();
    ensure!(!asked.is_empty(), "the section 'Predict first' has no numbered questions");
    ensure!(
        asked.len() == answers.len(),
        "the section 'Predict first' has {} questions and {} answers",
        asked.len(),
        answers.len()
    );
    let both = asked.into_iter().zip(answers).zip(1..);
    Ok(both.map(|((text, answer), number)| Question { number, text, answer }).collect())
}

/// Predictions for one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Locked {
    /// The first one.
    pub first: String,
    /// Predictions after `--again`, in order.
    pub later: Vec<String>,
}

/// All predictions of a learner: `{"07": {"question's text": ["first", "later"]}}`. By the text, so that a question
/// that was changed since is asked anew.
#[derive(Debug)]
pub struct Predictions {
    file: PathBuf,
    all: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl Predictions {
    /// Reads the learner's file; without one nothing was predicted.
    ///
    /// # Errors
    /// There is a file, and it cannot be read.
    pub fn read(learn: &Learn) -> Result<Predictions> {
        let file = learn.folder.join("predictions.json");
        let text = match std::fs::read_to_string(&file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => "{}".to_owned(),
            other => other.with_context(|| format!("reading {}", file.display()))?,
        };
        let wrong = || format!("{} is not as xtask wrote it: mend it, or move it away", file.display());
        let all: Value = serde_json::from_str(&text).with_context(wrong)?;
        let words = |v: &Value| v.as_array()?.iter().map(|w| w.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>();
        let mut kept = BTreeMap::new();
        for (step, questions) in all.as_object().with_context(wrong)? {
            let questions = questions.as_object().with_context(wrong)?;
            let read = |(q, p): (&String, &Value)| Some((q.clone(), words(p).filter(|p| !p.is_empty())?));
            kept.insert(step.clone(), questions.iter().map(read).collect::<Option<_>>().with_context(wrong)?);
        }
        Ok(Predictions { file, all: kept })
    }

    /// Returns the predictions for a question; `None` if there are none.
    pub fn of(&self, step: &Step, question: &Question) -> Option<Locked> {
        let (first, later) = self.all.get(&key(step))?.get(&question.text)?.split_first()?;
        Some(Locked { first: first.clone(), later: later.to_vec() })
    }

    /// Locks a prediction, and keeps it in the file before it returns.
    ///
    /// # Errors
    /// There is one and `again` is false; the prediction is empty; the file cannot be written.
    pub fn lock(&mut self, step: &Step, question: &Question, prediction: &str, again: bool) -> Result<()> {
        let prediction = prediction.trim();
        ensure!(!prediction.is_empty(), "question {}: an empty line is no prediction; a guess is", question.number);
        if let Some(locked) = self.of(step, question).filter(|_| !again) {
            bail!(
                "question {} of {} is locked with '{}': --again takes a second one and keeps the first",
                question.number,
                step.folder(),
                locked.first
            );
        }
        let of_step = self.all.entry(key(step)).or_default();
        of_step.entry(question.text.clone()).or_default().push(prediction.to_owned());
        let folder = self.file.parent().context("a file without a folder")?;
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        // Whole or not at all: an interrupted write must not lose the others.
        let part = self.file.with_extension("part");
        let text = serde_json::to_string_pretty(&json!(self.all))? + "\n";
        std::fs::write(&part, text).with_context(|| format!("writing {}", part.display()))?;
        std::fs::rename(&part, &self.file).with_context(|| format!("writing {}", self.file.display()))
    }
}

fn key(step: &Step) -> String {
    format!("{:02}", step.number)
}

/// The prediction above the answer, and below them how far each number is.
pub fn beside(question: &Question, locked: &Locked) -> String {
    let indented = |text: &str| readme::plain(text).replace('\n', "\n                ");
    let mut out = format!("{}. {}\n", question.number, readme::plain(&question.text).replace('\n', "\n   "));
    out.push_str(&format!("   you:         {}\n", indented(&locked.first)));
    for later in &locked.later {
        out.push_str(&format!("   then:        {}\n", indented(later)));
    }
    out.push_str(&format!("   the answer:  {}\n", indented(&question.answer)));
    let tries = [("you", &locked.first)].into_iter().chain(locked.later.iter().map(|later| ("then", later)));
    for (name, prediction) in tries {
        for (right, said) in quantity::compare(prediction, &question.numbers()) {
            let line = match said {
                Some((said, distance)) => format!("{name} {said}, it is {}: {distance}", right.text),
                None => format!("{name} no number, it is {}", right.text),
            };
            out.push_str(&format!("   {line}\n"));
        }
    }
    out
}

/// Options of a session.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// One question, or all.
    pub only: Option<usize>,
    /// Predictions from the command line, for the open questions in order; without any they are read from `input`.
    pub answers: &'a [String],
    /// Also for questions that are locked.
    pub again: bool,
}

/// Takes a line of `input` for each open question, and shows after the last one the answers of all that are locked.
///
/// # Errors
/// There is no such question, or it is locked; there are more predictions than open questions; a file fails.
pub fn session(
    learn: &Learn,
    step: &Step,
    request: Request<'_>,
    input: &mut dyn BufRead,
    output: &mut dyn Write,
) -> Result<()> {
    let Request { only, answers, again } = request;
    let readme = readme::read(learn, step)?;
    let all = questions(&readme).with_context(|| step.folder())?;
    let chosen: Vec<&Question> = all.iter().filter(|q| only.is_none_or(|n| n == q.number)).collect();
    if chosen.is_empty() {
        let words = format!("{} has questions 1 to {}, no {}", step.folder(), all.len(), only.unwrap_or_default());
        return Err(Usage(words).into());
    }
    let mut predictions = Predictions::read(learn)?;
    let locked = |predictions: &Predictions, q: &Question| predictions.of(step, q).is_some();
    // A question that was named is not passed over: that it is locked is then an error.
    let named = only.is_some() && !answers.is_empty();
    let open: Vec<&Question> = chosen.iter().copied().filter(|q| again || named || !locked(&predictions, q)).collect();
    if answers.len() > open.len() {
        let (given, open) = (answers.len(), open.len());
        return Err(Usage(format!("{given} predictions for {open} open questions of {}", step.folder())).into());
    }
    for (at, question) in open.iter().enumerate() {
        let line = match answers.get(at) {
            Some(line) => line.clone(),
            None if !answers.is_empty() => break,
            None => {
                let text = readme::plain(&question.text).replace('\n', "\n   ");
                write!(output, "\n{}. {text}\n   your prediction (a guess will do): ", question.number)?;
                output.flush()?;
                let mut line = String::new();
                if input.read_line(&mut line)? == 0 {
                    break;
                }
                line
            }
        };
        // At the terminal an empty line passes a question over; on the command line it is a mistake.
        if !line.trim().is_empty() || !answers.is_empty() {
            predictions.lock(step, question, &line, again)?;
        }
    }
    writeln!(output, "\n{}: your predictions, and the answers\n", step.folder())?;
    for question in &chosen {
        match predictions.of(step, question) {
            Some(locked) => writeln!(output, "{}", beside(question, &locked))?,
            None => writeln!(output, "{}. not predicted yet: its answer stays closed\n", question.number)?,
        }
    }
    let left = all.iter().filter(|q| !locked(&predictions, q)).count();
    match first_command(&readme).filter(|_| left == 0) {
        Some(command) => writeln!(output, "All are locked. See for yourself: `{command}`")?,
        None => writeln!(output, "{left} of {} open: `cargo xtask predict {}`", all.len(), key(step))?,
    }
    Ok(())
}

/// The first cargo command of the section *Run*.
fn first_command(readme: &str) -> Option<&str> {
    let (_, block) = readme::section(readme, "Run")?.split_once("```sh\n")?;
    block.lines().find(|line| line.starts_with("cargo")).map(|line| line.split("  #").next().unwrap_or(line).trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "# Milestone\n## Predict first\nWrite.\n1. How long\n   is it?\n2. Why?\n\n<details><summary>Answers</summary>\n\n\
        1. About **44 ms**; alone 20 µs.\n2. So.\n</details>\n\n## Run\n1. no question\n";

    fn learn(folder: &std::path::Path) -> Learn {
        Learn::new(folder, "learn").unwrap()
    }

    #[test]
    fn questions_with_their_answers() {
        let all = questions(README).unwrap();
        assert_eq!((all.len(), all[0].text.as_str(), all[1].answer.as_str()), (2, "How long\nis it?", "So."));
        assert_eq!(all[0].numbers().len(), 1, "only what is in bold");
        for (was, is, words) in [
            ("2. Why?", "Why?", "1 questions and 2 answers"),
            ("<details>", "", "no folded"),
            ("## Predict first", "##", "no section"),
        ] {
            let error = format!("{:#}", questions(&README.replace(was, is)).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_prediction_is_locked_and_again_keeps_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let step = Step::find("7").unwrap();
        let all = questions(README).unwrap();
        let read = || Predictions::read(&learn(folder.path())).unwrap();
        assert_eq!(read().of(&step, &all[0]), None);
        read().lock(&step, &all[0], " 5 ms\n", false).unwrap();
        let error = read().lock(&step, &all[0], "44 ms", false).unwrap_err().to_string();
        assert!(error.contains("is locked with '5 ms': --again"), "{error}");
        assert!(read().lock(&step, &all[1], " \n", false).is_err());
        read().lock(&step, &all[0], "40 ms", true).unwrap();
        let locked = read().of(&step, &all[0]).unwrap();
        assert_eq!(locked, Locked { first: "5 ms".into(), later: vec!["40 ms".into()] });
        assert_eq!(read().of(&Step::find("8").unwrap(), &all[0]), None);
        let shown = beside(&all[0], &locked);
        assert!(shown.contains("you 5 ms, it is 44 ms: too small by a factor of 8.8\n"), "{shown}");
        assert!(shown.contains("then 40 ms, it is 44 ms: too small by a factor of 1.1\n"), "{shown}");
        let changed = Question { text: "Another?".into(), ..all[0].clone() };
        assert_eq!(read().of(&step, &changed), None, "a question that changed is asked anew");
    }

    #[test]
    fn a_damaged_file_is_named_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("learn")).unwrap();
        let file = folder.path().join("learn/predictions.json");
        for text in ["{", "[]", "{\"07\": {\"q\": []}}", "{\"07\": {\"q\": [1]}}"] {
            std::fs::write(&file, text).unwrap();
            let error = format!("{:#}", Predictions::read(&learn(folder.path())).unwrap_err());
            assert!(error.contains("predictions.json is not as xtask wrote it"), "{error}");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        }
    }
}
