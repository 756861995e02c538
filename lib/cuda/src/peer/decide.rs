//! Applies the settings to the choice of a kernel (`TINYNCCL_ALGO`, `TINYNCCL_CUDA_PROTO`, `TINYNCCL_FIXED_ORDER`,
//! `TINYNCCL_SUM`), and gives the reason for a choice.
//!
//! All kernels except those of schedules combine the values of all ranks in rank order (`reduce_words` in
//! `kernels/types.cuh`), so they give the same bits. The order of a schedule is its algorithm's:
//! [`algorithm::keeps_rank_order`], which the verifier proves. The steps of a schedule add two values each, so no sum
//! of more than two ranks is exact there.

use std::fmt;

use super::select;
use crate::window::Layout;
use tinynccl_plan::algorithm::{self, Shape};
use tinynccl_plan::device::{Choice, Framing, Protocol};
use tinynccl_plan::wire::{Algorithm, Collective};
use tinynccl_sys::config::{Config, CudaProto, Sums};

/// Bytes up to which a requested schedule uses lines, if it fits.
const SCHEDULE_IN_LINES: usize = 64 << 10;

/// The request; the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) fixed_order: bool,
    pub(crate) exact: bool,
    pub(crate) algorithm: Option<Algorithm>,
    pub(crate) proto: CudaProto,
}

/// The reason for a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The fastest of those that were measured for its size.
    Size,
    /// `DeviceComm::set_choice`.
    Set,
    /// `TINYNCCL_ALGO` or `TINYNCCL_CUDA_PROTO`.
    Asked,
    /// The requested choice cannot run this call; the choice is by size.
    Refused,
    /// `TINYNCCL_FIXED_ORDER` or `TINYNCCL_SUM`: by size it would have been this choice, which combines otherwise.
    FixedOrder(Protocol),
    /// The path has no choices.
    Path,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Size => "fastest for the size",
            Reason::Set => "set by the program",
            Reason::Asked => "requested by TINYNCCL_ALGO or TINYNCCL_CUDA_PROTO",
            Reason::Refused => {
                "by size: the choice of TINYNCCL_ALGO and TINYNCCL_CUDA_PROTO has no kernel for this call, no room for its bytes, or \
                 does not reduce in rank order"
            }
            Reason::FixedOrder(by_size) => return write!(f, "TINYNCCL_FIXED_ORDER or TINYNCCL_SUM; by size it would be {by_size}"),
            Reason::Path => "this path has no choices",
        })
    }
}

impl Asked {
    pub(crate) fn of(config: &Config) -> Asked {
        let exact = config.sum == Sums::Exact;
        Asked { fixed_order: config.fixed_order, exact, algorithm: config.algorithm, proto: config.cuda_proto }
    }

    /// Returns true if `protocol` gives results in rank order, or from all values at once, or need not do so. The type
    /// and the operator are not known yet: with exact sums no reduction takes a schedule that has another kernel.
    pub(crate) fn orders(&self, protocol: Protocol, collective: Collective, ranks: usize) -> bool {
        match protocol {
            Protocol::Schedule(..) if self.exact && collective.reduces() && collective != Collective::Scan => {
                ranks == 2
            }
            Protocol::Schedule(algorithm, _) if self.fixed_order => {
                algorithm::keeps_rank_order(algorithm, &Shape { collective, ranks, root: 0, channels: 1 })
            }
            _ => true,
        }
    }

    fn is_nothing(&self) -> bool {
        self.algorithm.is_none() && self.proto == CudaProto::Auto
    }

