//! Loss and every gradient against PyTorch's autograd in f64; skipped, loudly, where no Python has PyTorch.
//!
//! `torch_oracle.py` holds the model a second time. It shares nothing with this crate but the files written here.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use ddp_gpt::config::{ModelConfig, Preset};
use ddp_gpt::gradients::LocalGradients;
use ddp_gpt::model::{Model, Workspace};
use ddp_gpt::ops::dropout::Dropout;
use ddp_gpt::ops::parallel::Threads;
use ddp_gpt::rng::{Stream, below, key, normal_pair};

/// The first interpreter with PyTorch. Debian's package belongs to its own, which another python3 may hide.
fn python() -> Option<&'static str> {
    ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    })
}

/// Computes loss and gradients of one batch and writes them, and what they follow from, to `folder`.
fn write_case(folder: &Path, config: ModelConfig, samples: usize, context: usize) {
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
    let (tokens, targets) = (draw(0), draw(1));

    let dropout = Dropout::new(0.0, 0, 0, 0);
    let mut workspace = Workspace::new(&config, samples, context, true, Threads::new(2));
    let mut gradients = LocalGradients::new(&model.layout);
    workspace.forward(&model, &tokens, &dropout);
    let loss = workspace.cross_entropy(&targets, true);
    workspace.backward(&model, &tokens, &dropout, &mut gradients).unwrap();

    let tensors: Vec<_> =
        model.layout.iter().map(|info| serde_json::json!({ "name": info.name, "shape": info.shape })).collect();
    let description = serde_json::json!({
        "layers": config.layers, "heads": config.heads, "samples": samples, "context": context,
        "loss": loss, "tensors": tensors,
    });
    let write = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
    let floats = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let integers = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    write("case.json", description.to_string().into_bytes());
    write("weights.f32", floats(&model.values));
    write("gradients.f32", floats(gradients.values_mut()));
    write("tokens.u32", integers(&tokens));
    write("targets.u32", integers(&targets));
}

#[test]
fn gradients_agree_with_pytorch() {
    let Some(python) = python() else {
        // Not eprintln: the test harness would keep it to itself.
        let line = "SKIPPED: comparison with PyTorch: neither python3 nor /usr/bin/python3 can import torch; \
                    'apt-get install python3-torch' or 'pip install torch' gets it\n";
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    };
    let tiny = Preset::Tiny.model(65);
    // The second takes the path with several attention blocks, and leaves the last positions unused.
    let long = ModelConfig { context: 72, ..tiny };
    for (config, samples, context) in [(tiny, 4, tiny.context), (long, 3, 70)] {
        let folder = tempfile::tempdir().unwrap();
        write_case(folder.path(), config, samples, context);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_oracle.py");
        let output = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
        let (said, complaint) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        println!("{config}, {samples} sequences of {context}:\n{said}");
        assert!(output.status.success(), "{python} torch_oracle.py: {}\n{complaint}", output.status);
    }
}
