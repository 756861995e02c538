//! Communicators from communicators: split, shrink, grow; their ranks, sizes and GPUs.

use std::ffi::c_int;

use nccl::abi::{Config, UniqueId};

use super::functions::*;
use super::rank::{
    INVALID_ARGUMENT, INVALID_USAGE, Rank, SUCCESS, all, each, gpu, group, ok, refused, threads, unique_id,
};

/// Returns a communicator's rank, number of ranks, and GPU.
fn says(comm: Comm) -> (c_int, c_int, c_int) {
    let (mut rank, mut count, mut device) = (-1, -1, -1);
    ok(ncclCommUserRank(comm, &mut rank));
    ok(ncclCommCount(comm, &mut count));
    ok(ncclCommCuDevice(comm, &mut device));
    (rank, count, device)
}

/// Splits off a communicator; `None` for no colour.
fn split(rank: &Rank, color: c_int, key: c_int) -> Option<Rank> {
    let mut new = std::ptr::dangling_mut();
    ok(ncclCommSplit(rank.comm, color, key, &mut new, std::ptr::null()));
    if new.is_null() {
        return None;
    }
    let (own, count, _) = says(new);
    Some(Rank::of(new, own as usize, count as usize, rank.context.clone()))
}

apart! {
    fn a_communicator_knows_itself() {
        threads(3, |rank| {
            assert_eq!(says(rank.comm), (rank.rank as c_int, 3, rank.rank as c_int));
            let mut bytes = u64::MAX;
            ok(ncclCommMemStats(rank.comm, 3, &mut bytes));
            assert!(bytes < 1 << 30, "{bytes}");
        });
    }

    fn halves_in_turned_order() {
        threads(4, |rank| {
            let half = split(rank, rank.rank as c_int % 2, -(rank.rank as c_int)).expect("a half");
            // Keys are negative: the higher rank comes first.
            assert_eq!((half.rank, half.size), (1 - rank.rank / 2, 2));
            half.still_works();
            rank.still_works();
            half.destroy();
            rank.still_works();
        });
    }

    fn without_a_colour_there_is_no_communicator() {
        threads(3, |rank| {
            let color = if rank.rank == 1 { -1 } else { 0 };
            let part = split(rank, color, 0);
            assert_eq!(part.is_none(), rank.rank == 1);
            if let Some(part) = part {
                assert_eq!((part.rank, part.size), (rank.rank / 2, 2));
                part.still_works();
                part.destroy();
            }
            assert!(split(rank, -1, 0).is_none(), "all without a colour");
            refused(
                ncclCommSplit(rank.comm, -2, 0, &mut std::ptr::null_mut(), std::ptr::null()),
                INVALID_ARGUMENT,
                &["color is -2"],
            );
            rank.still_works();
        });
    }

    // One rank's arguments are wrong; no rank waits for it, and the next split is as good as ever.
    fn a_rank_with_wrong_arguments_keeps_no_other_waiting() {
        let wrong = |rank: &Rank, how: usize, new: &mut Comm| {
            let mut config = Config { version: 23_007, ..Config::NOTHING };
            match how {
                0 => ncclCommSplit(rank.comm, -2, 0, new, &config),
                1 => ncclCommSplit(rank.comm, 0, 0, std::ptr::null_mut(), &config),
                2 => {
                    config.blocking = 7;
                    ncclCommSplit(rank.comm, 0, 0, new, &config)
                }
                3 => {
                    config.magic = 0;
                    ncclCommSplit(rank.comm, -1, 0, new, &config)
                }
                4 => {
                    // In a group, behind another.
                    let mut first = std::ptr::null_mut();
                    ok(ncclGroupStart());
                    ok(ncclCommSplit(rank.comm, 0, 0, &mut first, &config));
                    ncclCommSplit(rank.comm, i32::MIN, 0, new, &config);
                    ncclGroupEnd()
                }
                _ => {
                    // A split without an error, in a group with one.
                    ok(ncclGroupStart());
                    ok(ncclCommSplit(rank.comm, 0, 0, new, &config));
                    ncclBcast(std::ptr::null_mut(), 1, 2, 99, rank.comm, rank.stream());
                    let status = ncclGroupEnd();
                    *new = std::ptr::null_mut();
                    status
                }
            }
        };
        threads(3, |rank| {
            for how in 0..6 {
                let (mut one, mut two) = (std::ptr::null_mut(), std::ptr::null_mut());
                if rank.rank == how % 3 {
                    assert_eq!(wrong(rank, how, &mut one), INVALID_ARGUMENT, "{how}");
                    assert!(one.is_null(), "{how}");
                } else if how == 4 {
                    ok(ncclGroupStart());
                    ok(ncclCommSplit(rank.comm, 0, 0, &mut one, std::ptr::null()));
                    ok(ncclCommSplit(rank.comm, 0, 0, &mut two, std::ptr::null()));
                    refused(ncclGroupEnd(), INVALID_ARGUMENT, &["does not take part"]);
                } else {
                    let status = ncclCommSplit(rank.comm, 0, 0, &mut one, std::ptr::null());
                    refused(status, INVALID_ARGUMENT, &[&format!("rank {} does not take part", how % 3)]);
                }
                let all = split(rank, 0, 0).unwrap();
                assert_eq!(all.size, 3);
                all.still_works();
                all.destroy();
            }
        });
    }

    fn a_rank_that_does_not_grow_keeps_no_other_waiting() {
        let asked = std::sync::Barrier::new(2);
        threads(2, |rank| {
            let mut id = UniqueId { internal: [0; 128] };
            if rank.rank == 0 {
                ok(ncclCommGetUniqueId(rank.comm, &mut id));
            }
            asked.wait();
            let (null, config, mut new) = (std::ptr::null(), std::ptr::null(), std::ptr::null_mut());
            let status = match rank.rank {
                0 => ncclCommGrow(rank.comm, 3, &id, -1, &mut new, config),
                _ => ncclCommGrow(rank.comm, 2, null, -1, &mut new, config),
            };
            refused(status, INVALID_ARGUMENT, &["nRanks is not above 2"]);
            rank.still_works();
        });
    }

    fn an_id_makes_one_communicator() {
        let id = unique_id();
        each(2, id, |rank| {
            rank.still_works();
            rank.destroy();
        });
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        for (rank, size) in [(0, 2), (1, 2), (0, 1), (2, 3)] {
            refused(ncclCommInitRank(&mut comm, size, id, rank), INVALID_USAGE, &["the id was used"]);
        }
        // While the communicator is there, too; and one of a single rank.
        let (all, alone) = (unique_id(), unique_id());
        each(2, all, |rank| {
            let mut comm = std::ptr::null_mut();
            refused(ncclCommInitRank(&mut comm, 2, all, rank.rank as c_int), INVALID_USAGE, &["the id was used"]);
            rank.still_works();
            rank.destroy();
        });
        ok(ncclCommInitRank(&mut comm, 1, alone, 0));
        ok(ncclCommDestroy(comm));
        refused(ncclCommInitRank(&mut comm, 1, alone, 0), INVALID_USAGE, &["the id was used"]);
    }

    // With the deadline of an hour each of them would hang.
    fn ranks_that_do_not_fit_together_all_learn_it() with [("TINYNCCL_TIMEOUT", "3600"), ("TINYNCCL_CONNECT_TIMEOUT", "3600")] {
        for (callers, word) in [
            ([(0, 3), (0, 3)], "rank 0 is here already"),
            ([(1, 3), (1, 3)], "rank 1 is here already"),
            ([(0, 2), (1, 3)], "world size"),
            ([(0, 1), (1, 2)], "world size"),
        ] {
            let id = unique_id();
            std::thread::scope(|scope| {
                for (rank, size) in callers {
                    scope.spawn(move || {
                        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
                        let status = ncclCommInitRank(&mut comm, size, id, rank);
                        // A rank alone may have been first: then the id was used when the other came.
                        let text = last_error(std::ptr::null_mut());
                        if (rank, size, status) == (0, 1, SUCCESS) {
                            return ok(ncclCommDestroy(comm));
                        }
                        assert_ne!(status, SUCCESS);
                        assert!(text.contains(word) || size == 2 && text.contains("the id was used"), "{callers:?}: {text}");
                    });
                }
            });
            let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
            refused(ncclCommInitRank(&mut comm, 2, id, 0), INVALID_USAGE, &["the id was used"]);
        }
    }

    fn ids_cost_nothing_until_they_are_used() {
        let count = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
        let first = unique_id();
        let before = (count("fd"), count("task"));
        let ids: Vec<UniqueId> = (0..500).map(|_| unique_id()).collect();
        assert_eq!((count("fd"), count("task")), before);
        // Used in any order, also the first and the last.
        for id in [first, ids[499], ids[0], ids[250]] {
            each(2, id, |rank| {
                rank.still_works();
                rank.destroy();
            });
        }
        // Several of them make one communicator: nothing stays behind when it has gone.
        let again = || {
            let ids = [unique_id(), unique_id(), unique_id(), unique_id()];
            std::thread::scope(|scope| {
                for rank in 0..2 {
                    scope.spawn(move || {
                        let (context, mut comm) = (gpu(rank), std::ptr::null_mut());
                        let null = std::ptr::null();
                        ok(ncclCommInitRankScalable(&mut comm, 2, rank as c_int, 2, ids.as_ptr(), null));
                        Rank::of(comm, rank, 2, context).destroy();
                    });
                }
            });
        };
        (0..3).for_each(|_| again());
        let begin = std::time::Instant::now();
        let settled = (count("fd"), count("task"));
        (0..10).for_each(|_| again());
        // Communicators are torn down in separate threads.
        while (count("fd"), count("task")) > settled {
            assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{:?} after {settled:?}", (count("fd"), count("task")));
            std::thread::yield_now();
        }
    }

    fn parts_of_parts_outlive_their_parents() {
        each(4, unique_id(), |rank| {
            let half = split(&rank, rank.rank as c_int / 2, 0).unwrap();
            rank.destroy();
            let alone = split(&half, half.rank as c_int, 0).unwrap();
            half.destroy();
            assert_eq!((alone.rank, alone.size), (0, 1));
            alone.still_works();
            alone.destroy();
        });
    }

    fn one_thread_splits_all_its_ranks_in_a_group() {
        let ranks = all(4);
        let mut parts = vec![std::ptr::null_mut(); 4];
        group(|| {
            for (rank, part) in ranks.iter().zip(&mut parts) {
                ok(ncclCommSplit(rank.comm, c_int::from(rank.rank == 3), 0, part, std::ptr::null()));
            }
        });
        let said: Vec<_> = parts.iter().map(|&part| says(part)).collect();
        assert_eq!(said, [(0, 3, 0), (1, 3, 1), (2, 3, 2), (0, 1, 3)]);
        parts.into_iter().for_each(|part| ok(ncclCommDestroy(part)));
        ranks.into_iter().for_each(Rank::destroy);
    }

    fn several_ids_are_as_good_as_one() {
        let ids = [unique_id(), unique_id()];
        std::thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let context = gpu(rank);
                    let mut comm = std::ptr::null_mut();
                    let null = std::ptr::null();
                    ok(ncclCommInitRankScalable(&mut comm, 3, rank as c_int, 2, ids.as_ptr(), null));
                    let rank = Rank::of(comm, rank, 3, context);
                    rank.still_works();
                    rank.destroy();
                });
            }
        });
    }

    fn a_group_without_one_rank() {
        threads(4, |rank| {
            if rank.rank == 1 {
                return;
            }
            let mut new = std::ptr::null_mut();
            ok(ncclCommShrink(rank.comm, [1].as_ptr(), 1, &mut new, std::ptr::null(), 0));
            let place = if rank.rank == 0 { 0 } else { rank.rank - 1 };
            assert_eq!(says(new), (place as c_int, 3, rank.rank as c_int));
            let part = Rank::of(new, place, 3, rank.context.clone());
            part.still_works();
            part.destroy();
        });
    }

    fn those_who_leave_do_not_shrink() {
        threads(2, |rank| {
            let mut new = std::ptr::null_mut();
            let own = [rank.rank as c_int];
            let status = ncclCommShrink(rank.comm, own.as_ptr(), 1, &mut new, std::ptr::null(), 0);
            refused(status, INVALID_ARGUMENT, &["excluded"]);
            rank.still_works();
        });
    }

    fn new_ranks_join() {
        let old = unique_id();
        let by: std::sync::Mutex<Option<UniqueId>> = std::sync::Mutex::new(None);
        let made = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for number in 0..4usize {
                let (by, made) = (&by, &made);
                scope.spawn(move || {
                    let mut new = std::ptr::null_mut();
                    if number >= 2 {
                        let context = gpu(number);
                        made.wait();
                        let id = by.lock().unwrap().unwrap();
                        let null = std::ptr::null_mut();
                        ok(ncclCommGrow(null, 4, &id, number as c_int, &mut new, std::ptr::null()));
                        let grown = Rank::of(new, number, 4, context);
                        grown.still_works();
                        return grown.destroy();
                    }
                    let rank = Rank::join(old, number, 2);
                    let mut id = UniqueId { internal: [0; 128] };
                    if number == 0 {
                        ok(ncclCommGetUniqueId(rank.comm, &mut id));
                        *by.lock().unwrap() = Some(id);
                    }
                    made.wait();
                    let given = if number == 0 { &raw const id } else { std::ptr::null() };
                    ok(ncclCommGrow(rank.comm, 4, given, -1, &mut new, std::ptr::null()));
                    let grown = Rank::of(new, number, 4, rank.context.clone());
                    assert_eq!(says(new), (number as c_int, 4, number as c_int));
                    grown.still_works();
                    rank.still_works();
                    grown.destroy();
                    rank.destroy();
                });
            }
        });
    }

    fn wrong_worlds_are_refused() {
        let id = unique_id();
        let mut comm = std::ptr::null_mut();
        for (rank, size) in [(0, 0), (2, 2), (-1, 2), (0, -1)] {
            refused(ncclCommInitRank(&mut comm, size, id, rank), INVALID_ARGUMENT, &["ncclCommInitRank"]);
            assert!(comm.is_null());
        }
        let nothing = UniqueId { internal: [0; 128] };
        refused(ncclCommInitRank(&mut comm, 2, nothing, 0), INVALID_ARGUMENT, &["ncclGetUniqueId"]);
        refused(ncclCommInitAll(&mut comm, 1, [99].as_ptr()), INVALID_ARGUMENT, &["GPU 99 is not there"]);
        refused(ncclCommInitAll(&mut comm, 0, std::ptr::null()), INVALID_ARGUMENT, &["ndev is 0"]);
        let mut two = [std::ptr::null_mut(); 2];
        refused(ncclCommInitAll(two.as_mut_ptr(), 2, [0, 0].as_ptr()), INVALID_USAGE, &["GPU 0 twice"]);
    }
}
