//! The GPU's passes and steps against the CPU's. Skipped, and says so, where there is no GPU; the program itself is tested
//! everywhere for what it says then.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use ddp_gpt::checkpoint::{self, Point};
use ddp_gpt::config::{ModelConfig, Preset, TrainConfig};
use ddp_gpt::data::{Batch, Split};
use ddp_gpt::dropout::{Dropout, Site};
use ddp_gpt::gpu::device::{self, Gpu};
use ddp_gpt::gpu::kernels::Shape;
use ddp_gpt::gpu::network::Network;
use ddp_gpt::gpu::step::Training;
use ddp_gpt::gpu::{Options, Precision};
use ddp_gpt::params::Model;
use ddp_gpt::report::Report;
use ddp_gpt::sample::{Sampling, sample};
use ddp_gpt::train::{Engine as _, Plan, State, train};
use program_kit::testing::{self, skipped};

use crate::common;

/// Number of GPUs; 0, with a line that says why, where none can be used.
fn gpus() -> usize {
    device::count().unwrap_or_else(|e| {
        skipped("a test of ddp-gpt on a GPU", &format!("{e:#}"));
        0
    })
}

struct Case {
    config: ModelConfig,
    samples: usize,
    precision: Precision,
    fused: bool,
    dropout: f64,
}

/// ‖a - b‖ / ‖b‖; NaN when there is one in `a`.
fn error(a: &[f32], b: &[f32]) -> f64 {
    let square = |v: f64| v * v;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    (difference / b.iter().map(|&b| square(f64::from(b))).sum::<f64>()).sqrt()
}

/// The loss and every tensor's gradient of one batch.
fn compare(case: &Case) -> Vec<String> {
    let Case { config, samples, precision, fused, dropout } = *case;
    let corpus = common::corpus();
    let mut model = Model::new(config, 3);
    // Larger values than a fresh model's, so that no part of the network is close to linear or to zero.
    for (info, scale) in model.layout.clone().iter().map(|info| (info, if info.decays() { 5.0 } else { 1.0 })) {
        for (j, v) in model.values[info.range()].iter_mut().enumerate() {
            *v = *v * scale + 0.05 * ((j as f32) * 1.7).sin();
        }
    }
    let mut batch = Batch::new(samples, config.context, 0, 1).unwrap();
    batch.fill(&corpus, Split::Train, 5, 0);
    let dropout = Dropout::new(dropout, 11, 2, 7);
    let (expected, gradients) = common::loss_and_gradients(&model, &batch, &dropout, 1);

    let shape = Shape::new(config, precision).unwrap();
    assert!(shape.fused || !fused, "{shape:?}");
    let shape = Shape { fused, ..shape };
    let mut network = Network::new(Gpu::open(0).unwrap(), shape, samples, dropout).unwrap();
    network.set_values(&model.values).unwrap();
    network.inputs.write(&network.gpu, &batch.inputs).unwrap();
    network.targets.write(&network.gpu, &batch.targets).unwrap();
    let masks = |site| (0..samples).map(move |sample| dropout.mask(site, sample).key);
    let keys: Vec<u64> = Site::all(config.layers).into_iter().flat_map(masks).collect();
    network.keys.write(&network.gpu, &keys).unwrap();
    network.forward(true).unwrap();
    network.cross_entropy(true).unwrap();
    let mut norms = Vec::new();
    network
        .backward(|tensor, norm| {
            norms.extend(norm.map(|number| (tensor, number)));
            Ok(())
        })
        .unwrap();
    network.gpu.synchronize().unwrap();
    norms.into_iter().for_each(|(tensor, number)| network.sum_norm(tensor, number).unwrap());
    let losses = network.losses.read(&network.gpu, 0, network.rows()).unwrap();
    let loss = losses.iter().map(|&v| f64::from(v)).sum::<f64>() / network.rows() as f64;
    let got = network.gradients.read(&network.gpu, 0, model.values.len()).unwrap();
    // By the arithmetic: f32 sums in another order; 10 and 7 bits of mantissa, through all layers and back.
    let (of_loss, of_gradient) = match precision {
        Precision::F32 => (1e-6, 2e-5),
        Precision::Tf32 => (1e-3, 1e-2),
        Precision::Bf16 => (2e-3, 4e-2),
    };
    let mut wrong = Vec::new();
    let what = format!("{config}, {samples} samples, {precision:?}, fused {fused}, dropout {}", dropout.is_on());
    let relative = ((loss - expected) / expected).abs();
    let mut worst = (0.0, "");
    for info in &model.layout {
        let e = error(&got[info.range()], &gradients[info.range()]);
        if e > worst.0 || e.is_nan() {
            worst = (e, &info.name);
        }
        if e.is_nan() || e > of_gradient {
            wrong.push(format!("{what}: {}: error {e:.2e}", info.name));
        }
    }
    if relative.is_nan() || relative > of_loss {
        wrong.push(format!("{what}: loss {loss}, the CPU's is {expected}"));
    }
    // Not by a macro: the test harness would keep it to itself.
    let line = format!("{what}: loss within {relative:.1e}, gradients within {:.1e} ({})\n", worst.0, worst.1);
    let _ = std::io::stderr().write_all(line.as_bytes());
    wrong
}

