//! The program's output and its verdicts.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use course_kit::train::mlp::Mlp;
use course_kit::train::options::Epoch;
use course_kit::train::rng::Rng;
use cudarc::driver::CudaContext;
use ddp_gpu::buckets::Buckets;
use ddp_gpu::check::{Alone, GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_difference};
use ddp_gpu::kernels::Kernels;
use ddp_gpu::model::specs;
use ddp_gpu::replica::Exchange;
use ddp_gpu::time::{self, Timed, Way};
use ddp_gpu::timeline::size;
use ddp_gpu::train;
use tinynccl::cuda::{self, Path};
use tinynccl::ddp::ParamSpec;
use tinynccl::process_group::ProcessGroup;
use tinynccl::wire::Collective;

use crate::cli::{TimeArgs, TrainArgs};

/// Prints on rank 0 alone.
struct Page {
    first: bool,
}

impl Page {
    fn line(&self, text: impl AsRef<str>) {
        if self.first {
            println!("{}", text.as_ref());
        }
    }

    /// Prints a verdict of the list at the end; a check that does not hold is an error.
    fn verdict(&self, holds: bool, what: &str) -> Result<()> {
        ensure!(holds, "this does not hold: {what}");
        self.line(format!("  ok  {what}"));
        Ok(())
    }
}

/// Trains with and without overlap, alone, and on the CPU; compares.
pub(crate) fn train(group: &ProcessGroup, kernels: &Kernels, arguments: &TrainArgs) -> Result<()> {
    let (ranks, options) = (group.size(), &arguments.options);
    options.check(ranks)?;
    let page = Page { first: group.rank() == 0 };
    let sizes = train::sizes(options);
    let model = Mlp::new(&sizes, &mut Rng::new(options.training.seed));
    page.line(format!(
        "{}, MLP 2-{hidden}-{hidden}-3 with {} parameters, {} points, global batch {} ({} per rank)",
        who(group)?,
        model.len(),
        3 * options.points,
        options.training.batch,
        options.training.batch / ranks,
        hidden = options.training.hidden
    ));
    show_path(&page, group);
    show_buckets(&page, &Buckets::new(&model.specs(), options.bucket_bytes), &model.specs());

    page.line("\nepoch     loss  accuracy  weights (compared over all ranks)");
    let row = |epoch: &Epoch| {
        if epoch.number == 1
            || epoch.number == options.training.epochs
            || epoch.number.is_multiple_of(options.training.epochs.div_ceil(12))
        {
            let Epoch { number, loss, accuracy, weights } = epoch;
            page.line(format!("{number:>5} {loss:>8.5} {:>7.1} %  {weights:016x} identical", 100.0 * accuracy));
        }
    };
    let how = if arguments.no_overlap { Exchange::AfterBackward } else { Exchange::Overlapped };
    let ours = train::train(group, kernels, options, how, row)?;
    page.line("");
    let plain = match how {
        Exchange::Overlapped => {
            let plain = train::train(group, kernels, options, Exchange::AfterBackward, |_| ())?;
            page.line(format!(
                "per step: {:.3} ms overlapped, {:.3} ms with the all-reduces behind backward",
                ours.step_ms, plain.step_ms
            ));
            Some(plain)
        }
        _ => {
            page.line(format!("per step: {:.3} ms with the all-reduces behind backward", ours.step_ms));
            None
        }
    };

    page.line("checks");
    let epochs = &ours.epochs;
    let starts = format!(
        "{} different starts on {ranks} rank(s), the same weights after the broadcast: {:016x}",
        ours.starts, ours.start
    );
    page.verdict(ours.starts == ranks, &starts)?;
    // A difference would have ended the training.
    page.verdict(true, &format!("after each of {} epochs the weights are the same bits on all ranks", epochs.len()))?;
    if let [first, .., last] = epochs.as_slice() {
        page.verdict(last.loss < first.loss, &format!("the loss falls: {:.5} to {:.5}", first.loss, last.loss))?;
    }
    if let Some(plain) = plain {
        page.verdict(plain.epochs == *epochs, "without overlap: the same bits in every epoch")?;
    }
    let alone = Alone::new(context(group)?.ordinal())?;
    let difference = alone.gradient_difference(kernels, options).context("comparing gradients with the CPU's")?;
    let what = format!("gradients of the first batch: within {difference:.1e} of the CPU's (of the largest)");
    page.verdict(difference <= GRADIENT_TOLERANCE, &what)?;
    let single = alone.train(kernels, options).context("training with the whole batch on one rank")?;
    let difference = loss_difference(epochs, &single.epochs);
    let what = format!("one rank with the whole batch: losses within {difference:.1e} in every epoch");
    page.verdict(difference <= LOSS_TOLERANCE, &what)?;
    match alone.train_on_the_cpu(options)? {
        Some(cpu) => {
            let difference = loss_difference(epochs, &cpu);
            let what = format!("the same training on the CPU: losses within {difference:.1e} in every epoch");
            page.verdict(difference <= LOSS_TOLERANCE, &what)?;
        }
        None => page.line("  --  the same training on the CPU: left out, it would take minutes with this model"),
    }
    page.line(format!("\nOK: world of size {ranks}, {} epochs, all checks hold", epochs.len()));
    Ok(())
}

