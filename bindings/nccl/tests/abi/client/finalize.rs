//! Finalize and destroy, in every order; handles that name nothing.

use super::functions::*;
use super::rank::{INVALID_ARGUMENT, INVALID_USAGE, Rank, all, each, ok, refused, unique_id};

apart! {
    // The ranks of a communicator are torn down together: one thread that holds several must not wait for itself.
    fn one_thread_destroys_its_ranks_in_any_order() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
            let ranks = all(3);
            for i in order {
                ok(ncclCommDestroy(ranks[i].comm));
            }
        }
    }

    fn two_communicators_are_left_in_opposite_orders() {
        let ids = [unique_id(), unique_id()];
        let pairs = std::sync::Mutex::new(Vec::new());
        for id in ids {
            let ranks = each(2, id, |rank| rank);
            pairs.lock().unwrap().push(ranks);
        }
        let mut pairs = pairs.into_inner().unwrap();
        let (second, first) = (pairs.pop().unwrap(), pairs.pop().unwrap());
        let mut second = second.into_iter();
        let mut first = first.into_iter();
        let (a, b) = ([first.next().unwrap(), second.next().unwrap()], [second.next().unwrap(), first.next().unwrap()]);
        std::thread::scope(|scope| {
            scope.spawn(move || a.into_iter().for_each(Rank::destroy));
            scope.spawn(move || b.into_iter().for_each(Rank::destroy));
        });
    }

    fn finalize_then_destroy() {
        each(2, unique_id(), |rank| {
            let memory = rank.memory(&1i32.to_le_bytes());
            ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1, 2, 0, rank.comm, rank.stream()));
            ok(ncclCommFinalize(rank.comm));
            // It has waited.
            assert_eq!(memory.read(), 2i32.to_le_bytes());
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1, 2, 0, rank.comm, rank.stream());
            refused(status, INVALID_USAGE, &["finalized"]);
            rank.destroy();
        });
    }

    fn calls_that_are_under_way_are_done_before_a_communicator_goes() {
        each(2, unique_id(), |rank| {
            let memory = rank.memory(&1i32.to_le_bytes().repeat(500_000));
            for _ in 0..4 {
                ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 500_000, 2, 0, rank.comm, rank.stream()));
            }
            ok(ncclCommDestroy(rank.comm));
            rank.stream.synchronize().unwrap();
            assert_eq!(memory.read(), 16i32.to_le_bytes().repeat(500_000));
        });
    }

    fn handles_that_name_nothing_are_refused() {
        let null = std::ptr::null_mut();
        ok(ncclCommDestroy(null));
        ok(ncclCommAbort(null));
        let mut count = 0;
        refused(ncclCommCount(null, &mut count), INVALID_ARGUMENT, &["comm is NULL"]);
        let mut bytes = [0u64; 16];
        refused(ncclCommCount(bytes.as_mut_ptr().cast(), &mut count), INVALID_ARGUMENT, &["no function of this library"]);
        for rank in all(2) {
            ok(ncclCommDestroy(rank.comm));
            refused(ncclCommDestroy(rank.comm), INVALID_ARGUMENT, &["destroyed"]);
            refused(ncclCommAbort(rank.comm), INVALID_ARGUMENT, &["destroyed"]);
            refused(ncclCommCount(rank.comm, &mut count), INVALID_ARGUMENT, &["destroyed"]);
            let memory = rank.memory(&[0; 4]);
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1, 2, 0, rank.comm, rank.stream());
            refused(status, INVALID_ARGUMENT, &["destroyed"]);
        }
    }

    fn a_hundred_communicators_one_after_the_other() {
        for _ in 0..20 {
            let ranks = all(2);
            ranks.into_iter().for_each(Rank::destroy);
        }
        // Their memory and their streams are gone, too: as many bytes are free as at the beginning.
        let context = super::rank::gpu(0);
        let (free, total) = context.mem_get_info().unwrap();
        assert!(total - free < 64 << 20, "{} MiB are taken", (total - free) >> 20);
        let threads = std::fs::read_dir("/proc/self/task").unwrap().count();
        assert!(threads < 64, "{threads} threads are left");
    }

    fn the_threads_gpu_stays_the_same() {
        let context = super::rank::gpu(3);
        let current = || {
            let mut device = -1;
            // SAFETY: writes the number.
            unsafe { cudarc::driver::sys::cuCtxGetDevice(&mut device) }.result().unwrap();
            device
        };
        let ranks = all_without_binding();
        assert_eq!(current(), 3);
        for &comm in &ranks {
            ok(ncclCommDestroy(comm));
            assert_eq!(current(), 3);
        }
        drop(context);
    }
}

fn all_without_binding() -> Vec<Comm> {
    let mut comms = vec![std::ptr::null_mut(); 2];
    ok(ncclCommInitAll(comms.as_mut_ptr(), 2, std::ptr::null()));
    comms
}
