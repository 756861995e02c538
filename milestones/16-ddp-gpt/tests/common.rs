//! Ranks as threads of one process: the program's loop, with gradients that check how they are used.

use std::time::Duration;

use anyhow::Result;
use ddp_gpt::checkpoint::Point;
use ddp_gpt::config::{Preset, TrainConfig};
use ddp_gpt::cpu::gradients::{Gradients, LocalGradients};
use ddp_gpt::cpu::model::Workspace;
use ddp_gpt::cpu::parallel::Threads;
use ddp_gpt::cpu::step::Cpu;
use ddp_gpt::data::{Batch, Corpus};
use ddp_gpt::dropout::Dropout;
use ddp_gpt::params::Model;
use ddp_gpt::report::Report;
use ddp_gpt::train::{Plan, State, train};
use tinynccl::{Comm, Config, ReduceOp};

/// A text with enough structure to learn something from.
pub(crate) fn text() -> String {
    let words = ["the ", "rank ", "sends ", "its ", "sum ", "to ", "next ", "and ", "waits.\n"];
    (0..900usize).map(|i| words[(i * i + i / 7) % words.len()]).collect()
}

pub(crate) fn corpus() -> Corpus {
    Corpus::new("test text", &text()).unwrap()
}

pub(crate) fn plan(config: TrainConfig) -> Plan {
    Plan {
        preset: Preset::Tiny,
        model: Preset::Tiny.model(corpus().tokenizer.size()),
        config,
        threads: Threads::new(1),
        bucket_bytes: 1 << 10,
        log_every: 4,
        eval_every: 5,
        eval_batches: 2,
        checkpoint_every: 0,
        places: 0,
        checkpoint: None,
        before_step: |_, _| Ok(()),
    }
}

/// The communicator of a single rank.
pub(crate) fn alone() -> Comm {
    Comm::threads(1, Config::default()).unwrap().remove(0)
}

pub(crate) fn run_alone(plan: &Plan, state: &mut State, corpus: &Corpus) -> Result<()> {
    let gradients = LocalGradients::new(&state.model.layout);
    run_alone_with(plan, state, corpus, gradients)
}

pub(crate) fn run_alone_with(
    plan: &Plan,
    state: &mut State,
    corpus: &Corpus,
    gradients: impl Gradients + 'static,
) -> Result<()> {
    let comm = alone();
    let mut engine = Cpu::new(plan, corpus, &comm, Box::new(gradients))?;
    train(plan, state, corpus, &comm, &mut engine, &Report::quiet()).map(|_| ())
}

/// The CPU's loss and gradients of one batch.
pub(crate) fn loss_and_gradients(model: &Model, batch: &Batch, dropout: &Dropout, threads: usize) -> (f64, Vec<f32>) {
    let (samples, context) = (batch.samples(), batch.inputs.len() / batch.samples());
    let mut workspace = Workspace::new(&model.config, samples, context, true, Threads::new(threads));
    let mut gradients = LocalGradients::new(&model.layout);
    workspace.forward(model, &batch.inputs, dropout);
    let loss = workspace.cross_entropy(&batch.targets, true);
    workspace.backward(model, &batch.inputs, dropout, &mut gradients).unwrap();
    (loss, gradients.values)
}

/// A rank's gradients, averaged in f64. Checks the contract on the way: each parameter ready once, the last layer first.
struct CheckedGradients<'c> {
    local: LocalGradients,
    comm: &'c Comm,
    ready: Vec<usize>,
    params: usize,
}

impl Gradients for CheckedGradients<'_> {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        assert!(!self.ready.contains(&i), "parameter {i} touched after it was ready");
        self.local.gradient_mut(i)
    }
    fn ready(&mut self, i: usize) -> Result<()> {
        self.ready.push(i);
        Ok(())
    }
    fn finish(&mut self) -> Result<()> {
        assert_eq!(self.ready, (0..self.params).rev().collect::<Vec<_>>());
        self.ready.clear();
        let mut values: Vec<f64> = self.local.values.iter().map(|&v| f64::from(v)).collect();
        self.comm.all_reduce_in_place(&mut values, ReduceOp::Avg)?;
        for (to, from) in self.local.values.iter_mut().zip(values) {
            *to = from as f32;
        }
        Ok(())
    }
}

/// Trains with `size` ranks and returns each rank's history and final parameters.
pub(crate) fn run_ranks(size: usize, plan: &Plan, corpus: &Corpus) -> Vec<(Vec<Point>, Vec<f32>)> {
    let mut config = Config::default();
    config.timeout = Duration::from_secs(60);
    std::thread::scope(|scope| {
        let threads: Vec<_> = Comm::threads(size, config)
            .unwrap()
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    // Other ranks start from other values: the broadcast must make them equal.
                    let mut state = State::new(
                        plan.model,
                        &TrainConfig { seed: plan.config.seed + 1000 * comm.rank() as u64, ..plan.config },
                    );
                    let (layout, comm) = (&state.model.layout, &comm);
                    let local = LocalGradients::new(layout);
                    let gradients = CheckedGradients { local, comm, ready: Vec::new(), params: layout.len() };
                    let mut engine = Cpu::new(plan, corpus, comm, Box::new(gradients)).unwrap();
                    train(plan, &mut state, corpus, comm, &mut engine, &Report::quiet()).unwrap();
                    (state.history, state.model.values)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
