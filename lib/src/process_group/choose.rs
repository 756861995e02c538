//! Chooses a group's backend from every rank's request and capabilities, with one result for all.

use serde::{Deserialize, Serialize};

use super::BackendType;
use tinynccl_plan::error::{Error, Result};

/// One rank's request and capabilities. The failure texts name the searched libraries and paths.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Facts {
    /// Name of the requested backend.
    pub(super) asked: String,
    /// Number of our GPU, or why there is none; `None` when none is requested.
    pub(super) gpu: Option<Result<usize, String>>,
    /// NCCL's version and path, or why it is missing; `None` when it was not searched.
    pub(super) nccl: Option<Result<String, String>>,
    /// The MPI library, or why it is missing; `None` when it was not searched.
    pub(super) mpi: Option<Result<String, String>>,
}

/// Most GPUs that a device communicator's kernels join.
const MOST_GPUS: usize = 8;

/// The backend and why, the same on all ranks. `facts` of all ranks, in rank order; `one_host` when all are on one.
pub(super) fn choose(facts: &[Facts], one_host: bool) -> Result<(BackendType, String)> {
    let op = "init_process_group";
    let ranks = facts.len();
    let first = facts.first().ok_or_else(|| Error::invalid(op, "no ranks"))?;
    if let Some((rank, other)) = facts.iter().enumerate().find(|(_, f)| f.asked != first.asked) {
        let detail = format!(
            "rank 0 asks for backend {}, rank {rank} for {}: expected the same on all ranks",
            first.asked, other.asked
        );
        return Err(Error::invalid(op, detail));
    }
    if let Some(rank) = facts.iter().position(|f| f.gpu.is_some() != first.gpu.is_some()) {
        let (with, without) = if first.gpu.is_some() { (0, rank) } else { (rank, 0) };
        let detail = format!("rank {with} asks for a GPU, rank {without} for none: expected the same on all ranks");
        return Err(Error::invalid(op, detail));
    }
    let asked: BackendType = first.asked.parse().map_err(|e: String| Error::invalid(op, e))?;
    let missing = |what: &str, of: &dyn Fn(&Facts) -> Option<String>| {
        facts.iter().enumerate().find_map(|(rank, f)| {
            of(f).map(|why| Error::Unsupported { what: what.to_owned(), detail: format!("rank {rank}: {why}") })
        })
    };
    let gpus = first.gpu.is_some();
    let no_gpu = missing("a GPU for the group", &|f| f.gpu.as_ref()?.as_ref().err().cloned());
    let no_nccl = missing("backend nccl", &|f| f.nccl.as_ref()?.as_ref().err().cloned());
    let nccl = || first.nccl.as_ref().and_then(|n| n.as_ref().ok()).cloned().unwrap_or_default();
    match asked {
        BackendType::Mpi if gpus => Err(Error::Unsupported {
            what: "a GPU for backend mpi".to_owned(),
            detail: "it carries host memory: leave the device out, or ask for backend tinynccl or nccl".to_owned(),
        }),
        BackendType::Mpi => match missing("backend mpi", &|f| f.mpi.as_ref()?.as_ref().err().cloned()) {
            Some(error) => Err(error),
            None => {
                let library = first.mpi.as_ref().and_then(|m| m.as_ref().ok()).cloned().unwrap_or_default();
                Ok((asked, format!("requested by name: {library}")))
            }
        },
        // In this order: without a GPU, a missing NCCL matters less.
        BackendType::Nccl => match no_gpu.or(no_nccl) {
            Some(error) => Err(error),
            None => Ok((asked, format!("requested by name: {}", nccl()))),
        },
        BackendType::Tinynccl => match no_gpu {
            Some(error) => Err(error),
            None => Ok((asked, "requested by name".to_owned())),
        },
        BackendType::Auto if !gpus => Ok((
            BackendType::Tinynccl,
            "host memory, which nccl does not support; mpi is used only on request".to_owned(),
        )),
        BackendType::Auto => {
            if let Some(error) = no_gpu {
                return Err(error);
            }
            if one_host && ranks <= MOST_GPUS {
                let why =
                    format!("the GPUs of {ranks} ranks on one host; it supports host memory too, which nccl does not");
                return Ok((BackendType::Tinynccl, why));
            }
            let where_from = match one_host {
                true => format!("{ranks} ranks with GPUs: tinynccl's kernels join up to {MOST_GPUS}"),
                false => "GPUs on several hosts: tinynccl's kernels join those of one".to_owned(),
            };
            Ok(match no_nccl {
                None => (BackendType::Nccl, format!("{where_from}; {}", nccl())),
                Some(error) => (
                    BackendType::Tinynccl,
                    format!("{where_from}, so calls go through the hosts' memory; nccl would not, but {error}"),
                ),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(asked: &str) -> Facts {
        Facts { asked: asked.to_owned(), gpu: None, nccl: None, mpi: None }
    }

    fn with_gpus(asked: &str, ranks: usize, nccl: Result<&str, &str>) -> Vec<Facts> {
        let nccl = Some(nccl.map(str::to_owned).map_err(str::to_owned));
        (0..ranks).map(|r| Facts { gpu: Some(Ok(r)), nccl: nccl.clone(), ..facts(asked) }).collect()
    }

    fn failure(facts: &[Facts], one_host: bool) -> String {
        choose(facts, one_host).expect_err("not available").to_string()
    }

    #[test]
    fn auto_takes_what_carries_the_buffers() {
        let of = |facts: &[Facts], one_host| choose(facts, one_host).expect("a backend");
        assert_eq!(of(&[facts("auto"), facts("auto")], false).0, BackendType::Tinynccl);
        assert_eq!(of(&with_gpus("auto", 8, Err("gone")), true).0, BackendType::Tinynccl);
        let (backend, why) = of(&with_gpus("auto", 2, Ok("NCCL 2.28.9")), false);
        assert!(backend == BackendType::Nccl && why.contains("several hosts") && why.contains("2.28.9"), "{why}");
        assert_eq!(of(&with_gpus("auto", 9, Ok("NCCL 2.28.9")), true).0, BackendType::Nccl);
        let (backend, why) = of(&with_gpus("auto", 9, Err("looked everywhere")), true);
        assert_eq!(backend, BackendType::Tinynccl);
        for words in ["up to 8", "hosts' memory", "looked everywhere"] {
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn what_is_asked_for_by_name_is_taken_or_fails() {
        let none = Facts { gpu: Some(Err("no driver".to_owned())), ..facts("nccl") };
        let text = failure(&[with_gpus("nccl", 1, Ok("x")).remove(0), none], true);
        assert!(text.contains("rank 1: no driver"), "{text}");
        let mut two = with_gpus("nccl", 2, Ok("x"));
        two[1].nccl = Some(Err("libnccl.so.2: not found".to_owned()));
        assert_eq!(failure(&two, true), "backend nccl is not available here: rank 1: libnccl.so.2: not found");
        let text = failure(&[Facts { mpi: Some(Err("no feature".to_owned())), ..facts("mpi") }], true);
        assert_eq!(text, "backend mpi is not available here: rank 0: no feature");
        assert!(failure(&with_gpus("mpi", 2, Ok("x")), true).contains("host memory"));
        // Not needed, so its absence is no error.
        assert_eq!(choose(&with_gpus("tinynccl", 2, Err("x")), true).expect("tinynccl").0, BackendType::Tinynccl);
    }

    #[test]
    fn ranks_that_ask_for_different_things_are_named() {
        let text = failure(&[facts("auto"), facts("auto"), facts("mpi")], true);
        assert!(text.contains("rank 0 asks for backend auto, rank 2 for mpi"), "{text}");
        let text = failure(&[facts("auto"), with_gpus("auto", 1, Ok("x")).remove(0)], true);
        assert!(text.contains("rank 1 asks for a GPU, rank 0 for none"), "{text}");
    }
}
