//! Schedules of the library there and back; files by hand; files that are wrong.

mod by_hand;
mod played;
mod wrong;

use proptest::prelude::*;

use self::played::played;
use crate::algorithm;
use crate::schedule::verify::verify;
use crate::schedule::{Schedule, Shape};
use crate::simulate::Cut;
use crate::simulate::machine::Graph;
use crate::simulate::packing::pack;
use crate::wire::{Algorithm, Collective};

/// A format's writer and reader.
type Format = (&'static str, fn(&Schedule, bool) -> crate::Result<String>, fn(&str) -> crate::Result<Schedule>);

const FORMATS: [Format; 2] =
    [("MSCCL", Schedule::to_msccl, Schedule::from_msccl), ("mscclpp", Schedule::to_mscclpp, Schedule::from_mscclpp)];

fn built_in(algorithm: Algorithm, shape: Shape) -> Option<Schedule> {
    let programs = (0..shape.ranks).map(|rank| algorithm::program(algorithm, &shape, rank));
    let programs = algorithm::supports(algorithm, &shape).then(|| programs.collect::<Option<Vec<_>>>()).flatten()?;
    Some(Schedule::new(shape, programs).unwrap())
}

/// There and back: the same collective, as many messages of each part, and the same bits. Returns false if the format
/// has no such collective.
fn there_and_back(schedule: &Schedule, (name, write, read): Format, in_place: bool) -> bool {
    let shape = *schedule.shape();
    let text = match write(schedule, in_place) {
        Ok(text) => text,
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains(&format!("it has no {}, only ", shape.collective)), "{name}: {error}");
            return false;
        }
    };
    let again = read(&text).unwrap_or_else(|error| panic!("{name}, in place {in_place}: {error}\n{schedule}{text}"));
    let of = |shape: &Shape| (shape.collective, shape.ranks, shape.root);
    assert_eq!(of(again.shape()), of(&shape), "{name}");
    assert!(!in_place || again.in_place().is_ok(), "{name}: {:?} in {text}", again.in_place());
    let report = |schedule: &Schedule| verify(schedule.programs(), schedule.shape(), 2, 1, false).unwrap();
    let (theirs, ours) = (report(&again), report(schedule));
    assert_eq!((theirs.sent, theirs.rank_order), (ours.sent, ours.rank_order), "{name}: {schedule}{again}");
    assert_eq!(played(&again), played(schedule), "{name}: {schedule}{again}");
    true
}

