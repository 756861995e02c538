//! Every collective, element type, operator, algorithm and world size from 1 to 9, in place and out of place, against
//! values computed without communication. Equality is exact.
//!
//! Ranks are threads for the whole product, and processes over shared memory and TCP for a part of it (`processes.rs`).
//! Messages are as short as 128 bytes, so that few elements make several of them. A failure names its cell.

use crate::common::cells::{COLLECTIVES, Cell, check};
use crate::common::values::several_messages;
use crate::common::{Fabric, config, run_ok};
use tinynccl::algorithm::{Shape, supports, through_memory};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Config, DType, ReduceOp};

/// Bytes of the longest message.
const MESSAGE: usize = 128;

fn short_messages(algorithm: Algorithm, ranks: usize) -> Config {
    let mut config = config();
    config.algorithm = Some(algorithm);
    config.channels = 1 + ranks % 2;
    config.shm_chunk = MESSAGE;
    config.tcp_chunk = MESSAGE;
    config.fifo_depth = 2;
    config.one_shot = 64 << 10;
    config.stage = 4 << 10;
    config
}

fn shape(collective: Collective, ranks: usize) -> Shape {
    Shape { collective, ranks, root: 0, channels: 1 }
}

/// All cells of one algorithm and world size; roots change from cell to cell.
fn cells(algorithm: Algorithm, ranks: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    // The two without schedules do everything where memory is shared (and are something else for one rank).
    let able = |c| match algorithm {
        Algorithm::OneShot => ranks > 1 && through_memory(c),
        Algorithm::Staged => ranks > 1 && through_memory(c) && c != Collective::Barrier,
        Algorithm::TwoShot => ranks > 1 && through_memory(c) && !matches!(c, Collective::Scatter | Collective::Barrier),
        _ => supports(algorithm, &shape(c, ranks)),
    };
    for collective in COLLECTIVES.into_iter().filter(|&c| able(c)) {
        let ops = if collective.reduces() { &ReduceOp::ALL[..] } else { &[ReduceOp::Sum] };
        let dtypes = if collective == Collective::Barrier { &DType::ALL[..1] } else { &DType::ALL };
        for &dtype in dtypes {
            // Not divisible by the ranks, fewer than ranks, several messages.
            let many = several_messages(dtype, ranks, MESSAGE);
            let counts = [0, 1, 7, 2 * ranks + 1, many];
            let ops = ops.iter().filter(|op| op.applies_to(dtype));
            for (&op, count) in ops.flat_map(|op| counts.map(|count| (op, count))) {
                let root = cells.len() % ranks;
                cells.push(Cell { collective, dtype, op, root, count });
            }
        }
    }
    cells
}

fn check_world(ranks: usize) {
    for algorithm in Algorithm::ALL {
        let cells = cells(algorithm, ranks);
        run_ok(Fabric::Inproc, ranks, &short_messages(algorithm, ranks), |comm| {
            // A broadcast from one allocation to another takes a schedule: the other ranks do not announce that they
            // have both.
            let (last, first): (Vec<Cell>, Vec<Cell>) =
                cells.iter().partition(|c| algorithm == Algorithm::TwoShot && c.collective == Collective::Broadcast);
            first.iter().try_for_each(|&cell| check(&comm, cell, &algorithm))?;
            if matches!(algorithm, Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged) {
                assert!(comm.census().links.is_empty(), "{algorithm}: went over links: {:?}", comm.census());
            }
            last.iter().try_for_each(|&cell| check(&comm, cell, &algorithm))
        });
    }
}

macro_rules! worlds {
    ($($name:ident: $ranks:literal;)*) => {$(
        #[test]
        fn $name() {
            check_world($ranks);
        }
    )*};
}
worlds! {
    one_rank: 1;
    two_ranks: 2;
    three_ranks: 3;
    four_ranks: 4;
    five_ranks: 5;
    six_ranks: 6;
    seven_ranks: 7;
    eight_ranks: 8;
    nine_ranks: 9;
}

/// The table in the documentation of `algorithm`: nothing of it may get lost by refusing a shape.
fn documented(algorithm: Algorithm, collective: Collective) -> bool {
    use Collective::{AllGather, AllReduce, Barrier, Broadcast, Reduce, ReduceScatter};
    match algorithm {
        Algorithm::Ring | Algorithm::Tree | Algorithm::DoubleTree => {
            matches!(collective, AllReduce | ReduceScatter | AllGather | Broadcast | Reduce | Barrier)
        }
        Algorithm::Direct => true,
        Algorithm::HalvingDoubling => matches!(collective, AllReduce | ReduceScatter | AllGather | Barrier),
        Algorithm::AllPairs => matches!(collective, AllReduce | Reduce | Barrier),
        Algorithm::RecursiveDoubling => matches!(collective, AllReduce | Barrier),
        Algorithm::OneShot | Algorithm::TwoShot | Algorithm::Staged | Algorithm::Hierarchical => false,
    }
}

#[test]
fn what_is_documented_is_supported() {
    for algorithm in Algorithm::ALL {
        for collective in COLLECTIVES {
            for ranks in 1..=9 {
                let able = supports(algorithm, &shape(collective, ranks));
                assert!(able || !documented(algorithm, collective), "{algorithm} {collective} {ranks} ranks");
            }
        }
    }
    let total: usize = (1..=9).flat_map(|n| Algorithm::ALL.map(|a| cells(a, n).len())).sum();
    assert!(total > 45_000, "{total} cells");
}

#[test]
fn a_part_of_the_table_over_every_transport() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        for ranks in [2, 3, 4] {
            for algorithm in Algorithm::ALL {
                let (dtypes, ops) = ([DType::F32, DType::Bf16, DType::I64], [ReduceOp::Sum, ReduceOp::Avg]);
                let cells: Vec<Cell> = cells(algorithm, ranks)
                    .into_iter()
                    .filter(|cell| dtypes.contains(&cell.dtype) && ops.contains(&cell.op) && cell.count != 7)
                    .collect();
                run_ok(fabric, ranks, &short_messages(algorithm, ranks), |comm| {
                    let context = format!("{fabric:?}, {algorithm}");
                    cells.iter().try_for_each(|&cell| check(&comm, cell, &context))
                });
            }
        }
    }
}
