//! Schedules of the caller's making: those of the library, given back to it, run as its own calls do.

use std::collections::HashMap;

use tinynccl::algorithm::{self, Shape};
use tinynccl::comm::RawCall;
use tinynccl::schedule::{Lane, Loc, Program, Schedule, Step};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Call, Comm, Config, Element, Error, ReduceOp, Result};

use crate::common::cells::COLLECTIVES;
use crate::common::{FABRICS, Fabric, config, run, run_ok};
use crate::disagree::{patient, told};
use crate::symmetric_processes;

fn built_in(algorithm: Algorithm, shape: Shape) -> Schedule {
    let programs = (0..shape.ranks).map(|rank| algorithm::program(algorithm, &shape, rank).expect("supported"));
    Schedule::new(shape, programs.collect()).unwrap_or_else(|error| panic!("{algorithm} {shape:?}: {error}"))
}

fn all_reduce(algorithm: Algorithm, ranks: usize) -> Schedule {
    built_in(algorithm, Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 })
}

/// splitmix64's finalizer (Steele, Lea, Flood 2014).
fn mixed(seed: u64) -> u64 {
    let x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A call by the library and the same by `schedule` must leave the same bytes, in place and not.
fn same<T: Element>(comm: &Comm, schedule: &Schedule, op: ReduceOp, count: usize, value: fn(u64) -> T) -> Result<()> {
    let (rank, shape) = (comm.rank(), schedule.shape());
    let (reads, writes) = (shape.input_segments(rank), shape.output_segments(rank));
    let values = |segments: usize| -> Vec<T> {
        (0..segments * count).map(|i| value(mixed((rank * 1_000_003 + i) as u64))).collect()
    };
    let call = Call::new(shape.collective, T::DTYPE, op, shape.root, count);
    let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();

    let input = values(reads);
    let [mut theirs, mut ours] = [(); 2].map(|()| vec![T::zeroed(); writes * count]);
    let raw = RawCall::new(call, input.as_ptr().cast(), theirs.as_mut_ptr().cast());
    // SAFETY: as many segments as the shape has, which live to the end of this function.
    unsafe { comm.run_raw(&[raw]) }?;
    comm.run_program(schedule, &input, &mut ours, op)?;
    assert_eq!(bytes(&ours), bytes(&theirs), "{} of {count}, rank {rank}: {schedule}", shape.collective);
    assert_eq!(bytes(&input), bytes(&values(reads)), "the input stays");

    if schedule.in_place().is_err() {
        return Ok(());
    }
    let (mut theirs, mut ours) = (values(reads.max(writes)), values(reads.max(writes)));
    let (of_input, of_output) = shape.in_place(rank).unwrap_or((0, 0));
    let base = theirs.as_mut_ptr();
    let raw = RawCall::new(
        call,
        base.wrapping_add(of_output * count).cast_const().cast(),
        base.wrapping_add(of_input * count).cast(),
    );
    // SAFETY: the larger buffer is all of `theirs`, the smaller one a segment of it.
    unsafe { comm.run_raw(&[raw]) }?;
    comm.run_program_in_place(schedule, &mut ours, op)?;
    assert_eq!(bytes(&ours), bytes(&theirs), "{} of {count} in place, rank {rank}: {schedule}", shape.collective);
    Ok(())
}

/// Between -1 and 1: sums of these round, so that another order of additions gives other bits.
fn float(random: u64) -> f32 {
    (random >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn whole(random: u64) -> i32 {
    random as i32
}

/// Every collective of every algorithm; how many.
fn every_call<T: Element>(
    fabric: Fabric,
    ranks: usize,
    config: &Config,
    counts: &[usize],
    value: fn(u64) -> T,
) -> usize {
    let mut checked = 0;
    for algorithm in Algorithm::ALL {
        let mut config = config.clone();
        config.algorithm = Some(algorithm);
        let mut schedules = HashMap::new();
        for collective in COLLECTIVES.into_iter().filter(|c| *c != Collective::Barrier) {
            for root in if collective.has_root() { vec![0, ranks - 1] } else { vec![0] } {
                let shape = Shape { collective, ranks, root, channels: config.channels };
                if algorithm::supports(algorithm, &shape) {
                    schedules.insert((collective, root), built_in(algorithm, shape));
                }
            }
        }
        checked += schedules.len();
        run_ok(fabric, ranks, &config, |comm| {
            for collective in COLLECTIVES {
                for root in [0, ranks - 1] {
                    let Some(schedule) = schedules.get(&(collective, root)) else { continue };
                    for (i, &count) in counts.iter().enumerate() {
                        let op = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg][i % 3];
                        let op = if collective == Collective::Scan { ReduceOp::Sum } else { op };
                        same(&comm, schedule, op, count, value)?;
                    }
                }
            }
            Ok(())
        });
    }
    checked
}

#[test]
fn every_algorithm_gives_its_bits_on_one_to_nine_ranks() {
    for ranks in 1..=9 {
        let mut config = config();
        config.channels = 1 + ranks % 2;
        let checked = every_call(Fabric::Inproc, ranks, &config, &[1003, 0, 1, 37, 5], float);
        assert!(checked >= 30, "{checked} schedules on {ranks} ranks");
    }
}

#[test]
fn every_algorithm_gives_its_values_in_several_windows_over_every_network() {
    for fabric in FABRICS {
        let mut config = config();
        (config.shm_chunk, config.tcp_chunk) = (4 << 10, 4 << 10);
        let checked = every_call(fabric, 3, &config, &[9001], whole);
        assert!(checked >= 30, "{checked} schedules");
    }
}

#[test]
fn a_barrier_by_a_program_waits_for_all() {
    let schedule = built_in(Algorithm::Tree, Shape { collective: Collective::Barrier, ranks: 3, root: 0, channels: 1 });
    run_ok(Fabric::Inproc, 3, &config(), |comm| {
        comm.run_program::<u8>(&schedule, &[], &mut [], ReduceOp::Sum)?;
        let refused = comm.run_program(&schedule, &[1u8], &mut [0], ReduceOp::Sum).unwrap_err().to_string();
        assert!(refused.contains("expected 0 elements, got 1"), "{refused}");
        comm.run_program_in_place::<u8>(&schedule, &mut [], ReduceOp::Sum)
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_sent() {
    let schedule = all_reduce(Algorithm::Ring, 3);
    // It sends its input after it has written its output.
    let late = {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, root: 0, channels: 1 };
        let program = |peer: usize| {
            let (input, output) = (Loc::input(0, 0), Loc::output(0, 0));
            let mut steps = vec![Step::send(peer, input), Step::recv_reduce_copy(peer, input, output, true)];
            if peer == 0 {
                steps = vec![
                    Step::recv(0, output),
                    Step::send(0, input),
                    Step::Reduce { src: input, dst: output, last: true },
                ];
            }
            Program { parts: 1, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] }
        };
        Schedule::new(shape, vec![program(1), program(0)])
    };
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let rank = comm.rank();
        let mut output = [0.0f32; 4];
        let said = comm.run_program(&schedule, &[1.0; 4], &mut output, ReduceOp::Sum).unwrap_err();
        let expected = format!("run_program: rank {rank}: the schedule is for 3 ranks, the communicator has 2");
        assert_eq!((output, said.to_string()), ([0.0; 4], expected));
        let pair = all_reduce(Algorithm::Ring, 2);
        let said = comm.run_program(&pair, &[1.0; 4], &mut [0.0; 3], ReduceOp::Sum).unwrap_err();
        assert!(matches!(said, Error::InvalidArgument { .. }) && said.to_string().contains("expected equal lengths"));
        let direct = Shape { collective: Collective::AllToAll, ranks: 2, root: 0, channels: 1 };
        let direct = built_in(Algorithm::Direct, direct);
        let said = comm.run_program_in_place(&direct, &mut output, ReduceOp::Sum).unwrap_err().to_string();
        assert!(said.contains("in place the schedule is wrong: all_to_all has no form in place"), "{said}");
        match &late {
            Ok(late) => {
                let said = comm.run_program_in_place(late, &mut output, ReduceOp::Sum).unwrap_err().to_string();
                assert!(said.contains("in place the schedule is wrong: rank 1"), "{said}");
                comm.run_program(late, &[rank as f32 + 1.0; 4], &mut output, ReduceOp::Sum)?;
                assert_eq!(output, [3.0; 4]);
            }
            Err(error) => panic!("right out of place: {error}"),
        }
        // Nothing of this ended the communicator.
        comm.run_program_in_place(&pair, &mut output, ReduceOp::Max)
    });
}

/// Files of MSCCL and of mscclpp, by hand and written by us: the values of the library's own calls.
#[test]
fn files_of_other_projects_give_the_librarys_values() {
    let ring = include_str!("../../../docs/programs/all-gather-ring.xml");
    let pairs = include_str!("../../../docs/programs/all-reduce-all-pairs.xml");
    let halves = include_str!("../../../docs/programs/all-reduce-halves.json");
    let mut schedules = vec![
        Schedule::from_msccl(ring).unwrap(),
        Schedule::from_msccl(pairs).unwrap(),
        Schedule::from_mscclpp(halves).unwrap(),
    ];
    for algorithm in [Algorithm::Ring, Algorithm::DoubleTree, Algorithm::HalvingDoubling, Algorithm::AllPairs] {
        let ours = all_reduce(algorithm, 5);
        schedules.push(Schedule::from_msccl(&ours.to_msccl(false).unwrap()).unwrap());
        schedules.push(Schedule::from_mscclpp(&ours.to_mscclpp(true).unwrap()).unwrap());
    }
    for schedule in &schedules {
        for fabric in [Fabric::Inproc, Fabric::Shm] {
            let mut config = config();
            // Several windows.
            config.shm_chunk = 4 << 10;
            run_ok(fabric, schedule.shape().ranks, &config, |comm| {
                for count in [0, 1, 37, 9001] {
                    same(&comm, schedule, ReduceOp::Sum, count, whole)?;
                }
                Ok(())
            });
        }
    }
}

/// A communicator remembers some of its schedules, and needs none of those that it forgot.
#[test]
fn more_schedules_than_are_remembered() {
    let schedules: Vec<Schedule> = (1..=80)
        .map(|channels| {
            built_in(Algorithm::Ring, Shape { collective: Collective::Broadcast, ranks: 2, root: 0, channels })
        })
        .collect();
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        for schedule in schedules.iter().chain(&schedules) {
            let mut buffer = [comm.rank() as u8 + 7; 100];
            comm.run_program_in_place(schedule, &mut buffer, ReduceOp::Sum)?;
            assert_eq!(buffer, [7; 100]);
        }
        Ok(())
    });
}

