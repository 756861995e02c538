//! Algorithm bandwidth and bus bandwidth, as nccl-tests defines them (its doc/PERFORMANCE.md).
//!
//! *Algorithm bandwidth* is size / time. It is what the caller sees, and falls with the number of ranks even on perfect
//! hardware. *Bus bandwidth* corrects it by the bytes that must cross each rank's link at least, so that it can be
//! compared with the hardware's bandwidth whatever the number of ranks.

use tinynccl::wire::Collective;

/// Bus bandwidth / algorithm bandwidth with `n` ranks.
///
/// - all_reduce: every rank must send and receive `2 (n-1)/n` of the size (reduce-scatter, then all-gather).
/// - reduce_scatter, all_gather, all_to_all, gather, scatter: `(n-1)/n` of the total size, as a rank keeps its own
///   part.
/// - broadcast, reduce, scan, send/recv: the size once.
// EXERCISE 1 (How it works): the factor from algorithm bandwidth to bus bandwidth: how many times the size each rank's
// link carries at least, with n ranks.
pub(crate) fn factor(collective: Collective, n: usize) -> f64 {
    let n = n.max(1) as f64;
    match collective {
        Collective::AllReduce => 2.0 * (n - 1.0) / n,
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllToAll
        | Collective::Gather
        | Collective::Scatter => (n - 1.0) / n,
        Collective::Broadcast | Collective::Reduce | Collective::Scan | Collective::SendRecv => 1.0,
        Collective::Barrier => 0.0,
    }
}

/// Bytes (the size column) per second, in GB/s (10^9).
pub(crate) fn algbw(bytes: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_of_nccl_tests() {
        let close = |a: f64, b: f64| approx::assert_abs_diff_eq!(a, b, epsilon = 1e-12);
        close(factor(Collective::AllReduce, 2), 1.0);
        close(factor(Collective::AllReduce, 8), 1.75);
        for c in [
            Collective::AllGather,
            Collective::ReduceScatter,
            Collective::AllToAll,
            Collective::Gather,
            Collective::Scatter,
        ] {
            close(factor(c, 8), 0.875);
            close(factor(c, 1), 0.0);
        }
        for c in [Collective::Broadcast, Collective::Reduce, Collective::SendRecv] {
            close(factor(c, 8), 1.0);
        }
        for (c, n) in Collective::ALL.into_iter().flat_map(|c| (0..10).map(move |n| (c, n))) {
            close(factor(c, n), c.bus_factor(n));
        }
        close(algbw(128 << 20, 0.001), 134.217728);
        close(algbw(8, 0.0), 0.0);
    }
}
