//! Interview questions: read from the READMEs' sections *Interview questions*, chosen, asked, printed.

mod mock;
mod sheet;
mod walk;

pub use mock::{Score, mock};
pub use sheet::sheet;
pub use walk::{End, walk};

use anyhow::{Context as _, Result, bail, ensure};
use program_kit::Usage;

use crate::course::{STEPS, Step};
use crate::learn::Learn;
use crate::readme;

/// The topics, in the order of the course.
pub const TOPICS: [&str; 8] = ["sockets", "rdma", "gpu", "ranks", "collectives", "performance", "python", "training"];

/// 1: for those who name the topic. 2: for those who have worked with it. 3: for those who build it.
pub const LEVELS: std::ops::RangeInclusive<u8> = 1..=3;

/// One question.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// The milestone.
    pub step: Step,
    /// One of [`TOPICS`].
    pub topic: &'static str,
    /// One of [`LEVELS`].
    pub level: u8,
    /// All texts are as the README has them.
    pub text: String,
    /// Spoken in a minute.
    pub answer: String,
    /// The question that comes next, and its answer, where there is one.
    pub follow_up: Option<(String, String)>,
}

/// A task with a checker.
#[derive(Debug, Clone, PartialEq)]
pub struct Whiteboard {
    /// The milestone.
    pub step: Step,
    /// One of [`TOPICS`].
    pub topic: &'static str,
    /// Text of the task.
    pub text: String,
    /// A command that reads the lines.
    pub command: String,
}

/// The questions and tasks of all READMEs, in the order of the course.
///
/// # Errors
/// A README cannot be read, or a question has no topic or level; the error quotes it.
pub fn all(learn: &Learn) -> Result<(Vec<Question>, Vec<Whiteboard>)> {
    let (mut questions, mut tasks) = (Vec::new(), Vec::new());
    for step in &STEPS {
        let (more, task) = of(step, &readme::read(learn, step)?).with_context(|| step.folder())?;
        questions.extend(more);
        tasks.extend(task);
    }
    Ok((questions, tasks))
}

/// Reads the questions of one README, and its whiteboard task.
fn of(step: &Step, readme: &str) -> Result<(Vec<Question>, Option<Whiteboard>)> {
    let section = readme::section(readme, "Interview questions").context("no section 'Interview questions'")?;
    let blocks = readme::folded(section);
    ensure!(!blocks.is_empty(), "no questions in the section 'Interview questions'");
    let one =
        |(text, body): &(&str, &str)| question(step, text, body).with_context(|| format!("the question '{text}'"));
    let questions = blocks.iter().map(one).collect::<Result<_>>()?;
    let task = section.split_once("\n### Whiteboard: ").map(|(_, text)| whiteboard(step, text)).transpose()?;
    Ok((questions, task))
}

fn topic(name: &str) -> Result<&'static str> {
    let found = TOPICS.into_iter().find(|topic| *topic == name);
    found.with_context(|| format!("there is no topic '{name}': expected one of {}", TOPICS.join(", ")))
}

/// `answer`, perhaps `Follow-up: question? answer`, and `*topic, level 2*`, a paragraph each.
fn question(step: &Step, text: &str, body: &str) -> Result<Question> {
    const FORM: &str = "expected at its end 'Follow-up: …? …', or nothing, and '*topic, level 1*'";
    let (rest, kind) = body.trim().rsplit_once("\n\n").context(FORM)?;
    let (answer, follow_up) = match rest.split_once("\n\nFollow-up: ") {
        None => (rest, None),
        Some((answer, text)) => (answer, Some(text.split_once('?').context(FORM)?)),
    };
    let kind = kind.strip_prefix('*').and_then(|k| k.strip_suffix('*')).context(FORM)?;
    let (name, level) = kind.split_once(", level ").context(FORM)?;
    let level = level.parse().ok().filter(|level| LEVELS.contains(level)).context("its level is not 1, 2 or 3")?;
    let lacks = |answer: &str| answer.trim().is_empty();
    ensure!(!lacks(answer) && !follow_up.is_some_and(|(_, answer)| lacks(answer)), "an answer is missing");
    Ok(Question {
        step: *step,
        topic: topic(name)?,
        level,
        text: text.to_owned(),
        answer: answer.trim().to_owned(),
        follow_up: follow_up.map(|(next, answer)| (format!("{next}?"), answer.trim().to_owned())),
    })
}

/// `topic`, the task, and a block with one command.
fn whiteboard(step: &Step, text: &str) -> Result<Whiteboard> {
    let (name, rest) = text.split_once('\n').context("a whiteboard task without text")?;
    let (text, rest) = rest.split_once("```sh\n").context("a whiteboard task without a command")?;
    let (command, _) = rest.split_once("\n```").context("a whiteboard task's command does not end")?;
    ensure!(!command.contains('\n'), "a whiteboard task has one command");
    let (text, command) = (text.trim().to_owned(), command.to_owned());
    Ok(Whiteboard { step: *step, topic: topic(name.trim())?, text, command })
}

/// Choice of questions; a field that is `None` does not restrict it.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// One of [`TOPICS`].
    pub topic: Option<String>,
    /// One of [`LEVELS`].
    pub level: Option<u8>,
    /// One milestone.
    pub step: Option<Step>,
    /// Number of questions, drawn at random; `None`: all, in the order of the course.
    pub count: Option<usize>,
    /// Seed of the draws: the questions if there is a `count`, and the whiteboard task.
    pub seed: u64,
}

