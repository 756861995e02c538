//! Local steps and their outer optimizer, with ranks as threads.

use anyhow::{Result, ensure};
use ddp_gpt::checkpoint::{self, Checkpoint};
use ddp_gpt::config::{OuterConfig, Preset, TrainConfig};
use ddp_gpt::cpu::adamw::AdamW;
use ddp_gpt::cpu::gradients::LocalGradients;
use ddp_gpt::cpu::local::{LocalSteps, Round};
use ddp_gpt::cpu::model::Workspace;
use ddp_gpt::cpu::parallel::Threads;
use ddp_gpt::data::{Batch, Corpus, Split};
use ddp_gpt::dropout::Dropout;
use ddp_gpt::params::Model;
use ddp_gpt::report::Report;
use ddp_gpt::train::{Engine, Pace, Plan, State, train};
use tinynccl::{Comm, Config};

use crate::common::{alone, corpus, plan, run_alone};

const OUTER: OuterConfig = OuterConfig { local_steps: 4, lr: 0.7, momentum: 0.9 };

fn settings(steps: usize, outer: OuterConfig) -> TrainConfig {
    TrainConfig { steps, outer: Some(outer), lr: 3e-3, dropout: 0.1, ..Preset::Tiny.train() }
}

/// Local steps whose engine keeps the state after each outer step, and fails before step `until`.
struct Watched<'a> {
    engine: LocalSteps<'a>,
    until: usize,
    seen: Vec<State>,
}

impl Engine for Watched<'_> {
    fn steps(&mut self, state: &mut State, to: usize) -> Result<Vec<f64>> {
        ensure!(state.step < self.until, "interrupted");
        let losses = self.engine.steps(state, to)?;
        self.seen.push(state.clone());
        Ok(losses)
    }
    fn evaluate(&mut self, model: &Model) -> Result<f64> {
        self.engine.evaluate(model)
    }
    fn logits(&mut self, model: &Model, tokens: &[u32], last: usize) -> Result<Vec<f32>> {
        self.engine.logits(model, tokens, last)
    }
    fn pace(&self) -> Result<Pace> {
        self.engine.pace()
    }
}

