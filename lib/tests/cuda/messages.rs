//! Calls that are made of messages, in groups and by themselves: gather, scatter, calls with a length per rank, and
//! messages of a rank to itself. At odd addresses, of odd lengths and of none, in place and not; no byte beside an
//! output may change. And all_to_all in place, whose input moves away first.
//!
//! With `TINYNCCL_CUDA_PATH=hosted` the same cases go through the host's memory; one GPU is enough then.

use std::ops::Range;

use cudarc::driver::{CudaSlice, DevicePtr, sys};
use tinynccl::comm::{RawCall, packed};
use tinynccl::cuda::Path;
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::peers::{PATIENCE, Rank, ranks};
use crate::ranks::capture;

/// Bytes around a buffer that nothing may write.
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xa5;
/// Bytes of a message: none, around a word of 8 bytes, a pack of 16, the longest of one block and the longest in lines,
/// one and several pieces.
const LENGTHS: [usize; 16] = [0, 1, 7, 8, 9, 15, 16, 17, 4095, 4096, 4097, 32_767, 32_768, 32_769, 100_003, LONG];
const LONG: usize = 5_000_011;
/// Bytes by which buffers are off the alignment that CUDA gives them.
const SHIFTS: [usize; 3] = [0, 1, 4];

/// Bytes that rank `from` sends in message `number`.
fn bytes(from: usize, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(7) ^ i >> 8).wrapping_add(from * 31 + number * 101) as u8).collect()
}

/// One rank's part of a test: its calls, given the addresses of input and output.
struct Part {
    input: Vec<u8>,
    /// Contents of the output before the calls; an input in place is in it.
    output: Vec<u8>,
    expected: Vec<u8>,
    calls: Box<dyn Fn(u64, u64) -> Vec<RawCall>>,
}

/// Memory of the device, with guards.
fn put(rank: &Rank, shift: usize, inside: &[u8]) -> (CudaSlice<u8>, u64) {
    let memory = rank.stream.clone_htod(&guarded(shift, inside)).unwrap();
    let at = memory.device_ptr(&rank.stream).0 + (GUARD + shift) as u64;
    (memory, at)
}

fn guarded(shift: usize, inside: &[u8]) -> Vec<u8> {
    [&vec![UNTOUCHED; GUARD + shift], inside, &[UNTOUCHED; GUARD]].concat()
}

/// Makes the calls of all ranks, in a group or one by one, and checks every byte.
fn check(ranks: &[Rank], what: &str, parts: &[Part], in_group: bool) {
    for shift in SHIFTS {
        let memory: Vec<_> = ranks
            .iter()
            .zip(parts)
            .map(|(rank, part)| (put(rank, shift, &part.input), put(rank, shift, &part.output)))
            .collect();
        for ((rank, part), ((_, input), (_, output))) in ranks.iter().zip(parts).zip(&memory) {
            let calls = (part.calls)(*input, *output);
            // SAFETY: the buffers are as long as the calls need and live until the streams are waited for.
            let enqueued = unsafe {
                match in_group {
                    true => rank.comm.enqueue_group(&rank.stream, &calls),
                    false => calls.iter().try_for_each(|call| rank.comm.enqueue(&rank.stream, call)),
                }
            };
            enqueued.unwrap_or_else(|e| panic!("{what}, shift {shift}: {e}"));
        }
        for ((rank, part), ((input, _), (output, _))) in ranks.iter().zip(parts).zip(&memory) {
            let what = || format!("{what}, shift {shift}, in a group {in_group}, rank {}", rank.comm.rank());
            rank.comm.synchronize().unwrap_or_else(|e| panic!("{}: {e}", what()));
            for (memory, inside) in [(output, &part.expected), (input, &part.input)] {
                let (got, expected) = (rank.stream.clone_dtoh(memory).unwrap(), guarded(shift, inside));
                let wrong = (0..expected.len()).find(|&i| got[i] != expected[i]);
                assert_eq!(wrong.map(|i| (i, got[i], expected[i])), None, "{}: byte, got, expected", what());
            }
        }
    }
}

/// `check` in a group, and by itself.
fn check_both_ways(ranks: &[Rank], what: &str, parts: &[Part]) {
    check(ranks, what, parts, true);
    check(ranks, what, parts, false);
}

fn rooted(collective: Collective, root: usize, count: usize, input: u64, output: u64) -> Vec<RawCall> {
    vec![RawCall::on_device(Call::new(collective, DType::U8, ReduceOp::Sum, root, count), input, output)]
}

