//! Hints: the folded blocks below *Do it yourself* in a milestone's README, one for each exercise.

use anyhow::{Context as _, Result};

use crate::course::Step;
use crate::exercise::Exercise;
use crate::learn::Learn;
use crate::readme;

/// The hint for an exercise, as plain text.
///
/// # Errors
/// The README cannot be read, or has none.
pub fn of(learn: &Learn, step: &Step, e: &Exercise) -> Result<String> {
    let readme = readme::read(learn, step)?;
    let part = readme::section(&readme, "Do it yourself").unwrap_or_default();
    let title = format!("Hint {}", e.number);
    let found = readme::folded(part).into_iter().find(|(head, _)| *head == title);
    let (_, text) = found.with_context(|| format!("{}'s README has no \"{title}\"", step.folder()))?;
    Ok(readme::plain(text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::course::{STEPS, checkout};
    use crate::exercise;

    #[test]
    fn every_exercise_has_a_hint_that_is_not_its_task() {
        let learn = Learn::new(&checkout(), "learn").unwrap();
        for step in &STEPS {
            for e in exercise::of(step, &step.solution(&learn.root)).unwrap() {
                let hint = of(&learn, step, &e).unwrap();
                assert!(!hint.is_empty() && hint != e.text && !hint.contains("**"), "{} {}", step.folder(), e.number);
            }
        }
    }
}
