//! Loss and every gradient against PyTorch's autograd in f64, and whole trainings against PyTorch's; skipped, loudly, where no
//! Python has PyTorch.
//!
//! `torch_oracle.py` holds the model a second time. It shares nothing with this crate but the files written here.
//! `compare/torch_gpt.py` holds the training a second time, with modules and an optimizer of PyTorch.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use ddp_gpt::config::{ModelConfig, Preset, TrainConfig};
use ddp_gpt::data::{Batch, Corpus};
use ddp_gpt::dropout::{Dropout, Site};
use ddp_gpt::params::Model;
use ddp_gpt::rng::{Stream, below, key, normal_pair};
use ddp_gpt::train::State;
use program_kit::testing::skipped;

use crate::common;

/// The first interpreter with PyTorch. Debian's package belongs to its own, which another python3 may hide.
fn python() -> Option<&'static str> {
    let found = ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import torch, numpy"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    if found.is_none() {
        let why = "neither python3 nor /usr/bin/python3 can import torch and numpy; \
                   'apt-get install python3-torch python3-numpy' or 'pip install torch numpy' gets them";
        skipped("comparison with PyTorch", why);
    }
    found
}

/// Runs a script of this milestone to its end; gives what it printed.
fn run(python: &str, script: &str, args: &[&str]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let output = Command::new(python).arg(path).args(args).output().unwrap();
    let (said, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{python} {script}: {}\n{said}{complaint}", output.status);
    said.into_owned()
}

/// Dropout's factors in the order in which the network applies them.
fn masks(dropout: &Dropout, config: &ModelConfig, samples: usize, context: usize) -> Vec<f32> {
    let factors = |site: Site| {
        let count = match site {
            Site::Attention(_) => config.heads * context * context,
            _ => context * config.channels,
        };
        (0..samples).flat_map(move |sample| (0..count).map(move |i| dropout.mask(site, sample).factor(i as u32)))
    };
    Site::all(config.layers).into_iter().flat_map(factors).collect()
}

/// Computes loss and gradients of one batch and writes them, and what they follow from, to `folder`.
fn write_case(folder: &Path, config: ModelConfig, samples: usize, context: usize, probability: f64) {
    let mut model = Model::new(config, 3);
    // Larger values than a fresh model's, so that no part of the network is close to linear or to zero.
    for (i, v) in model.values.iter_mut().enumerate() {
        let bits = |k| key(21, Stream::Init, &[i as u64, k]);
        *v += (0.2 * normal_pair(bits(0), bits(1)).0) as f32;
    }
    let draw = |k: u64| -> Vec<u32> {
        let token = |i| below(key(22, Stream::Batch, &[k, i]), config.vocab) as u32;
        (0..(samples * context) as u64).map(token).collect()
    };
    let mut batch = Batch::new(samples, context, 0, 1).unwrap();
    (batch.inputs, batch.targets) = (draw(0), draw(1));

    let dropout = Dropout::new(probability, 8, 3, 5);
    let (loss, gradients) = common::loss_and_gradients(&model, &batch, &dropout, 2);

    let tensors: Vec<_> =
        model.layout.iter().map(|info| serde_json::json!({ "name": info.name, "shape": info.shape })).collect();
    let description = serde_json::json!({
        "layers": config.layers, "heads": config.heads, "samples": samples, "context": context,
        "loss": loss, "tensors": tensors,
    });
    let write = |name: &str, bytes: Vec<u8>| fs::write(folder.join(name), bytes).unwrap();
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let integers = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    write("case.json", description.to_string().into_bytes());
    write("weights.f32", floats(&model.values));
    write("gradients.f32", floats(&gradients));
    write("tokens.u32", integers(&batch.inputs));
    write("targets.u32", integers(&batch.targets));
    write("masks.f32", floats(&masks(&dropout, &config, samples, context)));
}

#[test]
fn gradients_agree_with_pytorch() {
    let Some(python) = python() else { return };
    let tiny = Preset::Tiny.model(65);
    // The second takes the path with several attention blocks, and leaves the last positions unused.
    let long = ModelConfig { context: 72, ..tiny };
    for (config, samples, context) in [(tiny, 4, tiny.context), (long, 3, 70)] {
        for dropout in [0.0, 0.2] {
            let folder = tempfile::tempdir().unwrap();
            write_case(folder.path(), config, samples, context, dropout);
            let said = run(python, "tests/torch_oracle.py", &[folder.path().to_str().unwrap()]);
            println!("{config}, {samples} sequences of {context}, dropout {dropout}:\n{said}");
        }
    }
}

/// Checks that `compare/torch_gpt.py`, which runs beside a GPU run, does the same training: initial values, batches,
/// schedule, clipping, AdamW, evaluation. Dropout is off, because PyTorch draws other masks.
#[test]
fn a_training_has_the_losses_of_pytorchs() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (data, history) = (folder.path().join("text.txt"), folder.path().join("history.json"));
    let text = common::text();
    fs::write(&data, &text).unwrap();
    // A tenth of the preset's rate: with all of it, roundings grow to differences within 20 steps.
    let config = TrainConfig { steps: 43, lr: 1e-3, min_lr: 1e-4, warmup: 4, clip: 1.0, ..Preset::Tiny.train() };
    let corpus = Corpus::new("text", &text).unwrap();
    let mut state = State::new(Preset::Tiny.model(corpus.tokenizer.size()), &config);
    common::run_alone(&common::plan(config), &mut state, &corpus).unwrap();

    let paths = [data, history.clone()].map(|path| path.to_str().unwrap().to_owned());
    let fixed = ["--device", "cpu", "--preset", "tiny", "--steps", "43", "--lr", "1e-3", "--eval-every", "5"];
    let files = ["--eval-batches", "2", "--data", &paths[0], "--history", &paths[1]];
    run(python, "compare/torch_gpt.py", &[&fixed[..], &files].concat());
    let theirs: serde_json::Value = serde_json::from_slice(&fs::read(history).unwrap()).unwrap();
    let close = |ours, theirs: &serde_json::Value| approx::abs_diff_eq!(ours, theirs.as_f64().unwrap(), epsilon = 1e-4);
    let ours: Vec<f64> = state.history.iter().filter_map(|p| p.train).collect();
    let train = theirs["train"].as_array().unwrap();
    assert_eq!((ours.len(), train.len()), (43, 43));
    for (step, (&ours, theirs)) in ours.iter().zip(train).enumerate() {
        assert!(close(ours, theirs), "step {step}: loss {ours}, PyTorch's is {theirs}");
    }
    let ours: Vec<(usize, f64)> = state.history.iter().filter_map(|p| Some((p.step, p.validation?))).collect();
    let validation = theirs["validation"].as_array().unwrap();
    assert_eq!((ours.len(), validation.len()), (10, 10));
    for ((step, ours), theirs) in ours.into_iter().zip(validation) {
        assert_eq!(theirs[0].as_u64(), Some(step as u64));
        assert!(close(ours, &theirs[1]), "after {step} steps: validation loss {ours}, PyTorch's is {}", theirs[1]);
    }
    assert!(validation[9][1].as_f64() < validation[0][1].as_f64(), "it learns: {validation:?}");
}