#[test]
fn every_algorithm_there_and_back() {
    let mut count = [0; 2];
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for ranks in 1..=9 {
                for (root, channels) in [(0, 1), (ranks - 1, 2)] {
                    let root = if collective.has_root() { root } else { 0 };
                    let Some(schedule) = built_in(algorithm, Shape { collective, ranks, root, channels }) else {
                        continue;
                    };
                    for (format, count) in FORMATS.into_iter().zip(&mut count) {
                        for in_place in [false, true] {
                            if !in_place || schedule.in_place().is_ok() {
                                *count += usize::from(there_and_back(&schedule, format, in_place));
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(count[0] > 800 && count[1] > 500, "{count:?}");
}

#[test]
fn what_is_written_is_the_same_again() {
    for algorithm in [Algorithm::Ring, Algorithm::Tree, Algorithm::HalvingDoubling] {
        let shape = Shape { collective: Collective::AllReduce, ranks: 8, root: 0, channels: 1 };
        let schedule = built_in(algorithm, shape).unwrap();
        for (name, write, read) in FORMATS {
            let once = read(&write(&schedule, false).unwrap()).unwrap();
            let twice = read(&write(&once, false).unwrap()).unwrap();
            assert_eq!(twice.to_string(), once.to_string(), "{name}, {algorithm}");
        }
    }
}

/// A lane stays one lane where nothing else is needed, and steps that NCCL fuses stay fused.
#[test]
fn a_ring_comes_back_as_it_was() {
    let shape = Shape { collective: Collective::AllReduce, ranks: 4, root: 0, channels: 1 };
    let ring = built_in(Algorithm::Ring, shape).unwrap();
    for (name, write, read) in FORMATS {
        assert_eq!(read(&write(&ring, false).unwrap()).unwrap(), ring, "{name}");
    }
}

/// Hosts in a ring, with a rate for each link.
fn machine(ranks: usize, rates: &[u32]) -> Graph {
    let names: Vec<String> = (0..ranks).map(|host| format!("host{host}")).collect();
    let inside = serde_json::json!({"latency_us": 0.2, "bandwidth_gb_s": 8.0});
    let nodes: Vec<_> =
        names.iter().map(|name| serde_json::json!({"name": name, "ranks": 1, "inside": inside})).collect();
    let links: Vec<_> = (0..ranks)
        .map(|at| {
            let rate = f64::from(rates[at % rates.len()]);
            serde_json::json!({
                "between": [names[at], names[(at + 1) % ranks]], "latency_us": 5.0, "bandwidth_gb_s": rate
            })
        })
        .collect();
    Graph::new(&serde_json::from_value(serde_json::json!({"node": nodes, "link": links})).unwrap()).unwrap()
}

const PACKED: [Collective; 5] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn any_schedule_there_and_back(
        algorithm in prop::sample::select(Algorithm::ALL.to_vec()),
        collective in prop::sample::select(Collective::ALL.to_vec()),
        ranks in 1usize..17, root in 0usize..17, channels in 1usize..5, in_place: bool,
    ) {
        let root = if collective.has_root() { root % ranks } else { 0 };
        if let Some(schedule) = built_in(algorithm, Shape { collective, ranks, root, channels })
            && (!in_place || schedule.in_place().is_ok())
        {
            FORMATS.into_iter().for_each(|format| { there_and_back(&schedule, format, in_place); });
        }
    }

    #[test]
    fn any_cut_or_changed_text_is_no_panic(
        format in 0usize..2, ranks in 2usize..4, cut in 0.0f64..1.0,
        changes in prop::collection::vec((0.0f64..1.0, "[0-9a-z<>\"{}\\[\\],:. /=-]{0,3}"), 0..4), keep: bool,
    ) {
        let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
        let schedule = built_in(Algorithm::AllPairs, shape).unwrap();
        let (_, write, read) = FORMATS[format];
        let mut text = write(&schedule, false).unwrap();
        for (at, new) in changes {
            let at = (at * text.len() as f64) as usize;
            text.replace_range(at..(at + new.len()).min(text.len()), &new);
        }
        if !keep {
            text.truncate((cut * text.len() as f64) as usize);
        }
        // What is read all the same is proved.
        if let Ok(read) = read(&text) {
            prop_assert!(verify(read.programs(), read.shape(), 2, 1, false).is_ok());
        }
    }

    /// Numbers that are out of place, in a text that stays one.
    #[test]
    fn any_other_number_is_no_panic(
        format in 0usize..2, ranks in 2usize..4, which in 0.0f64..1.0, new in 0u64..70, large: bool,
    ) {
        let shape = Shape { collective: Collective::AllGather, ranks, root: 0, channels: 1 };
        let (_, write, read) = FORMATS[format];
        let text = write(&built_in(Algorithm::Ring, shape).unwrap(), false).unwrap();
        let is_digit = |at: usize| text.as_bytes()[at].is_ascii_digit();
        let starts: Vec<usize> = (1..text.len()).filter(|&at| is_digit(at) && !is_digit(at - 1)).collect();
        let start = starts[(which * starts.len() as f64) as usize];
        let end = (start..text.len()).find(|&at| !is_digit(at)).unwrap();
        let new = if large { u64::MAX - new } else { new };
        if let Ok(read) = read(&format!("{}{new}{}", &text[..start], &text[end..])) {
            prop_assert!(verify(read.programs(), read.shape(), 2, 1, false).is_ok());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_packed_trees_there_and_back(
        collective in prop::sample::select(PACKED.to_vec()), ranks in 2usize..7, root in 0usize..7,
        rates in prop::collection::vec(1u32..8, 1..7), channels in 1usize..4,
    ) {
        let root = if collective.has_root() { root % ranks } else { 0 };
        let shape = Shape { collective, ranks, root, channels };
        let cut = Cut { count: 1 << 16, elem_size: 4, max_message: 64 << 10 };
        let schedule = pack(&machine(ranks, &rates), &shape, cut).unwrap();
        for format in FORMATS {
            let known = there_and_back(&schedule, format, false);
            prop_assert!(known || collective.has_root());
        }
    }
}
