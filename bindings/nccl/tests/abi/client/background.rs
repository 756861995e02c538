//! Non-blocking communicators: calls return at once, and `ncclCommGetAsyncError` says when they are done.

use std::ffi::c_int;

use nccl::abi::Config;

use super::functions::*;
use super::rank::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, Rank, SUCCESS, async_error, gpu, ok, refused, unique_id,
};

/// NCCL_CONFIG_INITIALIZER, and not blocking.
pub(super) fn config() -> Config {
    Config { version: 23_007, blocking: 0, comm_name: c"in the background".as_ptr(), ..Config::NOTHING }
}

/// Polls until a communicator is not in progress any more, as PyTorch does.
fn settled(comm: Comm) -> c_int {
    loop {
        match async_error(comm) {
            IN_PROGRESS => std::thread::yield_now(),
            status => return status,
        }
    }
}

/// A call of a communicator that may be in progress then.
#[track_caller]
pub(super) fn begun(status: c_int, comm: Comm) {
    assert!(status == SUCCESS || status == IN_PROGRESS, "{}: {}", error_string(status), last_error(comm));
    assert_eq!(settled(comm), SUCCESS, "{}", last_error(comm));
}

fn ranks(size: usize, body: impl Fn(Rank) + Sync) {
    let (id, body) = (unique_id(), &body);
    std::thread::scope(|scope| {
        for rank in 0..size {
            scope.spawn(move || {
                let (context, mut comm) = (gpu(rank), std::ptr::null_mut());
                let status = ncclCommInitRankConfig(&mut comm, size as c_int, id, rank as c_int, &config());
                assert!(!comm.is_null());
                begun(status, comm);
                body(Rank::of(comm, rank, size, context));
            });
        }
    });
}

