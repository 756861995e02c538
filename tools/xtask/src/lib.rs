//! `cargo xtask`: the milestones as exercises.
//!
//! ```text
//! course     the sixteen steps: numbers, names, how each is checked
//! files      a milestone's files: listed and read
//! exercise   markers in a milestone's source: tasks and their functions
//! body       the function below a marker: where its body begins and ends
//! stub       a milestone's files with the bodies taken out, and put back
//! learn      the learner's folder: a separate workspace, made from ours
//! library    the library's files by the milestone that introduces them
//! progress   which steps have passed
//! check      builds and runs a step's tests, and reports the faults
//! verdict    each exercise: passed, failed, not written
//! watch      the tests of a running test program, and an end for one that hangs
//! faults     what the compiler and the tests said: the function at fault, and the line
//! hint       the README's hint for an exercise
//! save       waits until a learner saves a file
//! readme     a milestone's README in parts: sections, numbered lists, folded blocks
//! quantity   numbers with units, and how far one is from another
//! predict    predictions: taken before the answers are shown, and kept
//! new        a program of the reader's own over the library
//! interview  questions by topic and level, their follow-ups, and tasks with a checker
//! dist       the C libraries and tinynccl-cli, laid out for an installation or packed
//! ```
//! No stub is stored: xtask makes them from the solutions on demand.

pub mod body;
pub mod check;
pub mod course;
pub mod dist;
pub mod exercise;
pub mod faults;
pub mod files;
pub mod hint;
pub mod interview;
pub mod learn;
pub mod library;
pub mod new;
pub mod predict;
pub mod progress;
pub mod quantity;
pub mod readme;
pub mod save;
pub mod stub;
pub mod verdict;
mod watch;
