//! The command line: what may be asked for, and the checks that come before any training.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};
use program_kit::Usage;
use replay::Replay;
use tinynccl::config::TransportChoice;

use crate::checkpoint::{self, Checkpoint};
use crate::config::{OuterConfig, Preset, TrainConfig};
use crate::cpu::bench::BenchArgs;
use crate::cpu::parallel::Threads;
use crate::data::Corpus;
use crate::gpu;
use crate::train::Plan;

/// Trains a character-level GPT with data parallelism over tinynccl.
#[derive(Debug, Clone, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Something other than training.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of training.
    #[command(flatten)]
    pub train: TrainArgs,
}

/// Other things than training.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Times training steps on one rank, by kind of work, against gemm's own speed.
    Bench(BenchArgs),
}

/// Device that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Device {
    /// On this machine's cores.
    Cpu,
    /// On NVIDIA GPUs.
    Cuda,
}

/// Options of training. What is absent comes from the checkpoint, or else from the preset.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Sizes of model and run [default: small, or the checkpoint's].
    #[arg(long, value_enum)]
    pub preset: Option<Preset>,
    /// Ranks that this program starts on this machine; a launcher's environment overrides it.
    #[arg(long, default_value = "2", value_parser = positive)]
    pub ranks: usize,
    /// Text to learn, UTF-8 [default: data/tinyshakespeare.txt].
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Steps of the whole run.
    #[arg(long, value_parser = positive)]
    pub steps: Option<usize>,
    /// Take 200 steps, half a minute on two cores: the text then has words and lines, but no sense yet.
    #[arg(long, conflicts_with_all = ["steps", "resume"])]
    pub quick: bool,
    /// Sequences per step over all ranks; a multiple of their number.
    #[arg(long, value_parser = positive)]
    pub batch: Option<usize>,
    /// Peak learning rate.
    #[arg(long, value_parser = real("expected a number above 0, at most 1", |v| v > 0.0 && v <= 1.0))]
    pub lr: Option<f64>,
    /// Share of activations that dropout zeroes.
    #[arg(long, value_parser = real("expected a number from 0 to 0.9", |v| (0.0..=0.9).contains(&v)))]
    pub dropout: Option<f64>,
    /// Seed of all random numbers.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Threads per rank [default: cores / ranks].
    #[arg(long, value_parser = positive)]
    pub threads: Option<usize>,
    /// Folder for the plot, the sample and the checkpoint.
    #[arg(long, value_name = "DIR", default_value = "out/ddp-gpt")]
    pub out: PathBuf,
    /// A page of the run.
    #[command(flatten)]
    pub replay: Replay,
    /// Steps between evaluations on the validation part.
    #[arg(long, value_parser = positive)]
    pub eval_every: Option<usize>,
    /// Global batches per evaluation.
    #[arg(long, default_value = "20", value_parser = positive)]
    pub eval_batches: usize,
    /// Steps between checkpoints; 0: one at the end.
    #[arg(long, default_value = "0")]
    pub checkpoint_every: usize,
    /// Steps between lines of progress when the output is no terminal.
    #[arg(long, default_value = "50", value_parser = positive)]
    pub log_every: usize,
    /// Checkpoint to resume from.
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Transport between ranks: auto, tcp, shm or verbs (RDMA, with the feature `verbs`) [default: TINYNCCL_TRANSPORT,
    /// or auto].
    #[arg(long)]
    pub transport: Option<TransportChoice>,
    /// Smallest bucket of gradients, in KiB; small buckets start earlier, large ones are fewer [default: 512, on GPUs
    /// 8000].
    #[arg(long, value_parser = positive)]
    pub bucket_kib: Option<usize>,
    /// For slow networks (DiLoCo): every rank takes this many steps alone, then one outer step averages the changes of
    /// their parameters. A round must take less time than TINYNCCL_TIMEOUT.
    #[arg(long, value_name = "H", value_parser = positive)]
    pub local_steps: Option<usize>,
    /// Learning rate of the outer steps [default: 0.7].
    #[arg(long, requires = "local_steps", value_parser = real("expected a number above 0", |v| v > 0.0))]
    pub outer_lr: Option<f64>,
    /// Nesterov momentum of the outer steps [default: 0.9].
    #[arg(long, requires = "local_steps",
        value_parser = real("expected a number from 0, below 1", |v| (0.0..1.0).contains(&v)))]
    pub outer_momentum: Option<f64>,
    /// Go on without lost ranks, on the CPU: the batch is divided among the remaining ones.
    #[arg(long)]
    pub elastic: bool,
    /// Number of spare processes, which wait and take the places of lost ranks. Under a launcher the last ranks are the
    /// spares.
    #[arg(long, value_name = "N", default_value = "0", requires = "elastic")]
    pub spare: usize,
    /// Device that computes: the CPU, or one GPU per rank.
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Device,
    /// Options for GPUs only.
    #[command(flatten)]
    pub gpu: gpu::Options,
    /// Characters of the sample at the end.
    #[arg(long, default_value = "500")]
    pub sample_chars: usize,
    /// Randomness of the sample; 0 takes the likeliest character each time.
    #[arg(long, default_value = "0.8", value_parser = real("expected a number of at least 0", |v| v >= 0.0))]
    pub temperature: f64,
}

