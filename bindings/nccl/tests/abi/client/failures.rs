//! Failures: aborts while a call waits, ranks that die, ranks that disagree. Every one ends soon, and is named.

use std::ffi::{c_int, c_void};
use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nccl::abi::UniqueId;
use rustix::process::{Pid, Signal, kill_process};

use super::apart::{rank as process, role, wait};
use super::functions::*;
use super::rank::{IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR, Rank, SUCCESS, Shared, async_error, each, ok, unique_id};

fn hex(id: &UniqueId) -> String {
    id.internal.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn from_hex(text: &str) -> UniqueId {
    let mut internal = [0; 128];
    for (i, byte) in internal.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..][..2], 16).unwrap();
    }
    UniqueId { internal }
}

/// Polls until a communicator has failed: status and text.
fn failure(comm: Comm) -> (c_int, String) {
    loop {
        let mut status = -1;
        ok(ncclCommGetAsyncError(comm, &mut status));
        if status != SUCCESS && status != IN_PROGRESS {
            return (status, last_error(comm));
        }
        std::thread::yield_now();
    }
}

/// Makes calls until one fails, for a rank that waits in no call: status and text. They are the calls that the other
/// ranks make: a failure may be slower than the data that was sent before it.
fn failure_of_a_call(rank: &Rank) -> (c_int, String) {
    let memory = rank.memory(&[0; 4000]);
    while ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()) == SUCCESS {
        rank.stream.synchronize().unwrap();
    }
    failure(rank.comm)
}

/// Ranks as processes: each prints lines that begin with `@`.
pub(super) struct Processes {
    pub(super) children: Vec<Option<Child>>,
    lines: Vec<Receiver<String>>,
}

impl Processes {
    pub(super) fn start(name: &str, size: usize, settings: &[(&str, &str)]) -> Processes {
        let id = hex(&unique_id());
        let mut children: Vec<Child> = (0..size).map(|rank| process(name, rank, size, &id, settings)).collect();
        let lines = children.iter_mut().map(|child| listen(child.stdout.take().unwrap())).collect();
        Processes { children: children.into_iter().map(Some).collect(), lines }
    }

    pub(super) fn hear(&self, rank: usize) -> String {
        let heard = self.lines[rank].recv_timeout(Duration::from_secs(200));
        heard.unwrap_or_else(|e| panic!("rank {rank} says nothing: {e}"))
    }

    /// A rank's process has come to its end in good order.
    fn done(&mut self, rank: usize) {
        let output = wait(self.children[rank].take().unwrap());
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn listen(output: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (to, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(line) = line.strip_prefix('@') {
                let _ = to.send(line.to_owned());
            }
        }
    });
    lines
}

pub(super) fn say(text: &str) {
    println!("\n@{text}");
}

/// A rank that makes calls until one fails, then prints the error.
fn until_it_fails(rank: usize, size: usize, id: &str) {
    let rank = Rank::join(from_hex(id), rank, size);
    let memory = rank.memory(&[0; 4000]);
    let mut rounds = 0;
    let status = loop {
        let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream());
        if status != SUCCESS {
            break status;
        }
        rank.stream.synchronize().unwrap();
        if rank.async_error() != SUCCESS {
            break rank.async_error();
        }
        rounds += 1;
        if rounds == 5 {
            say("runs");
        }
    };
    assert_ne!(status, SUCCESS);
    let (status, text) = failure(rank.comm);
    say(&format!("{}: {text}", error_string(status)));
    // As PyTorch's watchdog does.
    ok(ncclCommAbort(rank.comm));
    say("aborted");
}