#[test]
fn ranks_with_other_programs_are_told_both() {
    for fabric in FABRICS {
        for ranks in [2, 3, 5] {
            let (ring, tree) = (all_reduce(Algorithm::Ring, ranks), all_reduce(Algorithm::Tree, ranks));
            let names = [&ring, &tree].map(|schedule| format!("program {:014x}", schedule.fingerprint()));
            for bytes in [8, 1 << 20] {
                let outcomes = run(fabric, ranks, &patient(), |comm: Comm| {
                    let mut buffer = vec![1.0f32; bytes / 4];
                    // Links that are open: before, the error may be that opening one failed.
                    for schedule in [&ring, &tree] {
                        comm.run_program_in_place(schedule, &mut buffer, ReduceOp::Sum)?;
                    }
                    let schedule = if comm.rank() == 1 { &tree } else { &ring };
                    comm.run_program_in_place(schedule, &mut buffer, ReduceOp::Sum)?;
                    comm.close()
                });
                told(fabric, &format!("{ranks} ranks, {bytes} bytes"), &outcomes, [&names[0], &names[1]]);
            }
        }
    }
}

#[test]
fn a_program_beside_the_librarys_call_is_told() {
    for fabric in FABRICS {
        let ring = all_reduce(Algorithm::Ring, 3);
        let name = format!("program {:014x}", ring.fingerprint());
        let outcomes = run(fabric, 3, &patient(), |comm: Comm| {
            let mut buffer = [1.0f32; 8];
            comm.run_program_in_place(&ring, &mut buffer, ReduceOp::Sum)?;
            comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
            match comm.rank() {
                1 => comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?,
                _ => comm.run_program_in_place(&ring, &mut buffer, ReduceOp::Sum)?,
            }
            comm.close()
        });
        told(fabric, "the library's own", &outcomes, [&name, "all_reduce #3"]);
    }
}

/// A rank. It does nothing unless it is started as one.
#[test]
fn rank_process() {
    symmetric_processes::rank(|comm, each| {
        let schedule = all_reduce(Algorithm::Ring, comm.size());
        let mut buffer = vec![1.0f32; 4000];
        for round in 0.. {
            if let Err(error) = comm.run_program_in_place(&schedule, &mut buffer, ReduceOp::Max) {
                return error;
            }
            each(round);
        }
        unreachable!("the loop ends with an error")
    });
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    symmetric_processes::victim("own_program::rank_process", rustix::process::Signal::KILL);
}
