//! The model learns: a small text's loss falls far below that of a guess, and threads do not change what is learnt.

use ddp_gpt::config::Preset;
use ddp_gpt::cpu::parallel::Threads;
use ddp_gpt::train::{Plan, State};

use crate::common::{corpus, plan, run_alone};

#[test]
fn loss_falls_and_threads_agree() {
    let corpus = corpus();
    let config = Preset::Tiny.train();
    let model = Preset::Tiny.model(corpus.tokenizer.size());
    let mut losses = Vec::new();
    for threads in [1, 2, 3] {
        let mut state = State::new(model, &config);
        run_alone(&Plan { threads: Threads::new(threads), ..plan(config) }, &mut state, &corpus).unwrap();
        losses.push(state.history);
    }
    let guess = (model.vocab as f64).ln();
    let (first, last) = (losses[0][0].validation.unwrap(), losses[0].last().unwrap().validation.unwrap());
    approx::assert_abs_diff_eq!(first, guess, epsilon = 0.3);
    assert!(last < 0.6 * guess, "{last}, a guess has {guess}");
    for other in &losses[1..] {
        for (a, b) in losses[0].iter().zip(other).take(10) {
            approx::assert_abs_diff_eq!(a.train.unwrap(), b.train.unwrap(), epsilon = 1e-4);
        }
    }
}
