//! Every collective, with every type and operator, against its definition: in place and not, and with count 0.

use std::ffi::{c_int, c_void};

use super::functions::*;
use super::rank::{INVALID_ARGUMENT, Rank, SUCCESS, all, group, ok, refused, threads};
use super::types::{AVG, F32, I32, OPERATORS, SUM, TYPES, Type, reduced, value};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Collective {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    AlltoAll,
    Gather,
    Scatter,
}
use Collective::*;

const REDUCTIONS: [Collective; 3] = [AllReduce, Reduce, ReduceScatter];
const MOVES: [Collective; 5] = [Broadcast, AllGather, AlltoAll, Gather, Scatter];

/// Bytes beside an output that must stay as they are.
const GUARD: usize = 48;
const UNTOUCHED: u8 = 0xa5;

/// One call, as each rank makes it.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub(super) collective: Collective,
    pub(super) dtype: Type,
    pub(super) op: i32,
    pub(super) root: usize,
    pub(super) count: usize,
    pub(super) in_place: bool,
}

impl Case {
    /// Segments of a rank's input and output; each has `count` elements.
    pub(super) fn segments(&self, rank: usize, ranks: usize) -> (usize, usize) {
        let root = rank == self.root;
        match self.collective {
            AllReduce => (1, 1),
            Reduce => (1, usize::from(root)),
            ReduceScatter => (ranks, 1),
            Broadcast => (usize::from(root), 1),
            AllGather => (1, ranks),
            AlltoAll => (ranks, ranks),
            Gather => (1, if root { ranks } else { 0 }),
            Scatter => (if root { ranks } else { 0 }, 1),
        }
    }

    fn input(&self, rank: usize, ranks: usize) -> Vec<i64> {
        (0..self.segments(rank, ranks).0 * self.count).map(|i| value(self.op, ranks, rank, i)).collect()
    }

    /// A rank's output.
    fn expected(&self, rank: usize, ranks: usize) -> Vec<i64> {
        let count = self.count;
        let of = |rank: usize, i: usize| value(self.op, ranks, rank, i);
        let all = |i: usize| reduced(self.op, (0..ranks).map(|rank| of(rank, i)));
        let element = |i: usize| match self.collective {
            AllReduce | Reduce => all(i),
            ReduceScatter => all(rank * count + i),
            Broadcast => of(self.root, i),
            AllGather | Gather => of(i / count, i % count),
            AlltoAll => of(i / count, rank * count + i % count),
            Scatter => of(self.root, rank * count + i),
        };
        (0..self.segments(rank, ranks).1 * count).map(element).collect()
    }

    /// Makes the call; a buffer that the rank has not is NULL.
    pub(super) fn call(&self, from: *const c_void, to: *mut c_void, comm: Comm, stream: Stream) -> c_int {
        let (count, dtype, root) = (self.count, self.dtype.code, self.root as c_int);
        match self.collective {
            AllReduce => ncclAllReduce(from, to, count, dtype, self.op, comm, stream),
            Reduce => ncclReduce(from, to, count, dtype, self.op, root, comm, stream),
            ReduceScatter => ncclReduceScatter(from, to, count, dtype, self.op, comm, stream),
            Broadcast => ncclBroadcast(from, to, count, dtype, root, comm, stream),
            AllGather => ncclAllGather(from, to, count, dtype, comm, stream),
            AlltoAll => ncclAlltoAll(from, to, count, dtype, comm, stream),
            Gather => ncclGather(from, to, count, dtype, root, comm, stream),
            Scatter => ncclScatter(from, to, count, dtype, root, comm, stream),
        }
    }