impl Wanted {
    /// The questions, and the one whiteboard task that ends the walk.
    ///
    /// # Errors
    /// There is no such topic or level; nothing fits.
    pub fn choose(
        &self,
        (mut questions, mut tasks): (Vec<Question>, Vec<Whiteboard>),
    ) -> Result<(Vec<Question>, Option<Whiteboard>)> {
        let topic = self.topic.as_deref().map(topic).transpose().map_err(|e| Usage(e.to_string()))?;
        if let Some(level) = self.level.filter(|level| !LEVELS.contains(level)) {
            return Err(Usage(format!("there is no level {level}: expected 1, 2 or 3")).into());
        }
        let fits = |q: &Question| self.step.is_none_or(|s| s == q.step) && topic.is_none_or(|t| t == q.topic);
        questions.retain(|q| fits(q) && self.level.is_none_or(|l| l == q.level));
        if questions.is_empty() {
            bail!(Usage("no question fits all of milestone, topic and level: leave one out".to_owned()));
        }
        tasks.retain(|t| match topic {
            Some(topic) => t.topic == topic,
            None => self.step.is_none_or(|s| s == t.step),
        });
        let mut random = Random(self.seed);
        if let Some(count) = self.count {
            // The first `count` of a Fisher-Yates shuffle.
            for at in 0..count.min(questions.len()) {
                let other = at + random.below(questions.len() - at);
                questions.swap(at, other);
            }
            questions.truncate(count);
        }
        let task = (!tasks.is_empty()).then(|| tasks.swap_remove(random.below(tasks.len())));
        Ok((questions, task))
    }
}

/// SplitMix64 (Steele, Lea and Flood, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const README: &str = "## Interview questions\n<details><summary>Why <code>x</code>?</summary>\n\nSo.\n\nAnd so.\n\nFollow-up: And\nwhen? Then. \
        Or not?\n\n*rdma, level 2*\n</details>\n\n### Whiteboard: rdma\nWrite.\n```sh\ntrue --x\n```\n\n## Common issues\n";

    #[test]
    fn a_question_has_all_its_parts() {
        let step = Step::find("5").unwrap();
        let (questions, task) = of(&step, README).unwrap();
        let q = &questions[0];
        assert_eq!((q.topic, q.level, q.answer.as_str()), ("rdma", 2, "So.\n\nAnd so."));
        assert_eq!(q.follow_up, Some(("And\nwhen?".to_owned(), "Then. Or not?".to_owned())));
        let alone = README.replace("Follow-up: And\nwhen? Then. Or not?\n\n", "");
        assert_eq!(of(&step, &alone).unwrap().0[0].follow_up, None);
        let expected = Whiteboard { step, topic: "rdma", text: "Write.".into(), command: "true --x".into() };
        assert_eq!(task, Some(expected));
        for (was, is, words) in [
            ("*rdma, level 2*", "", "expected at its end"),
            ("*rdma, level 2*", "*rdam, level 2*", "no topic 'rdam'"),
            ("level 2*", "level 4*", "not 1, 2 or 3"),
            ("when? Then. Or not?", "when", "expected at its end"),
            ("```sh\n", "", "without a command"),
        ] {
            let error = format!("{:#}", of(&step, &README.replace(was, is)).unwrap_err());
            assert!(error.contains(words), "{was}: {error}");
        }
    }

    #[test]
    fn every_readme_is_read_and_every_topic_has_questions_and_a_task() {
        let learn = Learn::new(&crate::course::checkout(), "learn").unwrap();
        let (questions, tasks) = all(&learn).unwrap();
        for topic in TOPICS {
            let of_topic: Vec<_> = questions.iter().filter(|q| q.topic == topic).collect();
            assert!(of_topic.len() >= 4, "{topic}: {} questions", of_topic.len());
            assert!(tasks.iter().any(|t| t.topic == topic), "{topic}: no whiteboard task");
        }
        for level in LEVELS {
            assert!(questions.iter().filter(|q| q.level == level).count() >= 10, "level {level}");
        }
        for q in &questions {
            // A minute of speech is some 150 words; a table is looked at.
            let words = q.answer.split_whitespace().count();
            assert!(words <= 150, "{} '{}' has {words} words", q.step.folder(), q.text);
        }
    }

    #[test]
    fn a_walk_is_what_was_wanted() {
        let learn = Learn::new(&crate::course::checkout(), "learn").unwrap();
        let all = all(&learn).unwrap();
        let choose = |wanted: &Wanted| wanted.choose(all.clone());
        let everything = choose(&Wanted::default()).unwrap();
        assert_eq!(everything.0, all.0, "in the order of the course");
        let rdma = Wanted { topic: Some("rdma".into()), level: Some(3), count: Some(3), seed: 7, ..Wanted::default() };
        let (questions, task) = choose(&rdma).unwrap();
        assert!(questions.len() == 3 && questions.iter().all(|q| q.topic == "rdma" && q.level == 3));
        assert_eq!(task.unwrap().topic, "rdma");
        assert_eq!(choose(&rdma).unwrap().0, questions, "the same seed, the same walk");
        let drawn = |seed| choose(&Wanted { count: Some(10), seed, ..Wanted::default() }).unwrap().0;
        assert!((0..9).any(|seed| drawn(seed) != drawn(9)));
        assert!(drawn(3).iter().all(|q| drawn(3).iter().filter(|other| *other == q).count() == 1), "none twice");
        for (wanted, words) in [
            (Wanted { topic: Some("gup".into()), ..Wanted::default() }, "no topic 'gup'"),
            (Wanted { level: Some(4), ..Wanted::default() }, "no level 4"),
            (Wanted { topic: Some("python".into()), step: Some(STEPS[0]), ..Wanted::default() }, "leave one out"),
        ] {
            let error = choose(&wanted).unwrap_err();
            assert!(error.is::<Usage>() && error.to_string().contains(words), "{error}");
        }
    }
}