/// Shapes with one head and several, with contexts of one tile and many, with heads of 8 to 88 channels.
fn shapes() -> [(ModelConfig, usize); 5] {
    let vocab = common::corpus().tokenizer.size();
    let config = |layers, context, heads, channels| ModelConfig { vocab, context, layers, heads, channels };
    [
        (config(2, 16, 2, 16), 3),
        (config(2, 64, 2, 128), 3),
        (config(1, 96, 4, 128), 2),
        (config(2, 256, 3, 192), 2),
        (config(1, 32, 3, 264), 5),
    ]
}

fn compare_all(precisions: &[Precision], fused: bool) {
    if gpus() == 0 {
        return;
    }
    let mut wrong = Vec::new();
    for (config, samples) in shapes() {
        for &precision in precisions {
            if fused && !Shape::new(config, precision).unwrap().fused {
                continue;
            }
            for dropout in [0.0, 0.2] {
                wrong.extend(compare(&Case { config, samples, precision, fused, dropout }));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn loss_and_every_gradient_are_the_cpus() {
    compare_all(&[Precision::F32, Precision::Tf32, Precision::Bf16], false);
}

#[test]
fn with_fused_attention_too() {
    compare_all(&[Precision::Bf16], true);
}

fn options(precision: Precision, graph: bool) -> Options {
    Options { precision, graph, comm_blocks: 16, trace: None }
}

/// Trains; gives a sample of 20 characters.
fn on_gpu(plan: &Plan, options: &Options, state: &mut State) -> String {
    let (corpus, comm) = (common::corpus(), common::alone());
    let mut engine = Training::new(plan, options, state, &corpus, &comm).unwrap();
    train(plan, state, &corpus, &comm, &mut engine, &Report::quiet()).unwrap();
    let logits = |tokens: &[u32], last| engine.logits(&state.model, tokens, last);
    let how = Sampling { temperature: 0.8, seed: 1 };
    sample(&corpus.tokenizer, plan.model.context, 20, how, logits).unwrap()
}

/// Training has the CPU's losses: batches, masks, clipping, schedule and optimizer are the same.
#[test]
fn a_run_has_the_losses_of_the_cpus() {
    if gpus() == 0 {
        return;
    }
    let corpus = common::corpus();
    let config = TrainConfig { steps: 23, dropout: 0.1, clip: 0.7, ..Preset::Tiny.train() };
    let model = Preset::Tiny.model(corpus.tokenizer.size());
    let mut cpu = State::new(model, &config);
    common::run_alone(&common::plan(config), &mut cpu, &corpus).unwrap();
    let mut runs = Vec::new();
    for graph in [false, true] {
        let mut state = State::new(model, &config);
        let text = on_gpu(&common::plan(config), &options(Precision::F32, graph), &mut state);
        assert_eq!(text.chars().count(), 20);
        assert_eq!(state.history.len(), cpu.history.len());
        for (a, b) in cpu.history.iter().zip(&state.history) {
            let close = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => approx::abs_diff_eq!(a, b, epsilon = 1e-3),
                (None, None) => true,
                _ => false,
            };
            assert!(a.step == b.step && close(a.train, b.train) && close(a.validation, b.validation), "{a:?} {b:?}");
        }
        runs.push((text, state.history, state.model.values));
    }
    assert_eq!(runs[0], runs[1], "a graph computes what its launches compute");

    // A resumed run goes on as if it had not stopped.
    let folder = tempfile::tempdir().unwrap();
    let mut plan = common::plan(config);
    plan.checkpoint = Some(folder.path().join("c"));
    plan.checkpoint_every = 10;
    let half = TrainConfig { steps: 10, ..config };
    // The schedule must be the whole run's: stop by steps in the header, not in the settings.
    let mut state = State::new(model, &config);
    let short = Plan { config: half, ..plan.clone() };
    let options = options(Precision::Bf16, true);
    on_gpu(&short, &options, &mut state);
    let saved = checkpoint::load(plan.checkpoint.as_ref().unwrap()).unwrap();
    assert_eq!((saved.header.step, saved.values.len()), (10, state.model.values.len()));
    assert_eq!((&saved.values, &saved.adamw[0]), (&state.model.values, &state.adamw));
    let mut resumed = State::resume(saved, &config, 0);
    on_gpu(&plan, &options, &mut resumed);
    let last = resumed.history.last().unwrap();
    assert_eq!((last.step, resumed.adamw.updates), (23, 23));
    assert!(last.validation.unwrap() < cpu.history[0].validation.unwrap(), "{last:?}");
}

fn program(folder: &Path) -> Command {
    let mut command = testing::program_or("DDP_GPT", env!("CARGO_BIN_EXE_ddp-gpt"));
    command.current_dir(folder).args(["--device", "cuda"]);
    command
}

fn text(folder: &Path) {
    let text: String = (0..600).map(|i| ["to be ", "or not ", "to sum\n"][(i * i + i / 5) % 3]).collect();
    fs::write(folder.join("text.txt"), text).unwrap();
}

/// A short run of the program: what it printed, and its losses.
fn short_run(folder: &Path, ranks: usize, more: &[&str]) -> (String, Vec<Point>) {
    let ranks = ranks.to_string();
    let fixed = [
        "--steps",
        "30",
        "--lr",
        "1e-3",
        "--precision",
        "f32",
        "--dropout",
        "0.1",
        "--sample-chars",
        "0",
        "--out",
        "o",
    ];
    let mut command = program(folder);
    command.args(["--preset", "tiny", "--data", "text.txt", "--ranks", &ranks]).args(fixed).args(more);
    let out = testing::output(&mut command);
    let history = checkpoint::load(&folder.join("o/checkpoint.bin")).unwrap().header.history;
    (out, history)
}

fn same_losses(alone: &[Point], several: &[Point], what: &str) {
    assert_eq!(several.len(), alone.len());
    for (a, b) in alone.iter().zip(several) {
        let close = approx::abs_diff_eq!(a.train.unwrap(), b.train.unwrap(), epsilon = 1e-3);
        assert!(close, "{what}: {a:?} {b:?}");
    }
}

#[test]
fn several_gpus_have_the_losses_of_one() {
    let gpus = gpus();
    if gpus < 2 {
        if gpus == 1 {
            skipped("ddp-gpt on several ranks", "there is one device only");
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let (_, alone) = short_run(folder.path(), 1, &[]);
    for ranks in (2..=4).filter(|&ranks| ranks <= gpus) {
        for more in [&[][..], &["--graph"], &["--graph", "--bucket-kib", "1", "--comm-blocks", "4"]] {
            let (_, history) = short_run(folder.path(), ranks, more);
            same_losses(&alone, &history, &format!("{ranks} ranks {more:?}"));
        }
    }
}

/// One more rank than there are GPUs. Buckets of many sizes follow one another without the host between them.
#[test]
fn ranks_that_share_a_gpu_have_the_losses_of_one() {
    let gpus = gpus();
    if gpus == 0 {
        return;
    }
    let ranks = [2, 3, 4, 6, 12].into_iter().find(|&ranks| ranks > gpus).unwrap();
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let (_, alone) = short_run(folder.path(), 1, &[]);
    for more in [&[][..], &["--graph"], &["--graph", "--bucket-kib", "1"]] {
        let (said, history) = short_run(folder.path(), ranks, more);
        same_losses(&alone, &history, &format!("{ranks} ranks on {gpus} GPUs {more:?}"));
        assert_eq!(said.contains("note: ranks share a GPU"), more.contains(&"--graph"), "{said}");
    }
}

#[test]
fn a_trace_shows_averages_beside_the_passes() {
    let gpus = gpus();
    if gpus < 2 {
        if gpus == 1 {
            skipped("ddp-gpt's trace of two ranks", "there is one device only");
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    let (said, _) = short_run(folder.path(), 2, &["--graph", "--bucket-kib", "1", "--trace", "t.json"]);
    assert!(said.contains("t.0.json: the last step took"), "{said}");
    for rank in 0..2 {
        let bytes = fs::read(folder.path().join(format!("t.{rank}.json"))).unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_slice(&bytes).unwrap();
        let spans = |tid: u64| events.iter().filter(move |e| e["ph"] == "X" && e["tid"] == tid && e["pid"] == rank);
        let names = |tid: u64| spans(tid).filter_map(|e| e["name"].as_str()).collect::<Vec<_>>();
        let (passes, averaging) = (names(0), names(1));
        assert_eq!((passes[0], passes[passes.len() - 1]), ("forward", "AdamW"), "{passes:?}");
        assert!(averaging.len() > 4 && averaging.iter().all(|name| name.starts_with("bucket ")), "{averaging:?}");
        // The first average is ready long before the backward pass ends.
        let time = |e: &serde_json::Value, of: &str| e[of].as_f64().unwrap();
        let last = spans(0).rfind(|e| e["name"].as_str().is_some_and(|n| n.starts_with("backward"))).unwrap();
        let first = spans(1).next().unwrap();
        assert!(time(first, "ts") < time(last, "ts"), "{first} {last}");
        assert!(events.iter().all(|e| e["ph"] == "M" || time(e, "dur") >= 0.0), "{events:?}");
    }
}

#[test]
fn without_a_gpu_it_says_so_in_one_line_and_ends_with_77() {
    let folder = tempfile::tempdir().unwrap();
    text(folder.path());
    for ranks in ["1", "2"] {
        // Where there is a GPU it is hidden; where there is no driver, hiding does nothing.
        let mut command = program(folder.path());
        let ended = testing::run(command.env("CUDA_VISIBLE_DEVICES", "").args(["--ranks", ranks]));
        assert_eq!((ended.code, ended.stderr.lines().count(), ended.stdout.as_str()), (Some(77), 1, ""), "{ended:?}");
        assert!(ended.stderr.starts_with("error: --device cuda: "), "{ended:?}");
    }
}