apart! {
    fn processes_add_up() {
        if let Some((rank, size, id)) = role() {
            let rank = Rank::join(from_hex(&id), rank, size);
            (0..10).for_each(|_| rank.still_works());
            rank.destroy();
            return say("done");
        }
        for settings in [&[][..], &[("TINYNCCL_TRANSPORT", "tcp")]] {
            let name = concat!(module_path!(), "::processes_add_up");
            let mut ranks = Processes::start(name, 3, settings);
            for rank in 0..3 {
                assert_eq!(ranks.hear(rank), "done", "{settings:?}");
                ranks.done(rank);
            }
        }
    }

    // Rank 0's process has the store, which waits 3 s for the others when rank 0 is destroyed.
    fn parts_go_on_when_the_rank_has_left_where_all_met() {
        const NAME: &str = concat!(module_path!(), "::parts_go_on_when_the_rank_has_left_where_all_met");
        if let Some((number, size, id)) = role() {
            let id = if number == 0 { unique_id() } else { from_hex(&id) };
            if number == 0 {
                say(&hex(&id));
            }
            let rank = Rank::join(id, number, size);
            let mut half = std::ptr::null_mut();
            ok(ncclCommSplit(rank.comm, c_int::from(number > 0), 0, &mut half, std::ptr::null()));
            rank.destroy();
            if number == 0 {
                ok(ncclCommDestroy(half));
                say("left");
                loop {
                    std::thread::park();
                }
            }
            let rest = Rank::of(half, number - 1, size - 1, super::rank::gpu(number));
            let begin = Instant::now();
            let mut over = false;
            while !over {
                let flag = rest.memory(&[u8::from(begin.elapsed() > Duration::from_secs(6))]);
                ok(ncclBcast(flag.at_mut(0), 1, 1, 0, rest.comm, rest.stream()));
                rest.wait();
                over = flag.read() == [1];
                let mut again = std::ptr::null_mut();
                ok(ncclCommSplit(rest.comm, 0, 0, &mut again, std::ptr::null()));
                let again = Rank::of(again, rest.rank, rest.size, rest.context.clone());
                again.still_works();
                again.destroy();
            }
            rest.destroy();
            return say("done");
        }
        let mut ranks = Processes { children: Vec::new(), lines: Vec::new() };
        let mut id = String::new();
        for rank in 0..3 {
            let mut child = process(NAME, rank, 3, &id, &[]);
            ranks.lines.push(listen(child.stdout.take().unwrap()));
            ranks.children.push(Some(child));
            if rank == 0 {
                id = ranks.hear(0);
            }
        }
        assert_eq!(ranks.hear(0), "left");
        for rank in [1, 2] {
            assert_eq!(ranks.hear(rank), "done", "rank {rank}");
            ranks.done(rank);
        }
    }

    fn survivors_of_a_killed_rank_are_told_at_once() with [("TINYNCCL_TIMEOUT", "100")] {
        if let Some((rank, size, id)) = role() {
            return until_it_fails(rank, size, &id);
        }
        let mut ranks = Processes::start(concat!(module_path!(), "::survivors_of_a_killed_rank_are_told_at_once"), 3, &[]);
        (0..3).for_each(|rank| assert_eq!(ranks.hear(rank), "runs"));
        kill_process(Pid::from_child(ranks.children[1].as_ref().unwrap()), Signal::KILL).unwrap();
        for rank in [0, 2] {
            // No timeout shows that the rank was notified: the deadline is far.
            let failure = ranks.hear(rank);
            assert!(failure.starts_with(&error_string(REMOTE_ERROR)) && failure.contains("lost rank 1"), "rank {rank}: {failure}");
            assert_eq!(ranks.hear(rank), "aborted", "rank {rank}");
            ranks.done(rank);
        }
    }

    // Work on the program's stream behind a call that a dead rank leaves unfinished must not run before the program
    // knows. torchft aborts by its own time-out, and PyTorch would end the process on an earlier error.
    fn calls_of_a_non_blocking_communicator_wait_for_a_dead_rank_until_the_abort() {
        const NAME: &str = concat!(
            module_path!(),
            "::calls_of_a_non_blocking_communicator_wait_for_a_dead_rank_until_the_abort"
        );
        if let Some((number, size, id)) = role() {
            let rank = Rank::join_in_background(from_hex(&id), number, size);
            rank.still_works();
            say("runs");
            if number == 1 {
                loop {
                    std::thread::park();
                }
            }
            let memory = rank.memory(&[0; 4000]);
            let call = || ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream());
            ok(call());
            say("waits");
            match std::env::var("NCCL_DEBUG_FILE") {
                // Nothing is reported, and the log has it.
                Ok(log) => {
                    while !std::fs::read_to_string(&log).unwrap_or_default().contains("lost rank 1") {
                        assert_eq!(rank.async_error(), SUCCESS);
                        std::thread::yield_now();
                    }
                }
                Err(_) => assert_eq!(failure(rank.comm).0, REMOTE_ERROR),
            }
            ok(call());
            assert!(rank.is_busy(), "the call has ended, and nothing was written");
            ok(ncclCommAbort(rank.comm));
            rank.stream.synchronize().unwrap();
            return say("done");
        }
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log").to_str().unwrap().to_owned();
        let quiet =
            [("TORCH_NCCL_NONBLOCKING_TIMEOUT", "300"), ("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", log.as_str())];
        for settings in [&[][..], &quiet] {
            let mut ranks = Processes::start(NAME, 2, settings);
            (0..2).for_each(|rank| assert_eq!(ranks.hear(rank), "runs"));
            assert_eq!(ranks.hear(0), "waits");
            kill_process(Pid::from_child(ranks.children[1].as_ref().unwrap()), Signal::KILL).unwrap();
            assert_eq!(ranks.hear(0), "done", "{settings:?}");
            ranks.done(0);
        }
    }

    // The survivors of a killed rank go on without it.
    fn the_rest_shrinks_and_goes_on() {
        const NAME: &str = concat!(module_path!(), "::the_rest_shrinks_and_goes_on");
        if let Some((number, size, id)) = role() {
            let rank = Rank::join(from_hex(&id), number, size);
            rank.still_works();
            say("runs");
            // Ranks 0 and 2 wait for the dead one.
            let memory = rank.memory(&[0; 4000]);
            if number == 1 {
                loop {
                    std::thread::park();
                }
            }
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream());
            if status == SUCCESS {
                let _ = failure(rank.comm);
            }
            let mut new = std::ptr::null_mut();
            ok(ncclCommShrink(rank.comm, [1].as_ptr(), 1, &mut new, std::ptr::null(), 1));
            ok(ncclCommAbort(rank.comm));
            let rest = Rank::of(new, number / 2, 2, rank.context.clone());
            rest.still_works();
            rest.destroy();
            return say("done");
        }
        let mut ranks = Processes::start(NAME, 3, &[]);
        (0..3).for_each(|rank| assert_eq!(ranks.hear(rank), "runs"));
        kill_process(Pid::from_child(ranks.children[1].as_ref().unwrap()), Signal::KILL).unwrap();
        for rank in [0, 2] {
            assert_eq!(ranks.hear(rank), "done", "rank {rank}");
            ranks.done(rank);
        }
    }

    fn an_abort_from_another_thread_ends_a_wait() with [("TINYNCCL_TIMEOUT", "1000")] {
        // Rank 1 does not make the call before it is aborted.
        let aborted = &std::sync::Barrier::new(2);
        each(2, unique_id(), |rank| {
            if rank.rank == 1 {
                aborted.wait();
                let (status, text) = failure_of_a_call(&rank);
                assert!(status == REMOTE_ERROR, "{status}: {text}");
                return ok(ncclCommAbort(rank.comm));
            }
            let memory = rank.memory(&[0; 4000]);
            ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()));
            let comm = Shared(rank.comm);
            std::thread::scope(|scope| {
                // The stream waits, and so does the program's thread.
                let waits = scope.spawn(|| rank.stream.synchronize().unwrap());
                scope.spawn(move || {
                    let comm = comm;
                    ok(ncclCommAbort(comm.0));
                    aborted.wait();
                });
                waits.join().unwrap();
            });
        });
    }

    fn a_revoked_communicator_takes_no_calls_but_can_be_left() {
        let worked = std::sync::Barrier::new(2);
        each(2, unique_id(), |rank| {
            rank.still_works();
            worked.wait();
            ok(ncclCommRevoke(rank.comm, 0));
            let memory = rank.memory(&[0; 4]);
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), 1, 2, 0, rank.comm, rank.stream());
            assert_eq!(status, INVALID_USAGE, "{}", last_error(rank.comm));
            ok(ncclCommDestroy(rank.comm));
        });
    }

    // NCCL hangs, or gives wrong numbers.
    fn ranks_that_disagree_are_named() {
        let texts = each(2, unique_id(), |rank| {
            let memory = rank.memory(&[0; 4000]);
            let count = if rank.rank == 0 { 900 } else { 1000 };
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), count, 2, 0, rank.comm, rank.stream());
            if status == SUCCESS {
                let (status, _) = failure(rank.comm);
                assert!(status == INVALID_USAGE || status == REMOTE_ERROR, "{status}");
            }
            rank.stream.synchronize().unwrap();
            let text = last_error(rank.comm);
            ok(ncclCommAbort(rank.comm));
            text
        });
        for text in texts {
            for words in ["disagree", "rank 0", "rank 1", "count 900", "count 1000"] {
                assert!(text.contains(words), "no {words:?}: {text}");
            }
        }
    }

    // A rank that gives no elements makes a call like any other.
    fn a_call_without_elements_is_compared() {
        let disagree = |calls: &(dyn Fn(&Rank, *mut c_void) -> c_int + Sync), counts: [&str; 2]| {
            let failed = std::sync::Barrier::new(2);
            let texts = each(2, unique_id(), |rank| {
                let memory = rank.memory(&[0; 64]);
                let mut status = calls(&rank, memory.at_mut(0));
                if status == SUCCESS {
                    // A rank that only sends has done its part of that call.
                    (status, _) = failure_of_a_call(&rank);
                }
                assert!(status == INVALID_USAGE || status == REMOTE_ERROR, "{status}: {}", last_error(rank.comm));
                failed.wait();
                let text = last_error(rank.comm);
                ok(ncclCommAbort(rank.comm));
                text
            });
            for text in texts {
                for words in ["rank 0", "rank 1"].into_iter().chain(counts) {
                    assert!(text.contains(words), "no {words:?}: {text}");
                }
            }
        };
        let count = |rank: &Rank| usize::from(rank.rank == 1);
        let (i32s, sum) = (2, 0);
        disagree(
            &|rank, at| match ncclAllReduce(at, at, count(rank), i32s, sum, rank.comm, rank.stream()) {
                SUCCESS => ncclAllReduce(at, at, 1, i32s, sum, rank.comm, rank.stream()),
                failed => failed,
            },
            ["count 0", "count 1"],
        );
        disagree(&|rank, at| ncclBcast(at, 3 * count(rank), i32s, 1, rank.comm, rank.stream()), ["count 0", "count 3"]);
        disagree(
            &|rank, at| ncclAllGather(at, at.wrapping_byte_add(16), count(rank), i32s, rank.comm, rank.stream()),
            ["count 0", "count 1"],
        );
        // In a group, where one rank's first call has no elements.
        disagree(
            &|rank, at| {
                ok(ncclGroupStart());
                let apart = at.wrapping_byte_add(32);
                ok(ncclReduceScatter(at, apart, count(rank), i32s, sum, rank.comm, rank.stream()));
                ok(ncclAllReduce(at, at, 1, i32s, sum, rank.comm, rank.stream()));
                ncclGroupEnd()
            },
            ["count 0", "count 1"],
        );
        // A message of nothing, and one of 16 bytes.
        disagree(
            &|rank, at| match rank.rank {
                0 => ncclSend(at, 0, i32s, 1, rank.comm, rank.stream()),
                _ => ncclRecv(at, 4, i32s, 0, rank.comm, rank.stream()),
            },
            ["0", "16"],
        );
    }

    // As NCCL matches them.
    fn messages_without_elements_are_matched() {
        each(2, unique_id(), |rank| {
            let memory = rank.memory(&[7; 64]);
            let peer = 1 - rank.rank as c_int;
            let null = std::ptr::null_mut();
            for grouped in [false, true] {
                if grouped {
                    ok(ncclGroupStart());
                }
                // The first message of the peer is the empty one.
                if rank.rank == 0 {
                    ok(ncclSend(null, 0, 2, peer, rank.comm, rank.stream()));
                    ok(ncclSend(memory.at(0), 4, 2, peer, rank.comm, rank.stream()));
                } else {
                    ok(ncclRecv(null, 0, 2, peer, rank.comm, rank.stream()));
                    ok(ncclRecv(memory.at_mut(16), 4, 2, peer, rank.comm, rank.stream()));
                }
                if grouped {
                    ok(ncclGroupEnd());
                }
                rank.wait();
            }
            rank.still_works();
            rank.destroy();
        });
    }

    // PyTorch passes no communicator.
    fn the_text_of_an_asynchronous_error_is_had_without_a_communicator() {
        let made = std::sync::Barrier::new(2);
        each(2, unique_id(), |rank| {
            if rank.rank == 1 {
                let memory = rank.memory(&[0; 4000]);
                ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()));
                made.wait();
                failure(rank.comm);
                let text = last_error(std::ptr::null_mut());
                assert!(text.contains("abort"), "{text:?}");
            } else {
                made.wait();
            }
            ok(ncclCommAbort(rank.comm));
        });
    }

    // A rank of PyTorch whose watchdog aborts must not spoil the others' orderly end.
    fn calls_that_were_done_before_another_rank_aborted_have_not_failed() {
        let (worked, aborted) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        for refused in [false, true] {
            each(2, unique_id(), |rank| {
                rank.still_works();
                worked.wait();
                if rank.rank == 0 {
                    ok(ncclCommAbort(rank.comm));
                    aborted.wait();
                    return;
                }
                aborted.wait();
                if refused {
                    // A later call has failed, and that is reported.
                    assert_eq!(failure_of_a_call(&rank).0, REMOTE_ERROR);
                    return ok(ncclCommAbort(rank.comm));
                }
                assert_eq!(async_error(rank.comm), SUCCESS);
                ok(ncclCommFinalize(rank.comm));
                assert_eq!(async_error(rank.comm), SUCCESS);
                ok(ncclCommDestroy(rank.comm));
            });
        }
    }

    fn a_call_that_an_abort_of_another_rank_ended_has_failed() {
        let made = std::sync::Barrier::new(2);
        each(2, unique_id(), |rank| {
            rank.still_works();
            if rank.rank == 0 {
                made.wait();
                ok(ncclCommAbort(rank.comm));
                return;
            }
            let memory = rank.memory(&[0; 4000]);
            ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()));
            made.wait();
            ok(ncclCommFinalize(rank.comm));
            assert_eq!(async_error(rank.comm), REMOTE_ERROR, "{}", last_error(rank.comm));
            ok(ncclCommDestroy(rank.comm));
        });
    }

    // PyTorch finalizes at exit, also after an error that the program has caught.
    fn a_communicator_whose_calls_failed_is_finalized_in_good_order() {
        each(2, unique_id(), |rank| {
            let memory = rank.memory(&[0; 4000]);
            let count = if rank.rank == 0 { 900 } else { 1000 };
            let status = ncclAllReduce(memory.at(0), memory.at_mut(0), count, 2, 0, rank.comm, rank.stream());
            if status == SUCCESS {
                ok(ncclCommFinalize(rank.comm));
                let (_, text) = failure(rank.comm);
                assert!(text.contains("disagree"), "{text}");
            }
            ok(ncclCommDestroy(rank.comm));
        });
    }

    fn a_rank_that_does_not_come_is_named_at_the_deadline() with [("TINYNCCL_TIMEOUT", "2")] {
        let failed = std::sync::Barrier::new(2);
        each(2, unique_id(), |rank| {
            let (_, text) = if rank.rank == 0 {
                let memory = rank.memory(&[0; 4000]);
                ok(ncclAllReduce(memory.at(0), memory.at_mut(0), 1000, 2, 0, rank.comm, rank.stream()));
                let failure = failure(rank.comm);
                failed.wait();
                failure
            } else {
                failed.wait();
                failure_of_a_call(&rank)
            };
            assert!(text.contains("not arrived: rank 1"), "{text}");
            rank.stream.synchronize().unwrap();
            ok(ncclCommAbort(rank.comm));
        });
    }

    fn a_start_without_all_ranks_ends_and_says_who_is_missing() with [("TINYNCCL_CONNECT_TIMEOUT", "2")] {
        let context = super::rank::gpu(0);
        let mut comm = std::ptr::null_mut();
        let status = ncclCommInitRank(&mut comm, 2, unique_id(), 0);
        let text = last_error(std::ptr::null_mut());
        assert!(status != SUCCESS && comm.is_null(), "{text}");
        assert!(text.contains("ncclCommInitRank") && text.contains("rank 1"), "{text}");
        drop(context);
    }
}