apart! {
    fn calls_work_when_it_is_ready() {
        ranks(3, |rank| {
            rank.still_works();
            begun(ncclCommFinalize(rank.comm), rank.comm);
            rank.destroy();
        });
    }

    fn until_then_it_is_in_progress_and_takes_no_calls() {
        let id = unique_id();
        let (context, mut comm) = (gpu(0), std::ptr::null_mut());
        // The other rank has not begun.
        assert_eq!(ncclCommInitRankConfig(&mut comm, 2, id, 0, &config()), IN_PROGRESS);
        assert_eq!(async_error(comm), IN_PROGRESS);
        let first = Rank::of(comm, 0, 2, context);
        let memory = first.memory(&[0; 4]);
        let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1, 2, 0, comm, first.stream());
        refused(status, INVALID_ARGUMENT, &["in the background", "not ready", "ncclCommGetAsyncError"]);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| {
                let (context, mut comm) = (gpu(1), std::ptr::null_mut());
                begun(ncclCommInitRankConfig(&mut comm, 2, id, 1, &config()), comm);
                let second = Rank::of(comm, 1, 2, context);
                second.still_works();
                second.destroy();
            });
            assert_eq!(settled(comm), SUCCESS);
            first.still_works();
            first.destroy();
            second.join().unwrap();
        });
    }

    fn an_abort_ends_a_start_that_waits_for_ranks() {
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        assert_eq!(ncclCommInitRankConfig(&mut comm, 2, unique_id(), 0, &config()), IN_PROGRESS);
        ok(ncclCommAbort(comm));
        // The handle names nothing any more.
        let mut status = 0;
        refused(ncclCommGetAsyncError(comm, &mut status), INVALID_ARGUMENT, &["destroyed or aborted"]);
    }

    fn splits_are_made_in_the_background() {
        ranks(4, |rank| {
            let mut half = std::ptr::null_mut();
            let status = ncclCommSplit(rank.comm, rank.rank as c_int % 2, 0, &mut half, std::ptr::null());
            begun(status, half);
            assert_eq!(settled(rank.comm), SUCCESS);
            let half = Rank::of(half, rank.rank / 2, 2, rank.context.clone());
            half.still_works();
            rank.still_works();
            half.destroy();
            rank.destroy();
        });
    }

    fn in_a_group_of_one_thread() {
        let id = unique_id();
        let mut comms = [std::ptr::null_mut(); 3];
        ok(ncclGroupStart());
        for (rank, comm) in comms.iter_mut().enumerate() {
            let _gpu = gpu(rank);
            let status = ncclCommInitRankConfig(comm, 3, id, rank as c_int, &config());
            assert!(status == SUCCESS || status == IN_PROGRESS);
        }
        let ended = ncclGroupEnd();
        assert!(ended == SUCCESS || ended == IN_PROGRESS, "{ended}");
        for comm in comms {
            assert_eq!(settled(comm), SUCCESS);
        }
        for comm in comms {
            ok(ncclCommDestroy(comm));
        }
    }

    fn a_communicator_whose_group_fails_has_its_error() {
        let begin = |comm: &mut Comm| {
            ok(ncclGroupStart());
            let status = ncclCommInitRankConfig(comm, 2, unique_id(), 0, &config());
            assert!(status == SUCCESS || status == IN_PROGRESS);
        };
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        begin(&mut comm);
        assert_eq!(ncclGroupEnd(), IN_PROGRESS);
        let waits = comm;
        // A call with an error, and a group that is only simulated.
        for simulated in [false, true] {
            let mut comm = std::ptr::null_mut();
            begin(&mut comm);
            let status = if simulated {
                ok(ncclGroupSimulateEnd(std::ptr::null_mut()));
                INVALID_USAGE
            } else {
                let (at, null) = (std::ptr::null_mut(), std::ptr::null_mut());
                refused(ncclBcast(at, 1, 99, 0, null, null), INVALID_ARGUMENT, &["comm is NULL"]);
                refused(ncclGroupEnd(), INVALID_ARGUMENT, &["comm is NULL", "nothing"]);
                INVALID_ARGUMENT
            };
            assert_eq!(async_error(comm), status, "{}", last_error(comm));
            let stream = std::ptr::null_mut();
            assert_eq!(ncclBcast(std::ptr::null_mut(), 0, 2, 0, comm, stream), status, "{}", last_error(comm));
            ok(ncclCommDestroy(comm));
        }
        assert_eq!(async_error(waits), IN_PROGRESS);
        ok(ncclCommAbort(waits));
    }

    fn a_split_that_a_rank_refuses_has_failed() {
        ranks(3, |rank| {
            let mut part = std::ptr::null_mut();
            let color = if rank.rank == 1 { -7 } else { 0 };
            let status = ncclCommSplit(rank.comm, color, 0, &mut part, std::ptr::null());
            if rank.rank == 1 {
                refused(status, INVALID_ARGUMENT, &["color is -7"]);
                assert!(part.is_null());
            } else {
                assert_eq!(settled(part), INVALID_ARGUMENT);
                assert!(last_error(part).contains("rank 1 does not take part: color is -7"), "{}", last_error(part));
                ok(ncclCommDestroy(part));
            }
            assert_eq!(settled(rank.comm), SUCCESS);
            rank.still_works();
            rank.destroy();
        });
    }

    fn a_configuration_of_an_older_program_is_read_to_its_end() {
        // As NCCL 2.14 had it: up to blocking.
        let id = unique_id();
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        let mut old = config();
        (old.size, old.max_ctas, old.comm_name) = (std::mem::offset_of!(Config, cga_cluster_size), -7, std::ptr::null());
        assert_eq!(ncclCommInitRankConfig(&mut comm, 1, id, 0, &old), IN_PROGRESS);
        assert_eq!(settled(comm), SUCCESS);
        ok(ncclCommDestroy(comm));
        let mut wrong = config();
        wrong.magic = 1;
        refused(ncclCommInitRankConfig(&mut comm, 1, id, 0, &wrong), INVALID_ARGUMENT, &["NCCL_CONFIG_INITIALIZER"]);
        wrong = config();
        wrong.max_ctas = -7;
        refused(ncclCommInitRankConfig(&mut comm, 1, id, 0, &wrong), INVALID_ARGUMENT, &["maxCTAs"]);
    }
}
