//! Settings that must be the same on all ranks, compared before the first call.

use crate::config::Config;
use crate::error::{Error, Result};

/// The settings on which the ranks' messages and choices depend.
///
/// The others may differ: deadlines, listening addresses, spinning times. For tuning, only rank 0's settings count.
const MUST_AGREE: [&str; 24] = [
    "TINYNCCL_CUDA_PATH_CHECK",
    "TINYNCCL_TRANSPORT",
    "TINYNCCL_ALGO",
    "TINYNCCL_CHANNELS",
    "TINYNCCL_SHM_CHUNK",
    "TINYNCCL_SHM_SINGLE_COPY",
    "TINYNCCL_TCP_CHUNK",
    "TINYNCCL_VERBS_CHUNK",
    "TINYNCCL_CUDA_BLOCKS",
    "TINYNCCL_CUDA_SLOT",
    "TINYNCCL_CUDA_MEMORY",
    "TINYNCCL_CUDA_LL128",
    "TINYNCCL_CUDA_HANDLES",
    "TINYNCCL_CUDA_PATH",
    "TINYNCCL_CUDA_PROTO",
    "TINYNCCL_CUDA_CHUNK",
    "TINYNCCL_VERBS_QPS",
    "TINYNCCL_FIFO_DEPTH",
    "TINYNCCL_CHECKSUM",
    "TINYNCCL_ONE_SHOT",
    "TINYNCCL_STAGE",
    "TINYNCCL_TCP_STREAMS",
    "TINYNCCL_TCP_RAILS",
    "TINYNCCL_FIXED_ORDER",
];

/// This rank's values, in a fixed order.
pub(super) fn values(config: &Config) -> Vec<String> {
    let all = config.values();
    MUST_AGREE.iter().filter_map(|&name| all.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone())).collect()
}

/// Compares the values of all ranks, in rank order. Every rank gets the same result.
///
/// # Errors
/// [`Error::Config`] naming the first setting that differs, the first rank whose value differs from rank 0's, and both
/// values.
pub(super) fn check(values: &[&[String]], rank: usize) -> Result<()> {
    let value = |rank: usize, setting: usize| values.get(rank).and_then(|v| v.get(setting)).map_or("", String::as_str);
    for (setting, name) in MUST_AGREE.iter().enumerate() {
        let first = value(0, setting);
        if let Some(other) = (1..values.len()).find(|&r| value(r, setting) != first) {
            return Err(Error::Config {
                name: (*name).to_owned(),
                value: value(rank, setting).to_owned(),
                detail: format!(
                    "rank 0 has {first}, rank {other} has {}: expected the same on all ranks; set it for all of them",
                    value(other, setting)
                ),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings in which ranks may differ without harm.
    const MAY_DIFFER: [&str; 32] = [
        "TINYNCCL_PORT_RANGE",
        "TINYNCCL_SECRET",
        "TINYNCCL_SECRET_FILE",
        "TINYNCCL_CUDA_CHECK",
        "TINYNCCL_CUDA_FAILURE",
        "TINYNCCL_TIMEOUT",
        "TINYNCCL_CONNECT_TIMEOUT",
        "TINYNCCL_HEARTBEAT",
        "TINYNCCL_IFNAME",
        "TINYNCCL_SOCKET_BUFFER",
        "TINYNCCL_SPIN",
        "TINYNCCL_NCCL_LIB",
        "TINYNCCL_VERBS_DEVICE",
        "TINYNCCL_VERBS_PORT",
        "TINYNCCL_VERBS_GID_INDEX",
        "TINYNCCL_VERBS_TIMEOUT",
        "TINYNCCL_VERBS_RETRIES",
        "TINYNCCL_CUDA_THREADS",
        "TINYNCCL_TUNE",
        "TINYNCCL_TUNE_CACHE",
        "TINYNCCL_TRACE",
        "TINYNCCL_TCP_CONGESTION",
        "TINYNCCL_TRACE_EVENTS",
        // Of connections of `net`, which compare the window themselves.
        "TINYNCCL_NET_STREAMS",
        "TINYNCCL_NET_THREADS",
        "TINYNCCL_NET_CHUNK",
        "TINYNCCL_NET_INLINE",
        "TINYNCCL_NET_WINDOW",
        "TINYNCCL_NET_SPEED",
        "TINYNCCL_NET_RAIL_TIMEOUT",
        "TINYNCCL_NET_RDMA",
        "TINYNCCL_NET_RELAY_PORT",
    ];

    #[test]
    fn every_setting_must_agree_or_may_differ() {
        for setting in Config::describe() {
            let lists = [&MUST_AGREE[..], &MAY_DIFFER[..]];
            let times = lists.iter().filter(|list| list.contains(&setting.env)).count();
            assert_eq!(times, 1, "{}: decide whether ranks may differ in it", setting.env);
        }
        assert_eq!(values(&Config::default()).len(), MUST_AGREE.len());
    }

    #[test]
    fn the_first_difference_is_named_with_both_ranks_and_values() {
        let ours = values(&Config::default());
        let other = Config { shm_chunk: 64 << 10, checksum: true, ..Config::default() };
        let theirs = values(&other);
        assert!(check(&[&ours, &ours, &ours], 1).is_ok());
        for rank in 0..3 {
            let text = check(&[&ours, &ours, &theirs], rank).unwrap_err().to_string();
            for word in ["TINYNCCL_SHM_CHUNK", "rank 0 has 128K", "rank 2 has 64K"] {
                assert!(text.contains(word), "{text}");
            }
        }
    }
}