/// Trains on `size` ranks, from a checkpoint or from the start, up to step `until`. Gives each rank's last state, and
/// its states after the outer steps.
fn run(size: usize, plan: &Plan, from: Option<&Checkpoint>, until: usize) -> Vec<(State, Vec<State>)> {
    let (corpus, config) = (corpus(), plan.config);
    let rank = |comm: &Comm| {
        let mut state = match from {
            Some(checkpoint) => State::resume(checkpoint.clone(), &config, comm.rank()),
            None => State::new(plan.model, &config),
        };
        let engine = LocalSteps::new(plan, config.outer.unwrap(), &corpus, comm, &state.model).unwrap();
        let mut engine = Watched { engine, until, seen: Vec::new() };
        let done = train(plan, &mut state, &corpus, comm, &mut engine, &Report::quiet());
        assert_eq!(done.is_err(), until < config.steps, "{done:?}");
        (state, engine.seen)
    };
    std::thread::scope(|scope| {
        let comms = Comm::threads(size, Config::default()).unwrap();
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The paper's algorithm, one rank after the other, and outer steps in f64. Gives the losses and the
/// outer parameters.
fn by_hand(size: usize, plan: &Plan, corpus: &Corpus) -> (Vec<f64>, Vec<f64>) {
    let (config, outer) = (plan.config, plan.config.outer.unwrap());
    let mut model = Model::new(plan.model, config.seed);
    let count = model.values.len();
    let mut at: Vec<f64> = model.values.iter().map(|&value| f64::from(value)).collect();
    let mut momentum = vec![0.0; count];
    let mut inner = vec![AdamW::new(count); size];
    let mut gradients = LocalGradients::new(&model.layout);
    let mut losses = vec![0.0; config.steps];
    for begin in (0..config.steps).step_by(outer.local_steps) {
        let end = (begin + outer.local_steps).min(config.steps);
        let mut mean = vec![0.0; count];
        for (rank, adamw) in inner.iter_mut().enumerate() {
            let mut batch = Batch::new(config.batch, plan.model.context, rank, size).unwrap();
            let mut workspace = Workspace::new(&plan.model, batch.samples(), plan.model.context, true, Threads::new(1));
            model.values = at.iter().map(|&value| value as f32).collect();
            for (step, loss) in losses.iter_mut().enumerate().take(end).skip(begin) {
                batch.fill(corpus, Split::Train, config.seed, step);
                let dropout = Dropout::new(config.dropout, config.seed, step, batch.first);
                workspace.forward(&model, &batch.inputs, &dropout);
                *loss += workspace.cross_entropy(&batch.targets, true) / size as f64;
                workspace.backward(&model, &batch.inputs, &dropout, &mut gradients).unwrap();
                let lr = config.learning_rate(step);
                adamw.step(&mut model, &mut gradients, &config, lr, Threads::new(1)).unwrap();
            }
            for i in 0..count {
                mean[i] += (at[i] - f64::from(model.values[i])) / size as f64;
            }
        }
        for i in 0..count {
            momentum[i] = outer.momentum * momentum[i] + mean[i];
            at[i] -= outer.lr * (outer.momentum * momentum[i] + mean[i]);
        }
    }
    (losses, at)
}

#[test]
fn is_the_algorithm_of_the_paper() {
    let corpus = corpus();
    for (size, outer) in [
        (1, OUTER),
        (2, OUTER),
        (3, OuterConfig { local_steps: 1, ..OUTER }),
        // The last round is shorter.
        (4, OuterConfig { local_steps: 5, lr: 0.3, momentum: 0.5 }),
        // Parameters averaged, no more.
        (3, OuterConfig { local_steps: 3, lr: 1.0, momentum: 0.0 }),
    ] {
        let plan = plan(settings(12, outer));
        let (losses, values) = by_hand(size, &plan, &corpus);
        for (state, _) in run(size, &plan, None, 12) {
            assert_eq!(state.history.len(), 13);
            for (point, want) in state.history.iter().zip(&losses) {
                let got = point.train.unwrap();
                assert!(approx::abs_diff_eq!(got, *want, epsilon = 2e-5), "{size}, {outer:?}: {point:?} {want}");
            }
            let far = state.model.values.iter().zip(&values).map(|(&got, want)| (f64::from(got) - want).abs());
            let far = far.fold(0.0, f64::max);
            assert!(far < 1e-3, "{size}, {outer:?}: {far}");
        }
    }
}

/// With one rank an outer step of rate 1 without momentum goes where the local steps went.
#[test]
fn one_rank_that_only_averages_trains_as_without_local_steps() {
    let corpus = corpus();
    let plain = TrainConfig { outer: None, ..settings(24, OUTER) };
    let mut state = State::new(plan(plain).model, &plain);
    run_alone(&plan(plain), &mut state, &corpus).unwrap();
    for local_steps in [1, 4, 7, 24] {
        let outer = OuterConfig { local_steps, lr: 1.0, momentum: 0.0 };
        let (local, _) = run(1, &plan(settings(24, outer)), None, 24).remove(0);
        // The first round has seen no outer step; its losses travel as f32.
        let early =
            |state: &State| state.history[..local_steps].iter().map(|p| p.train.unwrap() as f32).collect::<Vec<_>>();
        assert_eq!(early(&state), early(&local));
        for (a, b) in state.history.iter().zip(&local.history) {
            let close = approx::abs_diff_eq!(a.train.unwrap_or(0.0), b.train.unwrap_or(0.0), epsilon = 5e-5);
            assert!(close && a.step == b.step, "{local_steps}: {a:?} {b:?}");
        }
    }
}

#[test]
fn ranks_are_equal_after_each_outer_step_and_keep_their_own_moments() {
    let all = run(3, &plan(settings(14, OUTER)), None, 14);
    let (_, first) = &all[0];
    assert_eq!(first.len(), 4);
    for (_, seen) in &all[1..] {
        for (a, b) in first.iter().zip(seen) {
            let bits = |state: &State| {
                let momentum = &state.outer.as_ref().unwrap().momentum;
                state.model.values.iter().chain(momentum).map(|value| value.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(bits(a), bits(b));
            assert_ne!(a.adamw.mean, b.adamw.mean);
            assert!(a.round.is_none() && b.round.is_none());
        }
    }
}

#[test]
fn evaluations_and_checkpoints_are_due_at_the_next_outer_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    // Outer steps after 4, 8, 12 ..., evaluations after 5, 10, 15, checkpoints after 6 and 12.
    let config = settings(18, OUTER);
    let plan = Plan { checkpoint: Some(path.clone()), checkpoint_every: 6, ..plan(config) };
    let (state, _) = run(2, &plan, None, 18).remove(0);
    let evaluated = state.history.iter().filter(|point| point.validation.is_some()).map(|point| point.step);
    assert_eq!(evaluated.collect::<Vec<_>>(), [0, 8, 12, 16, 18]);
    run(2, &plan, None, 12);
    assert_eq!(checkpoint::load(&path).unwrap().header.step, 12);
    run(2, &plan, None, 8);
    assert_eq!(checkpoint::load(&path).unwrap().header.step, 8);
}

#[test]
fn a_resumed_run_has_the_same_bits_and_other_numbers_of_ranks_can_resume() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c");
    let config = settings(18, OUTER);
    let plan = Plan { checkpoint: Some(path.clone()), checkpoint_every: 6, ..plan(config) };
    let whole = run(2, &plan, None, 18);
    run(2, &plan, None, 12);
    let saved = checkpoint::load(&path).unwrap();
    assert_eq!((saved.header.step, saved.adamw.len()), (12, 2));
    for ((a, _), (b, _)) in whole.iter().zip(run(2, &plan, Some(&saved), 18)) {
        assert_eq!((&a.history, &a.model.values), (&b.history, &b.model.values));
        assert_eq!((&a.adamw, &a.outer), (&b.adamw, &b.outer));
    }
    for size in [1, 3] {
        let (state, _) = run(size, &plan, Some(&saved), 18).remove(0);
        let [a, b] = [&whole[0].0, &state].map(|state| state.history[17].train.unwrap());
        assert!(approx::abs_diff_eq!(a, b, epsilon = 0.1), "{size}: {a} {b}");
    }
    // A run without local steps goes on with them.
    let plain = TrainConfig { outer: None, ..config };
    run_alone(&Plan { config: plain, ..plan.clone() }, &mut State::new(plan.model, &plain), &corpus()).unwrap();
    let saved = checkpoint::load(&path).unwrap();
    let longer = Plan { config: TrainConfig { steps: 26, ..config }, ..plan };
    assert_eq!((saved.momentum.as_ref(), run(2, &longer, Some(&saved), 26)[1].0.adamw.updates), (None, 26));
}

/// The newcomers of a round are left alone when all that did it die: they do it.
#[test]
fn a_round_that_no_living_rank_has_done_begins_again() {
    let (corpus, plan, comm) = (corpus(), plan(settings(8, OUTER)), alone());
    let outcome = |state: &mut State| {
        let mut engine = LocalSteps::new(&plan, OUTER, &corpus, &comm, &state.model).unwrap();
        let losses = engine.steps(state, 4).unwrap();
        (losses, state.model.values.clone(), state.adamw.clone())
    };
    let mut newcomer = State::new(plan.model, &plan.config);
    newcomer.round = Some(Round { step: 0, contribution: None });
    newcomer.adamw.updates = 4;
    assert_eq!(outcome(&mut newcomer), outcome(&mut State::new(plan.model, &plan.config)));
}