#[test]
fn gather() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    for (count, root, in_place) in cases(n) {
        let all: Vec<u8> = (0..n).flat_map(|rank| bytes(rank, 0, count)).collect();
        let part = |rank: usize| {
            let at_root = rank == root;
            let mut output = vec![UNTOUCHED; if at_root { n * count } else { 0 }];
            let place = rank * count;
            if at_root && in_place {
                output[place..][..count].copy_from_slice(&all[place..][..count]);
            }
            let expected = if at_root { all.clone() } else { Vec::new() };
            let calls = Box::new(move |input, output: u64| {
                let input = if at_root && in_place { output + place as u64 } else { input };
                rooted(Collective::Gather, root, count, input, output)
            });
            Part { input: bytes(rank, 0, count), output, expected, calls }
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        check_both_ways(&ranks, &format!("gather of {count} bytes, root {root}, in place {in_place}"), &parts);
    }
}

#[test]
fn scatter() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    for (count, root, in_place) in cases(n) {
        let all = bytes(root, 0, n * count);
        let part = |rank: usize| {
            let (at_root, place) = (rank == root, rank * count);
            let expected = all[place..][..count].to_vec();
            let input = if at_root { all.clone() } else { Vec::new() };
            // In place the root's output is in the input, which stays as it is.
            let (output, expected) = match at_root && in_place {
                true => (Vec::new(), Vec::new()),
                false => (vec![UNTOUCHED; count], expected),
            };
            let calls = Box::new(move |input: u64, output| {
                let output = if at_root && in_place { input + place as u64 } else { output };
                rooted(Collective::Scatter, root, count, input, output)
            });
            Part { input, output, expected, calls }
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        check_both_ways(&ranks, &format!("scatter of {count} bytes, root {root}, in place {in_place}"), &parts);
    }
}

/// Counts, roots, and whether it is in place.
fn cases(ranks: usize) -> Vec<(usize, usize, bool)> {
    let roots = move |count: usize| (0..ranks).map(move |root| (count, root));
    let all = LENGTHS.into_iter().flat_map(roots);
    all.flat_map(|(count, root)| [(count, root, false), (count, root, true)]).collect()
}

/// Each rank sends to the next one, and twice to itself.
#[test]
fn messages_to_oneself_beside_others() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    const SECOND: usize = 33;
    for (sent, own) in [(0, 1000), (1000, 0), (17, 100_003), (LONG, 3), (3, LONG), (LONG, LONG), (0, 0)] {
        let part = |rank: usize| {
            let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
            let ours = [bytes(rank, 1, own), bytes(rank, 2, SECOND)].concat();
            let input = [bytes(rank, 0, sent), ours.clone()].concat();
            let expected = [bytes(before, 0, sent), ours].concat();
            let calls = Box::new(move |input: u64, output: u64| {
                let send =
                    |to, at: usize, len| RawCall::on_device(Call::send(DType::U8, to, len), input + at as u64, 0);
                let recv =
                    |of, at: usize, len| RawCall::on_device(Call::recv(DType::U8, of, len), 0, output + at as u64);
                vec![
                    send(rank, sent, own),
                    send(next, 0, sent),
                    recv(rank, sent, own),
                    send(rank, sent + own, SECOND),
                    recv(before, 0, sent),
                    recv(rank, sent + own, SECOND),
                ]
            });
            Part { input, output: vec![UNTOUCHED; expected.len()], expected, calls }
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        check(&ranks, &format!("{sent} bytes to the next rank and {own} to itself"), &parts, true);
    }
}

/// More messages than there are slots, short and long ones alternately, before their receiver begins; then in both
/// directions at once, each in its own order.
#[test]
fn short_and_long_messages_in_a_row() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let there = [8, 4096, 1, 4097, 0, 32_768, 9, 4095, 100_003, 7, 32_769, 300_001, 4096, 20_011].repeat(3);
    let here: Vec<usize> = there.iter().rev().copied().collect();
    for back in [false, true] {
        // Sent by rank 0 and by rank 1.
        let of = |rank: usize| match rank {
            0 => there.clone(),
            1 if back => here.clone(),
            _ => Vec::new(),
        };
        let all = |rank: usize| -> Vec<u8> {
            of(rank).iter().enumerate().flat_map(|(number, &len)| bytes(rank, number, len)).collect()
        };
        let part = |rank: usize| {
            let other = if rank < 2 { 1 - rank } else { rank };
            let (sent, received) = (packed(&of(rank)), packed(&of(other)));
            let expected = all(other);
            let calls = Box::new(move |input: u64, output: u64| {
                let send = |m: &Range<usize>| {
                    RawCall::on_device(Call::send(DType::U8, other, m.len()), input + m.start as u64, 0)
                };
                let recv = |m: &Range<usize>| {
                    RawCall::on_device(Call::recv(DType::U8, other, m.len()), 0, output + m.start as u64)
                };
                sent.iter().map(send).chain(received.iter().map(recv)).collect()
            });
            Part { input: all(rank), output: vec![UNTOUCHED; expected.len()], expected, calls }
        };
        let parts: Vec<Part> = (0..ranks.len()).map(part).collect();
        check(&ranks, &format!("messages in a row, back {back}"), &parts, true);
    }
}

