//! The milestones that run on this machine, the fallbacks for missing parts, and the remedies.

use course_kit::python::Interpreter;
use serde::Serialize;

use super::Facts;

/// Ability of a milestone to run on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Verdict {
    /// As its README shows.
    Runs,
    /// With a fallback for a missing part.
    Fallback,
    /// It would end with status 77.
    Cannot,
}

/// A milestone on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Milestone {
    pub(crate) number: u8,
    pub(crate) name: &'static str,
    pub(crate) verdict: Verdict,
    /// Description of how it runs, or of the part that it lacks.
    pub(crate) how: String,
    /// The command or the step that provides the missing part.
    pub(crate) mend: Option<&'static str>,
}

const VERBS: &str = "scripts/setup.sh --verbs";
const PYTHON: &str = "scripts/setup.sh --python";
pub(crate) const MPI: &str = "scripts/setup.sh --mpi";
/// The options of scripts/setup.sh that milestones need.
pub(crate) const OPTIONS: [&str; 3] = [VERBS, PYTHON, MPI];
const CARD: &str = "on the card in user space";
const LOOPBACK: &str = "ip link set lo up";
const NVRTC: &str = "apt-get install libnvrtc12";
const GPU: &str = "scripts/gpu-tests.sh, on a machine with an NVIDIA GPU";

/// The packages of the sixteen, by number.
pub(crate) const NAMES: [&str; 16] = [
    "tcp-echo",
    "verbs-hello",
    "cuda-vec-add",
    "cuda-verbs",
    "rdma-write",
    "lib-hello",
    "allreduce-tcp",
    "allreduce-verbs",
    "allreduce-gpu",
    "stress",
    "pytorch-bindings",
    "pytorch-ddp",
    "ddp-train",
    "ddp-gpu",
    "ddp-sine",
    "ddp-gpt",
];

/// A verdict, its reason, and the remedy.
type Answer = (Verdict, String, Option<&'static str>);

pub(crate) fn all(facts: &Facts) -> Vec<Milestone> {
    let answer = |number: u8| match number {
        2 | 5 | 8 => rdma(facts),
        3 => gpu(facts),
        4 => gpu_and_rdma(facts),
        9 => gpus(facts),
        11 => python(&facts.software.python),
        12 => python(&facts.software.torch),
        13 => train(facts),
        14 => gpus(facts),
        16 => gpt(facts),
        _ => ranks(facts),
    };
    (1..)
        .zip(NAMES)
        .map(|(number, name)| {
            let (verdict, how, mend) = answer(number);
            Milestone { number, name, verdict, how, mend }
        })
        .collect()
}

/// Ranks of this host: they connect over loopback.
fn ranks(facts: &Facts) -> Answer {
    let loopback = facts.interfaces.iter().any(|i| i.is_usable() && i.addresses.iter().any(|a| a.starts_with("127.")));
    match loopback {
        true => (Verdict::Runs, "needs nothing more".to_owned(), None),
        false => (Verdict::Cannot, "no loopback interface that is up".to_owned(), Some(LOOPBACK)),
    }
}

/// Over the RDMA device in user space, which needs no more than a loopback; over this machine's devices with a feature.
fn rdma(facts: &Facts) -> Answer {
    let (verdict, how, mend) = ranks(facts);
    let lacks = facts.software.verbs_lacks.join(", ");
    match (verdict, facts.rdma.is_usable()) {
        (Verdict::Runs, false) => (verdict, CARD.to_owned(), None),
        (Verdict::Runs, true) if lacks.is_empty() => {
            (verdict, format!("{CARD}; on this machine's devices with --features verbs"), None)
        }
        (Verdict::Runs, true) => (verdict, format!("{CARD}; for this machine's devices, without {lacks}"), Some(VERBS)),
        _ => (verdict, how, mend),
    }
}

fn gpu(facts: &Facts) -> Answer {
    let cuda = &facts.cuda;
    match (&cuda.driver, cuda.gpus.as_slice(), &cuda.nvrtc) {
        (Err(_), ..) => (Verdict::Cannot, "no NVIDIA driver".to_owned(), Some(GPU)),
        (_, [], _) => (Verdict::Cannot, "the driver sees no GPU".to_owned(), Some("unset CUDA_VISIBLE_DEVICES")),
        (.., Err(_)) => (Verdict::Cannot, "no NVRTC, which compiles the kernels".to_owned(), Some(NVRTC)),
        (_, gpus, _) => (Verdict::Runs, format!("on GPU 0 of {}", gpus.len()), None),
    }
}

fn gpus(facts: &Facts) -> Answer {
    let (verdict, how, mend) = gpu(facts);
    match (verdict, facts.cuda.gpus.len(), facts.cuda.pairs()) {
        (Verdict::Runs, 1, _) => {
            (Verdict::Fallback, "one GPU: its ranks take turns, or there is one".to_owned(), Some(GPU))
        }
        (Verdict::Runs, n, 0) => {
            (Verdict::Fallback, format!("{n} GPUs without peer access: through the host's memory"), None)
        }
        (Verdict::Runs, n, _) => (Verdict::Runs, format!("on {n} GPUs that reach each other's memory"), None),
        _ => (verdict, how, mend),
    }
}

/// Without a GPU, host memory stands for its own.
fn gpu_and_rdma(facts: &Facts) -> Answer {
    let (gpu, rdma) = (gpu(facts), rdma(facts));
    match (gpu.0, rdma.0) {
        (_, Verdict::Cannot) => rdma,
        (Verdict::Runs, _) => (Verdict::Runs, format!("the GPU's memory {}", rdma.1), rdma.2),
        _ => (Verdict::Fallback, format!("host memory {}: {}", rdma.1, gpu.1), rdma.2.or(gpu.2)),
    }
}

fn python(found: &Result<Interpreter, String>) -> Answer {
    match found {
        Ok(python) => {
            let part = |name: &str, version: &Option<String>| {
                version.as_ref().map(|v| format!(", {name} {v}")).unwrap_or_default()
            };
            let (torch, numpy) = (part("torch", &python.torch), part("numpy", &python.numpy));
            (Verdict::Runs, format!("Python {}{torch}{numpy}", python.version), None)
        }
        Err(why) => (Verdict::Cannot, why.split("; tried").next().unwrap_or(why).to_owned(), Some(PYTHON)),
    }
}

fn train(facts: &Facts) -> Answer {
    let (verdict, how, mend) = ranks(facts);
    match (verdict, &facts.software.mpirun) {
        (Verdict::Runs, Some(_)) => (verdict, "also under mpirun".to_owned(), None),
        (Verdict::Runs, None) => (verdict, "but not under mpirun, which is not here".to_owned(), Some(MPI)),
        _ => (verdict, how, mend),
    }
}

fn gpt(facts: &Facts) -> Answer {
    let (verdict, how, mend) = ranks(facts);
    match (verdict, facts.cuda.runs_kernels()) {
        (Verdict::Runs, true) => {
            (verdict, "on CPUs, and on GPUs with --features cuda and --device cuda".to_owned(), None)
        }
        (Verdict::Runs, false) => (verdict, "on CPUs; no GPU for the larger preset".to_owned(), None),
        _ => (verdict, how, mend),
    }
}

#[cfg(test)]
mod tests;
