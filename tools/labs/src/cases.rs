//! The runs of the pages, and the words that each must print.

/// One or several commands whose output a page shows.
pub(crate) struct Case {
    /// Name of the output's file, without `.txt`.
    pub(crate) name: &'static str,
    /// Arguments of `labs`, with variables before them; one folder for all of them.
    pub(crate) steps: &'static [&'static str],
    /// Exit status of the last one.
    pub(crate) code: i32,
    /// Words that must be there.
    pub(crate) says: &'static [&'static str],
    /// Optional lines: the scheduler decides which rank notices first.
    pub(crate) may: &'static [&'static str],
    /// Nothing may differ from the book.
    pub(crate) exact: bool,
}

const fn failure(name: &'static str, steps: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case { name, steps, code: 3, says, may: &[LAUNCHER, TIMED_OUT, ABORTED, LOST, WARNING], exact: false }
}

const fn mended(name: &'static str, steps: &'static [&'static str], says: &'static [&'static str]) -> Case {
    Case { name, steps, code: 0, says, may: &[], exact: false }
}

/// Labs that need a device which pins pages, and are built with the feature `verbs`.
pub(crate) const PINNING: [&str; 1] = ["stale-registration"];

const DONE: [&str; 2] = ["rank 0: done", "rank 1: done"];
const LAUNCHER: &str = r"^\[launcher\] rank \d+ (exited|was killed|did not end)";
const ABORTED: &str = r"^\[rank \d+\] error: .*: the communicator was aborted: rank \d+: ";
const LOST: &str = r"^\[rank \d+\] error: .*rank \d+ lost rank \d+ \(";
const DISAGREE: &str = r"^\[rank \d\] error: .*rank \d and rank \d disagree: ";
const CONNECT: &str = r"^error: connect: rank \d made no progress for";
const TIMED_OUT: &str = r"^\[rank \d+\] error: .* made no progress for .*; not arrived: rank";
const WARNING: &str = r"^\[WARN +tinynccl";

/// Differences between runs that lose ranks: checksums, the call that fails first, and whether a spare is there at once.
const SURVIVED: &[&str] = &[
    r"^(\[rank \d\] )?parameters [0-9a-f]{8} on all \d ranks$",
    r"^(\[rank \d\] )?[a-z_ ]+: rank \d lost rank \d ",
    r"^(\[rank \d\] )?[a-z_ ]+: .*the communicator was (aborted|revoked): ",
    r"^(\[rank \d\] )?a spare takes a place that is free$",
    r"^(\[rank \d\] )?step +\d+",
    r"^\[rank \d\] \[WARN +tinynccl",
    WARNING,
];

/// In the order of the pages.
pub(crate) const CASES: &[Case] = &[
    Case {
        // A slow rank is notified by the store, which compares calls, too.
        may: &[DISAGREE, LAUNCHER, ABORTED, WARNING],
        ..failure(
            "mismatched-counts",
            &["mismatched-counts"],
            &["disagree: rank", "count 4", "count 3", "every rank must make the same calls"],
        )
    },
    mended("mismatched-counts-fixed", &["mismatched-counts --fixed"], &["rank 2: all 10 predictions are here"]),
    failure(
        "order",
        &["order"],
        &["is in all_reduce #1 of communicator", "must use them in the same order", "made no progress for 2.0s"],
    ),
    mended("order-fixed", &["order --fixed"], &["rank 1: both sums are 2 and 2"]),
    failure("dead-rank", &["dead-rank"], &["rank 2 was killed by signal 9 (SIGKILL)", "lost rank 2"]),
    mended("dead-rank-fixed", &["dead-rank --fixed"], &["rank 2: 100 steps done"]),
    failure(
        "stopped-rank",
        &["stopped-rank"],
        &["not arrived: rank 1; no heartbeat for", "is the process stopped, or its host down?"],
    ),
    mended("stopped-rank-fixed", &["stopped-rank --fixed"], &["rank 1: 100 steps done"]),
    failure(
        "missing-group",
        &["missing-group"],
        &["which waits for rank", "messages that cross belong into one group, or into send_recv"],
    ),
    mended("missing-group-small", &["missing-group --bytes=4096"], &["rank 0: done", "rank 1: done"]),
    mended("missing-group-fixed", &["missing-group --fixed"], &["rank 0: done", "rank 1: done"]),
    failure("shm-full", &["shm-full"], &["rank 0 was killed by signal 7 (SIGBUS)", "lost rank 0"]),
    failure("shm-full-reserve", &["shm-full --reserve"], &["reserving 8388608 bytes", "No space left on device"]),
    mended("shm-full-fixed", &["shm-full --fixed"], &["rank 1: 8 MiB are here"]),
    Case {
        may: &[r"^error: communicator: rank \d: the communicator was aborted: rank \d: connect: ", CONNECT],
        ..failure(
            "wrong-interface",
            &["wrong-interface"],
            &["not arrived: rank", "169.254.3.2", "TINYNCCL_IFNAME chooses the interfaces"],
        )
    },
    mended("wrong-interface-fixed", &["wrong-interface --fixed"], &["rank 1: all_reduce works"]),
    failure("slow-link", &["slow-link"], &["rank 3:", "ms per all_reduce", "which link is it?"]),
    mended(
        "slow-link-waits",
        &["TINYNCCL_TRACE=slow.json slow-link", "waits slow.json"],
        &["2 -> 3", "wait for rank 2"],
    ),
    mended("slow-link-fixed", &["slow-link --fixed"], &["rank 3:"]),
    Case {
        exact: true,
        ..failure("sum-order", &["sum-order"], &["recursive-doubling", "the same gradients have different sums"])
    },
    mended("sum-order-fixed", &["sum-order --fixed"], &["keeps no fixed order in all_reduce", "0 of 10000"]),
    mended(
        "sum-order-exact",
        &["TINYNCCL_SUM=exact sum-order"],
        &["keeps no fixed order in all_reduce", "0 of 10000", "0.17285156"],
    ),
    failure("stale-registration", &["stale-registration"], &["the program sees B", "rank 1 got A"]),
    mended("stale-registration-fixed", &["stale-registration --fixed"], &["rank 1 got B"]),
    Case {
        // Which entries the table has is this machine's affair.
        may: &[r"^\[rank \d\] error: TINYNCCL_VERBS_GID_INDEX=.*there is no such entry", LAUNCHER],
        ..failure("wrong-gid", &["wrong-gid"], &["TINYNCCL_VERBS_GID_INDEX"])
    },
    mended("wrong-gid-fixed", &["wrong-gid --fixed"], &["rank 1: all_reduce works"]),
    failure("rnr-storm", &["rnr-storm"], &["refused because no RECV was posted"]),
    mended("rnr-storm-fixed", &["rnr-storm --fixed"], &["0 refused because no RECV was posted"]),
    failure("wrong-icrc", &["wrong-icrc"], &["RetriesExceeded", "B: neither a completion nor an error"]),
    mended("wrong-icrc-packets", &["TINYROCE_TRACE=card.pcap wrong-icrc", "packets card.pcap"], &["ICRC WRONG"]),
    mended("wrong-icrc-fixed", &["wrong-icrc --fixed"], &["B: completion: Success, 500 B"]),
    failure("lossy-link", &["lossy-link"], &["every WRITE succeeded"]),
    failure("lossy-link-far", &["TINYROCE_DELAY=500 lossy-link"], &["every WRITE succeeded"]),
    mended("lossy-link-fixed", &["lossy-link --fixed"], &["32 MiB, WRITEs of 64 KiB"]),
    Case {
        // The kernels compare the calls, or before the first one the hosts.
        may: &[DISAGREE, LAUNCHER],
        ..failure("gpu-counts", &["gpu-counts"], &["disagree: rank", "every rank must make the same calls"])
    },
    failure("gpu-counts-nccl", &["gpu-counts --backend=nccl"], &["sums are not 2, and no call has failed"]),
    mended("gpu-counts-fixed", &["gpu-counts --fixed"], &["rank 1: every sum is 2"]),
    failure("gpu-stream", &["gpu-stream"], &["expected 3, and no call has failed"]),
    failure("gpu-stream-nccl", &["gpu-stream --backend=nccl"], &["expected 3, and no call has failed"]),
    mended("gpu-stream-fixed", &["gpu-stream --fixed"], &["rank 1: every sum is 3"]),
    failure("gpu-full", &["gpu-full"], &["made no progress"]),
    failure("gpu-full-nccl", &["gpu-full --backend=nccl"], &["made no progress"]),
    mended("gpu-full-fixed", &["gpu-full --fixed"], &["rank 1: the kernel saw 42"]),
    failure("flapping-rail", &["flapping-rail"], &["every WRITE succeeded", "within 60.0 ms"]),
    failure("flapping-rail-rails", &["flapping-rail --rails"], &["rail 1", "0 lost", "every WRITE succeeded"]),
    mended("flapping-rail-fixed", &["flapping-rail --fixed"], &["over 1 rail"]),
    failure("slow-gpu", &["slow-gpu"], &["a step takes", "no call has failed"]),
    failure("slow-gpu-apart", &["slow-gpu --apart"], &["rank 0: backward", "rank 1: backward"]),
    failure("slow-gpu-nccl", &["slow-gpu --apart --backend=nccl"], &["rank 0: backward", "rank 1: backward"]),
    mended("slow-gpu-fixed", &["slow-gpu --apart --fixed"], &["rank 0: backward", "rank 1: backward"]),
    failure(
        "missing-group-start",
        &["TINYNCCL_CUDA_PATH=hosted missing-group-start"],
        &["which waits for rank", "messages that cross belong into one group, or into send_recv"],
    ),
    mended("missing-group-start-nccl", &["missing-group-start --backend=nccl"], &DONE),
    mended("missing-group-start-small", &["TINYNCCL_CUDA_PATH=hosted missing-group-start --bytes=4096"], &DONE),
    mended("missing-group-start-fixed", &["TINYNCCL_CUDA_PATH=hosted missing-group-start --fixed"], &DONE),
    failure(
        "gpu-dead-rank",
        &["TINYNCCL_CUDA_PATH=hosted gpu-dead-rank"],
        &["rank 1 was killed by signal 9 (SIGKILL)", "lost rank 1"],
    ),
    failure(
        "gpu-dead-rank-nccl",
        &["gpu-dead-rank --backend=nccl"],
        &["has not ended for 10 s, and no call has failed"],
    ),
    mended("gpu-dead-rank-fixed", &["TINYNCCL_CUDA_PATH=hosted gpu-dead-rank --fixed"], &["rank 1: 100 steps done"]),
    Case {
        // Which interfaces there are is this machine's affair.
        may: &[r"^\[rank \d\] error: TINYNCCL_IFNAME=.*; interfaces that are up: ", LAUNCHER],
        ..failure("gpu-wrong-interface", &["gpu-wrong-interface"], &["no interface's name begins with \"nowhere0\""])
    },
    failure("gpu-wrong-interface-nccl", &["gpu-wrong-interface --backend=nccl"], &["no socket interface found"]),
    mended(
        "gpu-wrong-interface-fixed",
        &["TINYNCCL_CUDA_PATH=hosted gpu-wrong-interface --fixed"],
        &["rank 1: all_reduce works"],
    ),
    Case {
        may: SURVIVED,
        ..failure(
            "kill-any-rank",
            &["kill-any-rank"],
            &["rank 5 was killed by signal 9 (SIGKILL)", "rank 0 was killed", "rank 2 was killed", " on all 3 ranks"],
        )
    },
    Case {
        may: SURVIVED,
        ..failure(
            "kill-any-rank-spares",
            &["kill-any-rank --kill=0@20,2@30"],
            &["rank 0 was killed", "rank 2 was killed", " 4 ranks go on with parameters ", " on all 4 ranks"],
        )
    },
    Case { may: SURVIVED, ..mended("kill-any-rank-fixed", &["kill-any-rank --fixed"], &[" on all 4 ranks"]) },
];
