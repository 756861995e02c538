//! A resumed run gives the losses of an uninterrupted one: the same bits.

use anyhow::Result;
use ddp_gpt::checkpoint;
use ddp_gpt::config::{Preset, TrainConfig};
use ddp_gpt::cpu::gradients::{Gradients, LocalGradients};
use ddp_gpt::train::{Plan, State};

use crate::common::{corpus, plan, run_alone, run_alone_with};

#[test]
fn same_losses_and_same_parameters() {
    let corpus = corpus();
    let config = TrainConfig { steps: 13, dropout: 0.1, ..Preset::Tiny.train() };
    let model = Preset::Tiny.model(corpus.tokenizer.size());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");

    let mut whole = State::new(model, &config);
    // The last checkpoint before the end is after step 7; the one at the end would replace it.
    let first: Plan = Plan { checkpoint_every: 7, checkpoint: Some(path.clone()), ..plan(config) };
    run_alone(&Plan { checkpoint: None, ..first.clone() }, &mut whole, &corpus).unwrap();

    let mut interrupted = State::new(model, &config);
    let stopped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| stop_at(9, &first, &mut interrupted)));
    assert!(stopped.is_err(), "the run was to be interrupted");
    let saved = checkpoint::load(&path).unwrap();
    assert_eq!(saved.header.step, 7);
    saved.header.check(&model, &corpus.tokenizer).unwrap();

    let mut resumed = State::resume(saved, &config, 0);
    run_alone(&first, &mut resumed, &corpus).unwrap();
    assert_eq!(resumed.history, whole.history);
    assert_eq!(resumed.model.values, whole.model.values);
    assert_eq!(resumed.adamw, whole.adamw);
    assert_eq!(checkpoint::load(&path).unwrap().header.step, 13);
}

/// After a death in the last call of a run the ranks that are left come to the end once more.
#[test]
fn a_run_that_ends_twice_has_one_last_point() {
    let config = TrainConfig { steps: 8, ..Preset::Tiny.train() };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let plan = Plan { checkpoint: Some(path.clone()), ..plan(config) };
    let mut state = State::new(plan.model, &config);
    run_alone(&plan, &mut state, &corpus()).unwrap();
    let (once, saved) = (state.history.clone(), std::fs::read(&path).unwrap());
    run_alone(&plan, &mut state, &corpus()).unwrap();
    assert_eq!((state.history.len(), &state.history), (9, &once));
    assert_eq!(std::fs::read(&path).unwrap(), saved);
}

/// Trains and breaks off, as a killed process would, in step `last`.
fn stop_at(last: usize, plan: &Plan, state: &mut State) {
    struct Stop(LocalGradients, usize);
    impl Gradients for Stop {
        fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
            self.0.gradient_mut(i)
        }
        fn ready(&mut self, i: usize) -> Result<()> {
            self.0.ready(i)
        }
        fn finish(&mut self) -> Result<()> {
            assert!(self.1 > 0, "interrupted");
            self.1 -= 1;
            Ok(())
        }
    }
    let gradients = Stop(LocalGradients::new(&state.model.layout), last);
    run_alone_with(plan, state, &corpus(), gradients).unwrap();
}