    /// Makes the call as `rank`, and checks its result.
    fn check(&self, rank: &Rank) {
        let size = self.dtype.size();
        let (segment, place) = (self.count * size, rank.rank * self.count * size);
        let (input, expected) = (self.input(rank.rank, rank.size), self.expected(rank.rank, rank.size));
        let (input, expected) = (self.dtype.bytes(input), self.dtype.bytes(expected));
        // In place the shorter of the two is the rank's segment of the longer.
        let (from, to) = match self.collective {
            AllGather | Gather if !expected.is_empty() => (place, 0),
            ReduceScatter | Scatter if !input.is_empty() => (0, place),
            _ => (0, 0),
        };
        let mut whole = vec![UNTOUCHED; 2 * GUARD + input.len().max(expected.len())];
        if self.in_place {
            whole[GUARD + from..][..input.len()].copy_from_slice(&input);
        }
        let (separate, output) = (rank.memory(&input), rank.memory(&whole));
        let given = if self.in_place { output.at(GUARD + from) } else { separate.at(0) };
        let null = |len: usize, at: *const c_void| if len == 0 { std::ptr::null() } else { at };
        let taken = null(expected.len(), output.at(GUARD + to)).cast_mut();
        ok(self.call(null(input.len(), given), taken, rank.comm, rank.stream()));
        rank.wait();
        let what = || {
            let Case { collective, dtype, op, root, count, in_place } = self;
            let name = dtype.name;
            format!("{collective:?} of {count} {name}, op {op}, root {root}, in place {in_place}, rank {}", rank.rank)
        };
        let got = output.read();
        whole[GUARD + to..][..expected.len()].copy_from_slice(&expected);
        if self.in_place && matches!(self.collective, ReduceScatter) {
            // The rest of the input may hold anything.
            let own = GUARD + to..GUARD + to + segment;
            assert!(got[own.clone()] == whole[own], "{}", what());
            let (end, before) = (GUARD + input.len(), GUARD);
            assert!(got[..before] == whole[..before] && got[end..] == whole[end..], "{}: wrote beside", what());
            return;
        }
        assert!(
            got == whole,
            "{}: {:?}, expected {:?}",
            what(),
            &got[..200.min(got.len())],
            &whole[..200.min(whole.len())]
        );
        if !self.in_place {
            assert!(separate.read() == input, "{}: wrote into its input", what());
        }
    }
}

/// Every case of a collective with these counts.
fn check(rank: &Rank, collective: Collective, dtype: Type, op: i32, counts: &[usize]) {
    for &count in counts {
        for in_place in [false, true] {
            Case { collective, dtype, op, root: count % rank.size, count, in_place }.check(rank);
        }
    }
}

fn every_reduction(rank: &Rank) {
    for collective in REDUCTIONS {
        for dtype in TYPES {
            for op in OPERATORS {
                check(rank, collective, dtype, op, &[0, 1, 1001]);
            }
        }
    }
}

fn every_move(rank: &Rank) {
    for collective in MOVES {
        for dtype in TYPES {
            check(rank, collective, dtype, SUM, &[0, 1, 1001]);
        }
    }
}

