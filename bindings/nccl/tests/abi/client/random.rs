//! A thousand groups in random nesting, of random calls of several communicators, against a model.
//!
//! One thread holds all ranks. Every buffer has a model beside it; a group's calls use parts of the buffers that no
//! other call of the group uses, so their order does not matter.

use std::ffi::c_void;

use super::collectives::{Case, Collective};
use super::functions::*;
use super::rank::{Memory, Rank, all, gpu, group, ok};
use super::types::{I32, SUM};

/// Slots of a buffer, each `MOST` elements per rank.
const PLACES: usize = 24;
const MOST: usize = 64;
const RANKS: usize = 4;
const GROUPS: usize = 1000;

/// xorshift64*.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(0x9e37_79b9_7f4a_7c15 ^ seed)
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

/// A GPU's buffer, and what should be in it.
struct Place {
    memory: Memory,
    model: Vec<i32>,
}

impl Place {
    fn at(&self, element: usize) -> *mut c_void {
        self.memory.at_mut(4 * element)
    }
}

/// The ranks of a communicator, by the GPU of each.
struct World {
    ranks: Vec<Rank>,
    gpus: Vec<usize>,
}

const COLLECTIVES: [Collective; 8] = [
    Collective::AllReduce,
    Collective::Reduce,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::AlltoAll,
    Collective::Gather,
    Collective::Scatter,
];

/// Enqueues something on the world's ranks in random order, in random groups.
fn for_each(random: &mut Random, world: &World, mut call: impl FnMut(usize)) {
    let first = random.below(world.ranks.len());
    for i in 0..world.ranks.len() {
        let rank = (first + i) % world.ranks.len();
        let depth = random.below(3);
        (0..depth).for_each(|_| ok(ncclGroupStart()));
        call(rank);
        (0..depth).for_each(|_| ok(ncclGroupEnd()));
    }
}

/// A collective from `input` on into `output` on, of each GPU's buffer.
fn collective(random: &mut Random, world: &World, places: &mut [Place], input: usize, output: usize) {
    let ranks = world.ranks.len();
    let case = Case {
        collective: COLLECTIVES[random.below(COLLECTIVES.len())],
        dtype: I32,
        op: SUM,
        root: random.below(ranks),
        count: random.below(MOST),
        in_place: false,
    };
    let count = case.count;
    for_each(random, world, |rank| {
        let (place, (inputs, outputs)) = (&places[world.gpus[rank]], case.segments(rank, ranks));
        let from = if inputs * count == 0 { std::ptr::null() } else { place.at(input).cast_const() };
        let to = if outputs * count == 0 { std::ptr::null_mut() } else { place.at(output) };
        let one = &world.ranks[rank];
        ok(case.call(from, to, one.comm, one.stream()));
    });
    let inputs: Vec<Vec<i32>> =
        world.gpus.iter().map(|&gpu| places[gpu].model[input..][..MOST * RANKS].to_vec()).collect();
    let sum = |i: usize| inputs.iter().fold(0i32, |sum, input| sum.wrapping_add(input[i]));
    for rank in 0..ranks {
        let element = |i: usize| match case.collective {
            Collective::AllReduce | Collective::Reduce => sum(i),
            Collective::ReduceScatter => sum(rank * count + i),
            Collective::Broadcast => inputs[case.root][i],
            Collective::AllGather | Collective::Gather => inputs[i / count][i % count],
            Collective::AlltoAll => inputs[i / count][rank * count + i % count],
            Collective::Scatter => inputs[case.root][rank * count + i],
        };
        let result: Vec<i32> = (0..case.segments(rank, ranks).1 * count).map(element).collect();
        places[world.gpus[rank]].model[output..][..result.len()].copy_from_slice(&result);
    }
}

/// A message between two ranks, perhaps the same.
fn message(random: &mut Random, world: &World, places: &mut [Place], input: usize, output: usize) {
    let (from, to) = (random.below(world.ranks.len()), random.below(world.ranks.len()));
    let count = random.below(MOST * RANKS);
    let send = || {
        let rank = &world.ranks[from];
        ok(ncclSend(places[world.gpus[from]].at(input), count, I32.code, to as i32, rank.comm, rank.stream()));
    };
    let recv = || {
        let rank = &world.ranks[to];
        ok(ncclRecv(places[world.gpus[to]].at(output), count, I32.code, from as i32, rank.comm, rank.stream()));
    };
    if random.below(2) == 0 {
        (send(), recv())
    } else {
        (recv(), send())
    };
    let data = places[world.gpus[from]].model[input..][..count].to_vec();
    places[world.gpus[to]].model[output..][..count].copy_from_slice(&data);
}

/// A world of some of the GPUs.
fn part(whole: &World, gpus: &[usize]) -> World {
    let mut comms = vec![std::ptr::null_mut(); whole.ranks.len()];
    group(|| {
        for (rank, comm) in whole.ranks.iter().zip(&mut comms) {
            let color = if gpus.contains(&rank.rank) { 0 } else { -1 };
            let key = gpus.iter().position(|&gpu| gpu == rank.rank).unwrap_or(0);
            ok(ncclCommSplit(rank.comm, color, key as i32, comm, std::ptr::null()));
        }
    });
    let ranks = gpus.iter().enumerate().map(|(rank, &at)| Rank::of(comms[at], rank, gpus.len(), gpu(at)));
    World { ranks: ranks.collect(), gpus: gpus.to_vec() }
}

apart! {
    fn a_thousand_groups() {
        let seed = std::env::var("TINYNCCL_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(21);
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let whole = World { ranks: all(RANKS), gpus: (0..RANKS).collect() };
        let worlds = [part(&whole, &[2, 0]), part(&whole, &[3, 1, 0]), part(&whole, &[3]), whole];
        // Each part of a buffer is as long as the longest input or output.
        let len = PLACES * MOST * RANKS;
        let mut places: Vec<Place> = (0..RANKS)
            .map(|rank| {
                let model: Vec<i32> = (0..len).map(|i| (rank * 1_000_003 + i) as i32).collect();
                let bytes: Vec<u8> = model.iter().flat_map(|x| x.to_le_bytes()).collect();
                let memory = worlds[3].ranks[rank].memory(&bytes);
                worlds[3].ranks[rank].stream.synchronize().unwrap();
                Place { memory, model }
            })
            .collect();
        for round in 0..GROUPS {
            // Which parts are used, in which order: no two calls have one in common.
            let mut parts: Vec<usize> = (0..PLACES).collect();
            (0..PLACES).for_each(|i| parts.swap(i, random.below(PLACES)));
            let calls = 1 + random.below(8);
            group(|| {
                for pair in parts.chunks(2).take(calls) {
                    let (input, output) = (pair[0] * MOST * RANKS, pair[1] * MOST * RANKS);
                    let world = &worlds[random.below(worlds.len())];
                    if random.below(3) == 0 {
                        message(&mut random, world, &mut places, input, output);
                    } else {
                        collective(&mut random, world, &mut places, input, output);
                    }
                }
            });
            // The streams of a GPU's ranks are not ordered among each other.
            worlds.iter().flat_map(|world| &world.ranks).for_each(Rank::wait);
            if round % 50 == 49 {
                for (gpu, place) in places.iter().enumerate() {
                    let expected: Vec<u8> = place.model.iter().flat_map(|x| x.to_le_bytes()).collect();
                    assert!(place.memory.read() == expected, "seed {seed}, up to round {round}, GPU {gpu}");
                }
            }
        }
        worlds.into_iter().flat_map(|world| world.ranks).for_each(Rank::destroy);
    }
}