/// In lines or in slots at either end, and beside a message of a third length in the other direction.
#[test]
fn a_message_of_another_length_is_named_and_not_written() {
    const LENGTH: usize = 1 << 16;
    let in_lines =
        [(8, 16), (16, 8), (4096, 9), (8, 5000), (5000, 8), (5000, 6000), (20_000, 30_000), (30_000, 20_000)];
    let in_slots = [(8, 40_000), (40_000, 8), (40_000, 32_000), (32_000, 40_000), (40_000, 50_000), (60_000, 40_000)];
    for (sent, awaited) in in_lines.into_iter().chain(in_slots) {
        // A failed communicator stays so.
        let Some(ranks) = ranks(PATIENCE) else { return };
        if ranks[0].comm.path() != Path::Peer {
            return;
        }
        let memory = || put(&ranks[1], 0, &[UNTOUCHED; LENGTH]);
        let ((_input, from), (output, to)) = (memory(), memory());
        let (_other, at) = put(&ranks[0], 0, &bytes(0, 0, 2 * LENGTH));
        let (zero, one) = (&ranks[0], &ranks[1]);
        // SAFETY: within the memory, which lives until both have been waited for.
        unsafe {
            let (to_one, from_one) = (Some((at, sent, 1)), Some((at + LENGTH as u64, 33, 1)));
            zero.comm.enqueue_send_recv(&zero.stream, to_one, from_one).unwrap();
            one.comm.enqueue_send_recv(&one.stream, Some((from, 33, 0)), Some((to, awaited, 0))).unwrap();
        }
        zero.comm.synchronize().unwrap();
        let error = one.comm.synchronize().unwrap_err().to_string();
        let named = [
            format!("rank 1 and rank 0 disagree: rank 1 is in send/recv of {awaited} u8"),
            format!("rank 0 in send/recv of {sent} u8"),
        ];
        assert!(named.iter().all(|words| error.contains(words)), "{error}");
        let got = one.stream.clone_dtoh(&output).unwrap();
        assert!(got.iter().all(|&byte| byte == UNTOUCHED), "{sent} bytes were written for {awaited}");
    }
}

/// all_to_all_v and all_gather_v, where some ranks send nothing.
#[test]
fn lengths_of_each_rank() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    // 0, 1001, 2002 and 3003 elements of 4 bytes, of which own segments are some.
    for round in 0..4 {
        let count = |from: usize, to: usize| (from * 3 + to * 5 + round) % 4 * 1001;
        let of = |lengths: &dyn Fn(usize) -> usize| packed(&(0..n).map(lengths).collect::<Vec<_>>());
        let part = |rank: usize| {
            let sent: Vec<Range<usize>> = of(&|to| count(rank, to));
            let received = of(&|from| count(from, rank));
            let message = |from, to| bytes(from, to, 4 * count(from, to));
            let gathered = of(&|from| count(from, 0));
            let first = 4 * received.last().unwrap().end as u64;
            // The rank's part of all_gather_v is its message to rank 0.
            let input: Vec<u8> = (0..n).flat_map(|to| message(rank, to)).collect();
            let expected: Vec<u8> =
                (0..n).map(|from| message(from, rank)).chain((0..n).map(|from| message(from, 0))).flatten().collect();
            let calls = Box::new(move |input: u64, output: u64| {
                let (input, output, dtype) = (input as *const u8, output as *mut u8, DType::F32);
                let own = gathered[rank].len();
                vec![
                    RawCall::all_to_all_v(dtype, input, sent.clone(), output, received.clone()),
                    RawCall::all_gather_v(dtype, own, input, output.wrapping_add(first as usize), gathered.clone()),
                ]
            });
            Part { input, output: vec![UNTOUCHED; expected.len()], expected, calls }
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        check(&ranks, &format!("lengths of round {round}"), &parts, true);
    }
}

fn all_to_all(count: usize, at: u64) -> RawCall {
    RawCall::on_device(Call::new(Collective::AllToAll, DType::U8, ReduceOp::Sum, 0, count), at, at)
}