apart! {
    fn every_reduction_of_two_ranks() { threads(2, every_reduction); }
    fn every_reduction_of_four_ranks() { threads(4, every_reduction); }
    fn every_move_of_two_ranks() { threads(2, every_move); }
    fn every_move_of_three_ranks() { threads(3, every_move); }

    // Several chunks, and parts that do not divide.
    fn long_ones() {
        threads(3, |rank| {
            for collective in REDUCTIONS.into_iter().chain(MOVES) {
                check(rank, collective, I32, SUM, &[65_537, 700_001]);
            }
        });
    }

    fn one_rank_alone() {
        threads(1, |rank| {
            for collective in REDUCTIONS.into_iter().chain(MOVES) {
                for op in OPERATORS {
                    check(rank, collective, F32, op, &[0, 1, 1001]);
                }
            }
        });
    }

    // From left to right 1e8 + 1 - 1e8 + 0.5 is 0.5.
    fn sums_are_exact_where_the_variable_says_so() with [("TINYNCCL_SUM", "exact")] {
        threads(4, |rank| {
            let mine = [1e8f32, 1.0, -1e8, 0.5][rank.rank];
            let input: Vec<u8> = std::iter::repeat_n(mine.to_le_bytes(), 4 * 1001).flatten().collect();
            let (input, output) = (rank.memory(&input), rank.memory(&[0; 4 * 4 * 1001]));
            for (op, want) in [(SUM, 1.5f32), (AVG, 0.375)] {
                for collective in [AllReduce, ReduceScatter] {
                    let case = Case { collective, dtype: F32, op, root: 0, count: 1001, in_place: false };
                    ok(case.call(input.at(0), output.at_mut(0), rank.comm, rank.stream()));
                    rank.wait();
                    let got = output.read();
                    assert!(got[..4 * 1001].chunks(4).all(|x| x == want.to_le_bytes()), "{collective:?}, op {op}");
                }
            }
        });
    }

    fn bcast_is_broadcast_in_place() {
        threads(2, |rank| {
            for root in 0..2 {
                let memory = rank.memory(&[10 + rank.rank as u8; 100]);
                ok(ncclBcast(memory.at_mut(0), 100, 0, root, rank.comm, rank.stream()));
                rank.wait();
                assert_eq!(memory.read(), [10 + root as u8; 100]);
            }
        });
    }

    fn many_without_waiting() {
        threads(2, |rank| {
            let memory = rank.memory(&I32.bytes(std::iter::repeat_n(1, 1000)));
            for _ in 0..20 {
                ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, I32.code, SUM, rank.comm, rank.stream()));
            }
            rank.wait();
            assert_eq!(memory.read(), I32.bytes(std::iter::repeat_n(1 << 20, 1000)));
        });
    }

    fn every_rank_in_one_thread() {
        let ranks = all(4);
        for collective in REDUCTIONS.into_iter().chain(MOVES) {
            let case = Case { collective, dtype: I32, op: SUM, root: 2, count: 1001, in_place: false };
            let memory: Vec<_> = ranks
                .iter()
                .map(|rank| {
                    let (input, (_, output)) = (case.input(rank.rank, 4), case.segments(rank.rank, 4));
                    (rank.memory(&I32.bytes(input)), rank.memory(&vec![0; 4 * 1001 * output]))
                })
                .collect();
            group(|| {
                for (rank, (input, output)) in ranks.iter().zip(&memory) {
                    let (inputs, outputs) = case.segments(rank.rank, 4);
                    let from = if inputs == 0 { std::ptr::null() } else { input.at(0) };
                    let to = if outputs == 0 { std::ptr::null_mut() } else { output.at_mut(0) };
                    ok(case.call(from, to, rank.comm, rank.stream()));
                }
            });
            for (rank, (_, output)) in ranks.iter().zip(&memory) {
                rank.wait();
                assert!(output.read() == I32.bytes(case.expected(rank.rank, 4)), "{collective:?}, rank {}", rank.rank);
            }
        }
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn wrong_arguments_are_refused_and_named() {
        threads(2, |rank| {
            let memory = rank.memory(&[0; 64]);
            let reduce = |at: usize, count, dtype, op, root| {
                let at = memory.at_mut(at);
                ncclReduce(at, at, count, dtype, op, root, rank.comm, rank.stream())
            };
            refused(reduce(0, 4, 99, 0, 0), INVALID_ARGUMENT, &["ncclReduce", "99"]);
            refused(reduce(0, 4, 7, 99, 0), INVALID_ARGUMENT, &["ncclReduce", "99"]);
            refused(reduce(0, 4, 7, 0, 2), INVALID_ARGUMENT, &["root is 2"]);
            refused(reduce(0, 4, 7, 0, -1), INVALID_ARGUMENT, &["root is -1"]);
            refused(reduce(2, 4, 7, 0, 0), INVALID_ARGUMENT, &["2 bytes into an element of 4"]);
            refused(reduce(0, 17, 7, 0, 0), INVALID_ARGUMENT, &["64 bytes from the end of its allocation of 64"]);
            let null = std::ptr::null_mut();
            refused(ncclAllReduce(null, null, 4, 7, 0, rank.comm, rank.stream()), INVALID_ARGUMENT, &["ncclAllReduce"]);
            refused(ncclAllReduce(memory.at(0), null, 4, 7, 0, null, rank.stream()), INVALID_ARGUMENT, &["comm is NULL"]);
            let host = [0f32; 4];
            let at = host.as_ptr().cast_mut().cast();
            refused(
                ncclAllReduce(at, at, 4, 7, 0, rank.comm, rank.stream()),
                INVALID_ARGUMENT,
                &["memory of the host"],
            );
            rank.still_works();
        });
    }

    // It is a kernel's work, and there are none here.
    fn a_scaled_sum_says_what_it_needs() {
        threads(2, |rank| {
            let (mut op, mut scalar) = (-1, 3f32);
            let made = ncclRedOpCreatePreMulSum(&mut op, (&raw mut scalar).cast(), F32.code, 1, rank.comm);
            let text = last_error(rank.comm);
            assert!(made != SUCCESS && text.contains("ncclRedOpCreatePreMulSum"), "{made}: {text}");
            assert!(text.contains("NVRTC") || text.contains("CUDA_ERROR_NOT_SUPPORTED"), "{text}");
            for op in [0, 5] {
                refused(ncclRedOpDestroy(op, rank.comm), INVALID_ARGUMENT, &["ncclRedOpDestroy"]);
            }
            rank.still_works();
        });
    }
}