/// A whole number above 0.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n: &usize| n > 0).ok_or_else(|| "expected a whole number above 0".to_owned())
}

/// A number that is `good`; `expected` says which ones are.
fn real(expected: &'static str, good: fn(f64) -> bool) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| text.parse().ok().filter(|&v: &f64| v.is_finite() && good(v)).ok_or_else(|| expected.to_owned())
}

/// Everything that a training run needs, checked.
#[derive(Debug)]
pub struct Job {
    /// The text.
    pub corpus: Corpus,
    /// Settings.
    pub plan: Plan,
    /// Checkpoint to continue from; `None`: a new run.
    pub resume: Option<Checkpoint>,
    /// Lines for the person who watches.
    pub notes: Vec<String>,
}

/// Steps of `--quick`.
const QUICK_STEPS: usize = 200;

/// Cores of this machine over `ranks`, at least 1.
pub fn default_threads(ranks: usize) -> usize {
    (std::thread::available_parallelism().map_or(1, usize::from) / ranks.max(1)).max(1)
}

/// Checks everything that can be checked before any rank starts. `local_ranks`: ranks that share this machine.
pub fn prepare(args: &TrainArgs, ranks: usize, local_ranks: usize) -> Result<Job> {
    let mut notes = Vec::new();
    let resume = args.resume.as_deref().map(checkpoint::load).transpose()?;
    let stored = resume.as_ref().map(|c| &c.header);
    let preset = args.preset.or(stored.map(|h| h.preset)).unwrap_or(Preset::Small);
    let corpus = Corpus::find(args.data.as_deref(), &mut notes)?;
    let model = preset.model(corpus.tokenizer.size());
    corpus.check_length(model.context)?;

    let base = stored.map_or(preset.train(), |h| h.train);
    let lr = args.lr.unwrap_or(base.lr);
    let steps = args.steps.or(args.quick.then_some(QUICK_STEPS)).unwrap_or(base.steps);
    let config = TrainConfig {
        steps,
        batch: args.batch.unwrap_or(base.batch),
        lr,
        min_lr: if args.lr.is_some() { lr / 10.0 } else { base.min_lr },
        warmup: if stored.is_some() { base.warmup } else { base.warmup.min(steps / 10) },
        dropout: args.dropout.unwrap_or(base.dropout),
        seed: args.seed.unwrap_or(base.seed),
        outer: match args.local_steps {
            Some(local_steps) => Some(OuterConfig {
                local_steps,
                lr: args.outer_lr.or(base.outer.map(|outer| outer.lr)).unwrap_or(0.7),
                momentum: args.outer_momentum.or(base.outer.map(|outer| outer.momentum)).unwrap_or(0.9),
            }),
            None => base.outer,
        },
        ..base
    };
    if config.outer.is_some() && args.device == Device::Cuda {
        bail!(Usage("--local-steps needs --device cpu: on GPUs a step has its averages in it".to_owned()));
    }
    if args.elastic && args.device == Device::Cuda {
        bail!(Usage("--elastic needs --device cpu: communicators of GPUs do not lose ranks yet".to_owned()));
    }
    if !config.batch.is_multiple_of(ranks) {
        let batch = config.batch;
        let why = "each must get the same number of sequences";
        bail!(Usage(format!("--batch {batch} is not a multiple of {ranks} ranks: {why}")));
    }
    if let (Some(header), Some(path)) = (stored, &args.resume) {
        header.check(&model, &corpus.tokenizer).with_context(|| format!("cannot resume from {}", path.display()))?;
        if header.step > config.steps {
            bail!("--steps {}: the checkpoint {} has {} done", config.steps, path.display(), header.step);
        }
        notes.push(format!("resuming {} after {} of {} steps", path.display(), header.step, config.steps));
        if config != header.train {
            let warning = "warning: other settings than the checkpoint's: losses will not be an uninterrupted run's";
            notes.push(warning.to_owned());
        }
    }
    writable(&args.out)?;
    let checkpoint = args.out.join("checkpoint.bin");
    if stored.is_none() && checkpoint.exists() {
        let path = checkpoint.display();
        notes.push(format!("note: {path} is there already and will be replaced; --resume goes on from it"));
    }
    // An average on a GPU costs launches, and multiprocessors that the backward pass lacks meanwhile: few large ones.
    let bucket_kib = args.bucket_kib.unwrap_or(if args.device == Device::Cuda { 8000 } else { 512 });
    let plan = Plan {
        preset,
        model,
        config,
        threads: Threads::new(args.threads.unwrap_or_else(|| default_threads(local_ranks))),
        bucket_bytes: bucket_kib << 10,
        log_every: args.log_every,
        eval_every: args.eval_every.unwrap_or_else(|| preset.eval_every()),
        eval_batches: args.eval_batches,
        checkpoint_every: args.checkpoint_every,
        places: if args.spare > 0 { ranks } else { 0 },
        checkpoint: Some(checkpoint),
        before_step: |_, _| Ok(()),
    };
    Ok(Job { corpus, plan, resume, notes })
}

/// Makes the folder and proves that a file can be written there.
fn writable(folder: &Path) -> Result<()> {
    let probe = folder.join(format!(".probe-{}", std::process::id()));
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&probe, b""))
        .and_then(|()| std::fs::remove_file(&probe))
        .with_context(|| format!("cannot write into the output folder {}", folder.display()))
}