    /// Returns true if `protocol` is the requested choice. One-shot and two-shot mean the same as in shared memory:
    /// every rank's values go to all ranks, or a reduce-scatter and an all-gather.
    fn meets(&self, protocol: Protocol, collective: Collective, ranks: usize) -> bool {
        use Protocol::*;
        let two_steps = collective == Collective::AllReduce && ranks > 2;
        let algorithm = match self.algorithm {
            None => true,
            Some(Algorithm::OneShot) => matches!(protocol, OneShot | OneShot128) || protocol == Simple && !two_steps,
            Some(Algorithm::TwoShot) => matches!(protocol, TwoShot | TwoShot128) || protocol == Simple && two_steps,
            Some(asked) => matches!(protocol, Schedule(algorithm, _) if algorithm == asked),
        };
        let proto = match self.proto {
            CudaProto::Auto => true,
            CudaProto::Ll => matches!(protocol, OneShot | TwoShot | Schedule(_, Framing::Ll)),
            CudaProto::Ll128 => matches!(protocol, OneShot128 | TwoShot128 | Schedule(_, Framing::Ll128)),
            // A schedule only where one is requested: rings suit GPUs behind a switch.
            CudaProto::Simple => match protocol {
                Schedule(_, framing) => framing == Framing::Simple && self.algorithm.is_some(),
                _ => matches!(protocol, Simple | Direct),
            },
            CudaProto::Schedule => matches!(protocol, Schedule(..)),
        };
        algorithm && proto
    }

    /// The protocols that match the request, best first.
    fn candidates(&self, by_size: Protocol, bytes: usize) -> impl Iterator<Item = Protocol> + use<> {
        use Protocol::*;
        let framings =
            if bytes <= SCHEDULE_IN_LINES { [Framing::Ll, Framing::Simple] } else { [Framing::Simple, Framing::Ll] };
        let framings = framings.into_iter().chain([Framing::Ll128]);
        let schedules = self.algorithm.is_some() || self.proto == CudaProto::Schedule;
        let algorithms = if schedules { &Algorithm::ALL[..] } else { &[] };
        let schedules = algorithms
            .iter()
            .flat_map(move |&algorithm| framings.clone().map(move |framing| Schedule(algorithm, framing)));
        // Two steps send less, which pays if one step would send much.
        let lines = if bytes <= 128 << 10 {
            [OneShot, OneShot128, TwoShot, TwoShot128]
        } else {
            [TwoShot, TwoShot128, OneShot, OneShot128]
        };
        [by_size].into_iter().chain(lines).chain([Simple]).chain(schedules)
    }