/// Times a larger model's step four ways.
pub(crate) fn time(group: &ProcessGroup, kernels: &Kernels, arguments: &TimeArgs) -> Result<()> {
    let (ranks, settings, few) = (group.size(), &arguments.settings, arguments.blocks);
    let page = Page { first: group.rank() == 0 };
    let specs = specs(&settings.sizes());
    page.line(format!(
        "{}, {} hidden layers of {}: {:.1} million parameters, {} samples per rank",
        who(group)?,
        settings.layers,
        settings.hidden,
        specs.iter().map(|spec| spec.len).sum::<usize>() as f64 / 1e6,
        settings.batch
    ));
    let buckets = Buckets::new(&specs, settings.bucket_bytes);
    show_path(&page, group);
    show_buckets(&page, &buckets, &specs);

    let way = |how, blocks| Way { how, blocks };
    let mut ways =
        vec![way(Exchange::Never, None), way(Exchange::AfterBackward, None), way(Exchange::Overlapped, None)];
    // On other paths an all-reduce has no kernel whose blocks could be chosen.
    let device = group.device_comm().filter(|device| device.path() == Path::Peer);
    if device.is_some() {
        ways.push(way(Exchange::Overlapped, Some(few)));
    }
    let timed = time::time(group, kernels, settings, &ways)?;
    let [never, after, overlapped, narrow @ ..] = timed.as_slice() else { return Ok(()) };
    let largest = buckets.spans().iter().map(|span| span.len() * size_of::<f32>()).max().unwrap_or(0);
    let many = device.map(|device| device.choice(Collective::AllReduce, largest).blocks);
    page.line(format!(
        "\nms per step (slowest rank's mean of {} steps, median of {}), and what the all-reduces add",
        settings.steps, settings.rounds
    ));
    let with = |how: &str, blocks| match blocks {
        Some(blocks) => format!("{how}, {blocks} blocks each"),
        None => how.to_owned(),
    };
    let mut named = vec![
        (never, "no all-reduces".to_owned()),
        (after, with("all-reduces behind backward", many)),
        (overlapped, with("overlapped with backward", many)),
    ];
    named.extend(narrow.iter().map(|narrow| (narrow, with("overlapped with backward", Some(few)))));
    let added = |timed: &Timed| timed.step_ms - never.step_ms;
    for (timed, name) in &named {
        let hidden = match timed.way.how {
            Exchange::Overlapped if ranks > 1 => {
                format!("  {:.0} % hidden", 100.0 * (1.0 - added(timed) / added(after)))
            }
            _ => String::new(),
        };
        page.line(format!("{:>9.3} {:>+7.3}  {name}{hidden}", timed.step_ms, added(timed)));
    }
    for (timed, name) in &named[1..] {
        page.line(format!("\nlast step on rank 0, {name}"));
        page.line(timed.timeline.to_string().trim_end());
    }
    page.line("");
    let weights = overlapped.weights.unwrap_or_default();
    let steps = settings.steps * (settings.rounds + 1);
    let what = format!("after {steps} steps the same bits with and without overlap, on all ranks: {weights:016x}");
    page.verdict(after.weights == overlapped.weights, &what)
}

/// Our GPU.
fn context(group: &ProcessGroup) -> Result<&CudaContext> {
    group.device().map(Arc::as_ref).context("the group has no GPU")
}

fn who(group: &ProcessGroup) -> Result<String> {
    let (ranks, gpu) = (group.size(), context(group)?.name()?);
    Ok(match (ranks, cuda::device_count()?) {
        (1, _) => format!("1 rank on 1 x {gpu} (one rank: there is nothing to average)"),
        (_, gpus) if gpus < ranks => format!("{ranks} ranks sharing {gpus} x {gpu}"),
        _ => format!("{ranks} ranks on {ranks} x {gpu}"),
    })
}

/// Prints the path of the gradients from one rank to the others.
fn show_path(page: &Page, group: &ProcessGroup) {
    match group.device_comm() {
        _ if group.size() == 1 => {}
        Some(device) => page.line(format!("path: {} ({})", device.path(), device.path_reason())),
        None => page.line(format!("backend {}: {}", group.backend(), group.why())),
    }
}

fn show_buckets(page: &Page, buckets: &Buckets, specs: &[ParamSpec]) {
    for (bucket, span) in buckets.spans().iter().enumerate() {
        let names: Vec<&str> = buckets.params(bucket).map(|p| specs[p].name.as_str()).collect();
        let names = match names.as_slice() {
            [first, .., last] => format!("{first} to {last}"),
            _ => names.concat(),
        };
        let bytes = span.len() * size_of::<f32>();
        page.line(format!("bucket {bucket}: {bytes:>9} bytes ({}), {names}", size(bytes)));
    }
}
