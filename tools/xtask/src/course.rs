//! The sixteen steps: numbers, names, and how each is checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

/// One milestone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// From 1.
    pub number: u8,
    /// Its package; with the number before it, its folder.
    pub name: &'static str,
    /// Filters of the test program: what takes long and no exercise touches.
    pub skip: &'static [&'static str],
    /// True if it has a feature `verbs`, whose tests can run over the kernel's device in a virtual machine.
    pub verbs: bool,
    /// Longest time in which none of its running tests ends: a few times what the solution takes on a slow machine.
    pub patience: Duration,
}

/// For tests of a second or two, which may wait for another rank as long as [`crate::learn`] lets them.
const SHORT: Duration = Duration::from_secs(20);
/// For tests that take less than half a second.
const BRIEF: Duration = Duration::from_secs(8);
/// For tests that start many processes, train, or compile kernels for a GPU.
const LONG: Duration = Duration::from_secs(90);
/// The tests of these build the extension for Python first.
const WITH_EXTENSION: Duration = Duration::from_secs(1800);

const fn step(number: u8, name: &'static str) -> Step {
    Step { number, name, skip: &[], verbs: false, patience: SHORT }
}

/// The course, in order.
pub const STEPS: [Step; 16] = [
    Step { patience: BRIEF, ..step(1, "tcp-echo") },
    Step { verbs: true, ..step(2, "verbs-hello") },
    step(3, "cuda-vec-add"),
    Step { verbs: true, patience: LONG, ..step(4, "cuda-verbs") },
    Step { verbs: true, ..step(5, "rdma-write") },
    step(6, "lib-hello"),
    step(7, "allreduce-tcp"),
    Step { verbs: true, patience: LONG, ..step(8, "allreduce-verbs") },
    Step { patience: LONG, ..step(9, "allreduce-gpu") },
    Step { patience: LONG, ..step(10, "stress") },
    Step { patience: WITH_EXTENSION, ..step(11, "pytorch-bindings") },
    Step { patience: WITH_EXTENSION, ..step(12, "pytorch-ddp") },
    Step { patience: LONG, ..step(13, "ddp-train") },
    Step { patience: LONG, ..step(14, "ddp-gpu") },
    Step { patience: LONG, ..step(15, "ddp-sine") },
    Step {
        patience: LONG,
        skip: &["gpu::", "cli::", "faults::", "learning::", "ranks::", "resume::", "torch::"],
        ..step(16, "ddp-gpt")
    },
];

impl Step {
    /// The step that a learner means: `7`, `07`, `07-allreduce-tcp` or `allreduce-tcp`.
    ///
    /// # Errors
    /// No step has this name; the error lists the names.
    pub fn find(text: &str) -> Result<Step> {
        let text = text.trim_end_matches('/');
        let found = STEPS.iter().find(|s| {
            text == s.name || text == s.folder() || text.parse::<u8>().is_ok_and(|number| number == s.number)
        });
        let Some(step) = found else {
            bail!("there is no milestone '{text}': expected 1 to 16, or a name like {}", STEPS[6].folder());
        };
        Ok(*step)
    }

    /// `07-allreduce-tcp`.
    pub fn folder(&self) -> String {
        format!("{:02}-{}", self.number, self.name)
    }

    /// Returns the folder of the milestone, which is the solution, in the checkout `root`.
    pub fn solution(&self, root: &Path) -> PathBuf {
        root.join("milestones").join(self.folder())
    }
}

/// The checkout that this program was built from.
pub fn checkout() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// Time and prerequisites from a README: the text after `**Time:**`, in one line.
///
/// # Errors
/// The file cannot be read.
pub fn time(root: &Path, step: &Step) -> Result<String> {
    let path = step.solution(root).join("README.md");
    let readme = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let time = readme.split_once("**Time:** ").and_then(|(_, rest)| rest.split_once(" **Prerequisites:**"));
    Ok(time.map_or(String::new(), |(time, _)| time.split_whitespace().collect::<Vec<_>>().join(" ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_name_a_step() {
        for text in ["7", "07", "07-allreduce-tcp", "07-allreduce-tcp/", "allreduce-tcp"] {
            assert_eq!(Step::find(text).unwrap().number, 7, "{text}");
        }
        for text in ["", "0", "17", "allreduce", "7-allreduce-tcp", "-7"] {
            let error = Step::find(text).unwrap_err().to_string();
            assert!(error.contains("expected 1 to 16"), "{error}");
        }
    }
}