    /// The choice for a call of `bytes` (as in [`select::choose`]), and the reason. `schedule_fits` says whether a
    /// schedule can run it.
    pub(crate) fn decide(
        &self,
        layout: &Layout,
        collective: Collective,
        bytes: usize,
        registered: bool,
        schedule_fits: impl Fn(Algorithm, Framing, u32) -> bool,
    ) -> (Choice, Reason) {
        let ranks = layout.ranks;
        let by_size = select::choose(layout, collective, bytes, registered);
        let with_blocks = |protocol| Choice { protocol, blocks: select::blocks(layout, protocol, bytes) };
        let orders = |protocol: &Protocol| self.orders(*protocol, collective, ranks);
        let fallback = || match orders(&by_size.protocol) {
            true => (by_size, Reason::Size),
            false => (with_blocks(Protocol::Simple), Reason::FixedOrder(by_size.protocol)),
        };
        if self.is_nothing() {
            return fallback();
        }
        let fits = |choice: &Choice| match choice.protocol {
            Protocol::Schedule(algorithm, framing) => schedule_fits(algorithm, framing, choice.blocks),
            protocol => {
                select::kernel(collective, protocol, ranks).is_some()
                    && select::fits(layout, collective, *choice, bytes)
            }
        };
        let meant =
            self.candidates(by_size.protocol, bytes).filter(|&p| self.meets(p, collective, ranks)).filter(orders);
        match meant.map(with_blocks).find(fits) {
            Some(choice) => (choice, Reason::Asked),
            None => (fallback().0, Reason::Refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedules::Schedules;
    use super::*;
    use tinynccl_plan::schedule::verify;

    const NOTHING: Asked = Asked { fixed_order: false, exact: false, algorithm: None, proto: CudaProto::Auto };

    /// Calls of every size and kind, among every number of ranks.
    fn calls(mut check: impl FnMut(&Layout, &Schedules, Collective, usize, bool)) {
        for ranks in 2..=8 {
            for blocks in [2, 128] {
                let layout = Layout::new(ranks, 1, &Config::default().with(|c| c.cuda_blocks = blocks));
                let schedules = Schedules::new(ranks - 1, layout);
                for collective in Collective::ALL {
                    if matches!(collective, Collective::Barrier | Collective::SendRecv) {
                        continue;
                    }
                    let powers = (0..=32).map(|p| 1usize << p);
                    for bytes in [0].into_iter().chain(powers.flat_map(|p| [p - 1, p, p + 8])) {
                        check(&layout, &schedules, collective, bytes, false);
                        check(&layout, &schedules, collective, bytes, true);
                    }
                }
            }
        }
    }

    fn decide(
        asked: Asked,
        layout: &Layout,
        schedules: &Schedules,
        c: Collective,
        bytes: usize,
        registered: bool,
    ) -> (Choice, Reason) {
        asked.decide(layout, c, bytes, registered, |algorithm, framing, blocks| {
            schedules.fits(c, algorithm, framing, blocks, bytes)
        })
    }

    /// The verifier decides for a schedule; all other reducing kernels use `reduce_words`, in rank order.
    fn is_in_rank_order(protocol: Protocol, collective: Collective, ranks: usize) -> bool {
        let Protocol::Schedule(algorithm, _) = protocol else {
            return select::kernel(collective, protocol, ranks).is_some_and(|kernel| kernel.reduces(collective));
        };
        (0..ranks).all(|root| {
            let shape = Shape { collective, ranks, root, channels: 1 };
            let programs: Option<Vec<_>> = (0..ranks).map(|rank| algorithm::program(algorithm, &shape, rank)).collect();
            programs.is_some_and(|programs| {
                verify::verify(&programs, &shape, 4, 1, false).is_ok_and(|report| ranks == 2 || report.rank_order)
            })
        })
    }

    #[test]
    fn with_a_fixed_order_every_reduction_of_any_size_is_in_rank_order() {
        let mut known = std::collections::HashMap::new();
        let mut rings = 0;
        for proto in [CudaProto::Auto, CudaProto::Ll, CudaProto::Ll128, CudaProto::Simple, CudaProto::Schedule] {
            for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
                let asked = Asked { fixed_order: true, exact: false, algorithm, proto };
                // All sizes without a request; otherwise those that differ.
                calls(|layout, schedules, collective, bytes, registered| {
                    if !collective.reduces() || asked.algorithm.is_some() && !bytes.is_power_of_two() {
                        return;
                    }
                    let (choice, reason) = decide(asked, layout, schedules, collective, bytes, registered);
                    let key = (choice.protocol, collective, layout.ranks);
                    let ordered = *known.entry(key).or_insert_with(|| is_in_rank_order(key.0, key.1, key.2));
                    assert!(
                        ordered,
                        "{asked:?}: {collective} of {bytes} bytes, {} ranks: {choice:?}, {reason}",
                        layout.ranks
                    );
                    rings += usize::from(matches!(reason, Reason::FixedOrder(Protocol::Schedule(Algorithm::Ring, _))));
                });
            }
        }
        // By size there is something to refuse.
        assert!(rings > 0);
    }

    #[test]
    fn exact_sums_of_more_than_two_ranks_take_no_schedule() {
        for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
            for proto in [CudaProto::Auto, CudaProto::Simple, CudaProto::Schedule] {
                let asked = Asked { fixed_order: false, exact: true, algorithm, proto };
                calls(|layout, schedules, collective, bytes, registered| {
                    if !collective.reduces() || collective == Collective::Scan || !bytes.is_power_of_two() {
                        return;
                    }
                    let (choice, _) = decide(asked, layout, schedules, collective, bytes, registered);
                    let scheduled = matches!(choice.protocol, Protocol::Schedule(..));
                    assert!(!scheduled || layout.ranks == 2, "{asked:?}: {collective} of {bytes} bytes: {choice:?}");
                    assert!(select::kernel(collective, choice.protocol, layout.ranks).is_some());
                });
            }
        }
    }

    #[test]
    fn what_is_asked_for_is_taken_where_it_can_be() {
        use Protocol::*;
        let layout = Layout::new(4, 1, &Config::default());
        let schedules = Schedules::new(1, layout);
        let way = |algorithm, proto, c, bytes| {
            let (choice, reason) = decide(Asked { algorithm, proto, ..NOTHING }, &layout, &schedules, c, bytes, false);
            (choice.protocol, reason)
        };
        let all_reduce = |algorithm, proto, bytes| way(algorithm, proto, Collective::AllReduce, bytes);
        for bytes in [0, 8, 64 << 10, 1 << 20, 1 << 30] {
            for algorithm in
                [Algorithm::Ring, Algorithm::Tree, Algorithm::DoubleTree, Algorithm::Direct, Algorithm::AllPairs]
            {
                let (protocol, reason) = all_reduce(Some(algorithm), CudaProto::Auto, bytes);
                assert!(
                    matches!(protocol, Schedule(taken, _) if taken == algorithm),
                    "{algorithm} {bytes}: {protocol}"
                );
                assert_eq!(reason, Reason::Asked);
            }
            assert_eq!(all_reduce(None, CudaProto::Simple, bytes), (Simple, Reason::Asked));
            assert!(matches!(all_reduce(None, CudaProto::Schedule, bytes), (Schedule(..), Reason::Asked)));
            // Calls on the hosted path have no kernel.
            let (protocol, reason) = all_reduce(Some(Algorithm::Staged), CudaProto::Auto, bytes);
            assert_eq!((protocol, reason), (all_reduce(None, CudaProto::Auto, bytes).0, Reason::Refused));
        }
        assert_eq!(all_reduce(Some(Algorithm::OneShot), CudaProto::Auto, 8 << 10).1, Reason::Asked);
        assert_eq!(all_reduce(Some(Algorithm::OneShot), CudaProto::Ll, 8 << 10), (OneShot, Reason::Asked));
        assert_eq!(all_reduce(Some(Algorithm::TwoShot), CudaProto::Ll128, 1 << 20), (TwoShot128, Reason::Asked));
        // No lines are that long.
        let by_size = all_reduce(None, CudaProto::Auto, 1 << 30).0;
        assert_eq!(all_reduce(None, CudaProto::Ll, 1 << 30), (by_size, Reason::Refused));
        let (protocol, reason) = way(Some(Algorithm::Tree), CudaProto::Auto, Collective::AllToAll, 1 << 20);
        assert!(reason == Reason::Refused && !matches!(protocol, Schedule(..)), "{protocol}");
        assert_eq!(way(None, CudaProto::Ll, Collective::Gather, 64), (OneShot, Reason::Asked));
        assert!(matches!(way(None, CudaProto::Ll, Collective::Scan, 64), (Schedule(..), Reason::Refused)));
    }

    #[test]
    fn every_way_fits_and_without_wishes_it_goes_by_size() {
        calls(|layout, schedules, collective, bytes, registered| {
            let by_size = (select::choose(layout, collective, bytes, registered), Reason::Size);
            assert_eq!(decide(NOTHING, layout, schedules, collective, bytes, registered), by_size);
            for proto in [CudaProto::Ll, CudaProto::Ll128, CudaProto::Simple, CudaProto::Schedule] {
                let (choice, reason) =
                    decide(Asked { proto, ..NOTHING }, layout, schedules, collective, bytes, registered);
                let fits = match choice.protocol {
                    Protocol::Schedule(a, f) => schedules.fits(collective, a, f, choice.blocks, bytes),
                    _ => select::fits(layout, collective, choice, bytes),
                };
                assert!(fits, "{proto} {collective} {bytes}: {choice:?} {reason}");
                assert!(select::kernel(collective, choice.protocol, layout.ranks).is_some());
            }
        });
    }
}
