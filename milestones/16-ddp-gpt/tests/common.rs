//! Ranks as threads of one process, without the communication library: the same loop, gradients averaged in place.

use std::sync::{Arc, Barrier, Mutex};

use anyhow::Result;
use ddp_gpt::checkpoint::Point;
use ddp_gpt::config::{Preset, TrainConfig};
use ddp_gpt::data::Corpus;
use ddp_gpt::gradients::{CommTime, Gradients, LocalGradients, OneRank, Ranks};
use ddp_gpt::ops::parallel::Threads;
use ddp_gpt::params;
use ddp_gpt::report::Silent;
use ddp_gpt::train::{Plan, State, train};

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
        config,
        threads: Threads::new(1),
        eval_every: 5,
        eval_batches: 2,
        checkpoint_every: 0,
        checkpoint: None,
    }
}

pub(crate) fn run_alone(plan: &Plan, state: &mut State, corpus: &Corpus) -> Result<()> {
    let mut gradients = LocalGradients::new(&state.model.layout);
    train(plan, state, corpus, &mut OneRank, &mut gradients, &mut Silent).map(|_| ())
}

struct Shared {
    barrier: Barrier,
    slots: Mutex<Vec<Vec<f64>>>,
}

/// One of several ranks that are threads.
#[derive(Clone)]
struct ThreadRank {
    rank: usize,
    size: usize,
    shared: Arc<Shared>,
}

impl ThreadRank {
    fn world(size: usize) -> Vec<ThreadRank> {
        let shared = Arc::new(Shared { barrier: Barrier::new(size), slots: Mutex::new(vec![Vec::new(); size]) });
        (0..size).map(|rank| ThreadRank { rank, size, shared: shared.clone() }).collect()
    }
}

impl Ranks for ThreadRank {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn mean(&mut self, values: &mut [f64]) -> Result<()> {
        self.shared.slots.lock().unwrap()[self.rank] = values.to_vec();
        self.shared.barrier.wait();
        {
            let slots = self.shared.slots.lock().unwrap();
            for (i, v) in values.iter_mut().enumerate() {
                *v = slots.iter().map(|s| s[i]).sum::<f64>() / self.size as f64;
            }
        }
        self.shared.barrier.wait();
        Ok(())
    }
    fn barrier(&mut self) -> Result<()> {
        self.shared.barrier.wait();
        Ok(())
    }
}

/// Gradients of such a rank. Checks the contract on the way: each parameter ready once, the last layer first.
struct ThreadGradients {
    local: LocalGradients,
    ranks: ThreadRank,
    ready: Vec<usize>,
    params: usize,
}

impl Gradients for ThreadGradients {
    fn gradient_mut(&mut self, i: usize) -> Result<&mut [f32]> {
        assert!(!self.ready.contains(&i), "parameter {i} touched after it was ready");
        self.local.gradient_mut(i)
    }
    fn ready(&mut self, i: usize) -> Result<()> {
        self.ready.push(i);
        Ok(())
    }
    fn finish(&mut self) -> Result<CommTime> {
        assert_eq!(self.ready, (0..self.params).rev().collect::<Vec<_>>());
        self.ready.clear();
        let mut values: Vec<f64> = self.local.values_mut().iter().map(|&v| f64::from(v)).collect();
        self.ranks.mean(&mut values)?;
        for (to, from) in self.local.values_mut().iter_mut().zip(values) {
            *to = from as f32;
        }
        Ok(CommTime::default())
    }
    fn broadcast_parameters(&mut self, parameters: &mut [&mut [f32]]) -> Result<()> {
        for p in parameters {
            let mut values: Vec<f64> =
                p.iter().map(|&v| if self.ranks.rank == 0 { f64::from(v) } else { 0.0 }).collect();
            self.ranks.mean(&mut values)?;
            for (to, from) in p.iter_mut().zip(values) {
                *to = (from * self.ranks.size as f64) as f32;
            }
        }
        Ok(())
    }
}

/// Trains with `size` ranks and returns each rank's history and final parameters.
pub(crate) fn run_ranks(size: usize, plan: &Plan, corpus: &Corpus) -> Vec<(Vec<Point>, Vec<f32>)> {
    let model = Preset::Tiny.model(corpus.tokenizer.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = ThreadRank::world(size)
            .into_iter()
            .map(|mut ranks| {
                scope.spawn(move || {
                    // Other ranks start from other values: the broadcast must make them equal.
                    let mut state = State::new(model, plan.config.seed + 1000 * ranks.rank as u64);
                    let layout = params::layout(&model);
                    let local = LocalGradients::new(&layout);
                    let mut gradients =
                        ThreadGradients { local, ranks: ranks.clone(), ready: Vec::new(), params: layout.len() };
                    train(plan, &mut state, corpus, &mut ranks, &mut gradients, &mut Silent).unwrap();
                    (state.history, state.model.values)
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