#[test]
fn all_to_all_in_place() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let n = ranks.len();
    for count in LENGTHS {
        let part = |rank: usize| Part {
            input: Vec::new(),
            output: (0..n).flat_map(|to| bytes(rank, to, count)).collect(),
            expected: (0..n).flat_map(|from| bytes(from, rank, count)).collect(),
            calls: Box::new(move |_, at| vec![all_to_all(count, at)]),
        };
        let parts: Vec<Part> = (0..n).map(part).collect();
        for in_group in [false, true] {
            check(&ranks, &format!("all_to_all of {count} bytes in place"), &parts, in_group);
        }
    }
}

#[test]
fn all_to_all_of_buffers_that_overlap_partly_is_refused() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    let Rank { comm, stream } = &ranks[0];
    let (n, count) = (ranks.len() as u64, 1000);
    let (_memory, at) = put(&ranks[0], 0, &vec![0; 2 * count * ranks.len()]);
    let call = Call::new(Collective::AllToAll, DType::U8, ReduceOp::Sum, 0, count);
    for distance in [1, count as u64, n * count as u64 - 1] {
        // SAFETY: both are within the memory.
        let error = unsafe { comm.enqueue(stream, &RawCall::on_device(call, at, at + distance)) }.unwrap_err();
        assert!(error.to_string().contains("overlap; expected separate ones, or the same"), "{error}");
    }
    comm.check().unwrap();
}

/// Each replay of an all_to_all in place exchanges the segments once more; a gather's copy is a part of its kernel.
#[test]
fn in_place_and_beside_messages_in_a_graph() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    if ranks[0].comm.path() != Path::Peer {
        // Through the hosts' memory capture is refused (hosted.rs).
        return;
    }
    let n = ranks.len();
    for count in [5, 300_001] {
        let inputs = |rank: usize| (0..n).flat_map(|to| bytes(rank, to, count)).collect::<Vec<u8>>();
        let turned = |rank: usize| (0..n).flat_map(|from| bytes(from, rank, count)).collect::<Vec<u8>>();
        let memory: Vec<_> = ranks
            .iter()
            .enumerate()
            .map(|(rank, r)| (put(r, 1, &inputs(rank)), put(r, 1, &vec![UNTOUCHED; n * count])))
            .collect();
        let group = |rank: usize| {
            let ((_, at), (_, gathered)) = &memory[rank];
            let mut calls = vec![all_to_all(count, *at)];
            calls.extend(rooted(Collective::Gather, 0, count, *at, *gathered));
            calls
        };
        let calls = |rank: usize| {
            let Rank { comm, stream } = &ranks[rank];
            // SAFETY: the buffers live until the streams are waited for.
            unsafe { comm.enqueue_group(stream, &group(rank)) }.unwrap();
        };
        // Code is loaded before any rank waits.
        (0..n).for_each(|rank| ranks[rank].comm.prepare(&group(rank)).unwrap());
        (0..n).for_each(calls);
        ranks.iter().for_each(|r| r.comm.synchronize().unwrap());
        let graphs: Vec<_> = ranks.iter().enumerate().map(|(rank, r)| capture(&r.stream, || calls(rank))).collect();
        // A graph that allocates memory gets it at its first launch otherwise, which may wait for the other rank's
        // kernel.
        for (r, graph) in ranks.iter().zip(&graphs) {
            // SAFETY: as below.
            unsafe { sys::cuGraphUpload(*graph, r.stream.cu_stream()) }.result().unwrap();
        }
        for round in 0..3 {
            for (r, graph) in ranks.iter().zip(&graphs) {
                // SAFETY: the graph is of this stream's device; its buffers are alive.
                unsafe { sys::cuGraphLaunch(*graph, r.stream.cu_stream()) }.result().unwrap();
            }
            ranks.iter().for_each(|r| r.comm.synchronize().unwrap());
            let data = |rank: usize| if round % 2 == 0 { inputs(rank) } else { turned(rank) };
            for (rank, (r, ((data_of, _), (gathered_of, _)))) in ranks.iter().zip(&memory).enumerate() {
                let got = r.stream.clone_dtoh(data_of).unwrap();
                assert!(got == guarded(1, &data(rank)), "{count} bytes, round {round}, rank {rank}: all_to_all");
                let firsts = (0..n).flat_map(|from| data(from)[..count].to_vec()).collect::<Vec<u8>>();
                let expected = if rank == 0 { firsts } else { vec![UNTOUCHED; n * count] };
                let got = r.stream.clone_dtoh(gathered_of).unwrap();
                assert!(got == guarded(1, &expected), "{count} bytes, round {round}, rank {rank}: gather");
            }
        }
    }
}
