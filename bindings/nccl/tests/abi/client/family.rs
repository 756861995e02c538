//! Communicators from communicators: split, shrink, grow; what they say of themselves.

use std::ffi::c_int;

use nccl::abi::UniqueId;

use super::functions::*;
use super::rank::{INVALID_ARGUMENT, Rank, all, each, gpu, group, ok, refused, threads, unique_id};

/// What a communicator says: rank, ranks, GPU.
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
    }
}
