//! A look as JSON, with the fields of NCCL's.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tinynccl::status::report::Device;
use tinynccl::status::view::{Comm, Rank, State};

use super::look::{Look, driver_version, nccl_version, now, reports};
use crate::abi::Status;

/// Collectives that NCCL counts, under its names, and those of which it makes messages. Each rank makes the same ones.
const COUNTED: [(&str, &str); 8] = [
    ("Broadcast", "broadcast"),
    ("Reduce", "reduce"),
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("AllReduce", "all_reduce"),
    ("AlltoAll", "all_to_all"),
    ("Gather", "gather"),
    ("Scatter", "scatter"),
];

/// The document of `STATUS`.
pub(super) fn document(look: &Look) -> String {
    let comms: Vec<Value> = look.view.comms.iter().map(|comm| communicator(look, comm)).collect();
    let late = look.view.silent.len();
    let document = json!({
        "nccl_version": nccl_version(),
        // There is none here: the library uses the driver.
        "cuda_runtime_version": 0,
        "cuda_driver_version": driver_version(),
        "timestamp": now(),
        "communicators_count": comms.len(),
        "communicators": comms,
        "ras": { "collection_time_sec": look.took.as_secs_f64(), "timeouts_count": late },
        // Beyond NCCL's.
        "tinynccl": { "findings": look.findings, "starts": look.view.starts },
    });
    serde_json::to_string_pretty(&document).unwrap_or_default() + "\n"
}

fn communicator(look: &Look, comm: &Comm) -> Value {
    let (here, missing): (Vec<&Rank>, Vec<&Rank>) = comm.ranks.iter().partition(|rank| reports(rank));
    let job = u64::from_str_radix(&comm.job, 16).unwrap_or(0);
    json!({
        // A reader may know a communicator by this alone.
        "hash": format!("{:#x}", job ^ u64::from(comm.comm).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        "secondary_hash": format!("{job:#x}:{:#x}", comm.comm),
        "name": comm.name,
        "size": comm.ranks.len(),
        "ranks_count": here.len(),
        "missing_ranks_count": missing.len(),
        "ranks": here.iter().map(|rank| present(look, rank)).collect::<Vec<_>>(),
        "missing_ranks": missing.iter().map(|rank| absent(look, rank)).collect::<Vec<_>>(),
    })
}

/// A rank with its process and GPU, and what else is known of it.
fn rank_with(look: &Look, rank: &Rank, mut more: Value) -> Value {
    let gpu = rank.device.as_ref().map_or(0, |device: &Device| device.device);
    more["rank"] = json!(rank.rank);
    more["host"] = json!(look.host(rank));
    more["pid"] = json!(rank.place.pid);
    more["cuda_dev"] = json!(gpu);
    more["nvml_dev"] = json!(gpu);
    more["state"] = json!(rank.state);
    more
}

fn present(look: &Look, rank: &Rank) -> Value {
    let device = rank.device.as_ref();
    let failed = rank.state == State::Failed;
    let more = json!({
        "status": {
            "init_state": Status::Success as i32,
            "async_error": if failed { Status::RemoteError as i32 } else { Status::Success as i32 },
            "finalize_called": false,
            "destroy_flag": rank.state == State::Closed,
            "abort_flag": false,
        },
        // Calls that the device has begun, as readers compare this field over ranks. Those that are over may be as many
        // on a rank that is absent from the next one, and so may those that were enqueued.
        "collective_counts": counts(device.map(|device| device.started.as_ref().unwrap_or(&device.made))),
        "completed_counts": counts(device.map(|device| device.over.as_ref().unwrap_or(&device.made))),
        "enqueued_counts": counts(device.map(|device| &device.made)),
        "call": rank.standing.as_ref().and_then(|standing| standing.call.clone()),
        "error": rank.detail,
    });
    rank_with(look, rank, more)
}

fn counts(device: Option<&BTreeMap<String, u64>>) -> Value {
    let count = |name: &str| device.and_then(|counts| counts.get(name)).copied().unwrap_or(0);
    COUNTED
        .iter()
        .map(|(theirs, ours)| ((*theirs).to_owned(), Value::from(count(ours))))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

fn absent(look: &Look, rank: &Rank) -> Value {
    let more = json!({
        "status": {
            "unresponsive": matches!(rank.state, State::Stopped | State::Silent | State::Lost),
            "considered_dead": rank.state == State::Lost,
        },
        "detail": rank.detail,
    });
    rank_with(look, rank, more)
}
