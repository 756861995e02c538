//! Times and bandwidths, from the schedules that the library runs: the simulator's times, the verifier's bytes.

use anyhow::{Context as _, Result, ensure};
use program_kit::size;
use tinynccl_plan::algorithm::{self, Shape};
use tinynccl_plan::schedule::verify::verify;
use tinynccl_plan::simulate::machine::Switch;
use tinynccl_plan::simulate::{Costs, Limits, Scenario, simulate};
use tinynccl_plan::wire::{Algorithm, Collective};

/// Depth of the links when a schedule is verified, as the library's own tests have it.
const DEPTH: usize = 4;

/// Microseconds by ring and by tree, on a switch that does nothing but carry.
pub(super) fn cost(ranks: usize, latency: f64, bandwidth: f64, sizes: &[usize]) -> Result<Vec<String>> {
    ensure!(latency > 0.0 && bandwidth > 0.0, "expected alpha and bandwidth above 0");
    let machine = Switch { ranks, latency, bandwidth, costs: Costs::default() };
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
    let mut lines = Vec::new();
    for &bytes in sizes {
        for algorithm in [Algorithm::Ring, Algorithm::Tree] {
            // A part is one message, however long.
            let call = Scenario { algorithm, shape, count: bytes, elem_size: 1, max_message: usize::MAX >> 1 };
            let time = simulate(&call, &machine, &Limits::default())?.time;
            lines.push(format!("{algorithm} {} {:.2}", size::show(bytes), time * 1e6));
        }
    }
    Ok(lines)
}

/// GB/s on the busiest rank's link: algbw times the bytes that it sends or receives, over the size.
pub(super) fn busbw(bytes: u64, seconds: f64, calls: &[(Collective, usize)]) -> Result<Vec<String>> {
    ensure!(seconds > 0.0, "expected seconds above 0");
    let line = |&(collective, ranks): &(Collective, usize)| {
        let busbw = bytes as f64 / seconds / 1e9 * factor(collective, ranks)?;
        Ok(format!("{} {ranks} {busbw:.3}", collective.name().replace('_', "-")))
    };
    calls.iter().map(line).collect()
}

/// Bytes that the busiest rank sends, over the size: the larger of a rank's input and output.
fn factor(collective: Collective, ranks: usize) -> Result<f64> {
    let shape = Shape { collective, ranks, root: 0, channels: 1 };
    let schedule = |a: Algorithm| (0..ranks).map(|r| algorithm::program(a, &shape, r)).collect::<Option<Vec<_>>>();
    let mut least: Option<f64> = None;
    for algorithm in [Algorithm::Ring, Algorithm::Direct] {
        if !algorithm::supports(algorithm, &shape) {
            continue;
        }
        let programs = schedule(algorithm).with_context(|| format!("{algorithm} has no schedule for {collective}"))?;
        let report = verify(&programs, &shape, DEPTH, 1, false)?;
        // In units of a part.
        let parts = programs.first().map_or(1, |p| p.parts) as f64;
        let busiest = report.sent.iter().map(|sent| sent.iter().sum::<u64>()).max().unwrap_or(0) as f64;
        let segments = (0..ranks).map(|r| shape.input_segments(r).max(shape.output_segments(r))).max().unwrap_or(1);
        let carried = busiest / (parts * segments as f64);
        least = Some(least.map_or(carried, |least| least.min(carried)));
    }
    least.with_context(|| format!("no schedule for {collective} on {ranks} ranks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_textbooks_formulas() {
        let close = |line: &str, expected: f64| {
            let got: f64 = line.split(' ').next_back().unwrap().parse().unwrap();
            assert!((got - expected).abs() < 0.01 * expected, "{line}: {expected}");
        };
        let (alpha, beta, n) = (5.0, 1e6 / 1e10, 8.0);
        for (bytes, s) in [(8 << 10, 8192.0), (8 << 20, 8388608.0)] {
            let lines = cost(8, 5e-6, 1e10, &[bytes]).unwrap();
            close(&lines[0], 2.0 * (n - 1.0) * (alpha + s / n * beta));
            // Three levels up and down; the root has one child, the inner ranks two.
            close(&lines[1], 2.0 * (3.0 * alpha + 5.0 * s * beta));
        }
    }

    #[test]
    fn the_factors_of_nccl_tests() {
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter, Scatter};
        // A gather's root is busy as a receiver.
        let all = [AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Reduce, Scatter];
        for (c, n) in all.into_iter().flat_map(|c| [2, 3, 8].map(|n| (c, n))) {
            let counted = factor(c, n).unwrap();
            assert!((counted - c.bus_factor(n)).abs() < 1e-12, "{c} {n}: {counted}");
        }
        assert!(factor(Collective::SendRecv, 2).is_err());
    }
}
