//! Whatever order calls come in, messages come out in the order they went in, whole, each once.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::harness::*;
use tinynccl::transport::Received;

#[derive(Debug, Clone, Copy)]
enum Op {
    Send(usize),
    Reserve(usize),
    Recv,
    Chunks,
    Peek,
    Release,
    ProgressSend,
    ProgressRecv,
    Arm,
    Check,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len = || prop_oneof![0..30usize, 0..5000usize, Just(OPTIONS.max_message)];
    let op = prop_oneof![
        4 => len().prop_map(Op::Send),
        2 => len().prop_map(Op::Reserve),
        3 => Just(Op::Recv),
        2 => Just(Op::Chunks),
        2 => Just(Op::Peek),
        2 => Just(Op::Release),
        1 => Just(Op::ProgressSend),
        1 => Just(Op::ProgressRecv),
        1 => Just(Op::Arm),
        1 => Just(Op::Check),
    ];
    proptest::collection::vec(op, 1..120)
}

pub(crate) fn interleavings(backend: Backend) {
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    TestRunner::new(config).run(&ops(), |ops| interleave(backend, &ops)).unwrap();
}

fn interleave(backend: Backend, ops: &[Op]) -> Result<(), TestCaseError> {
    let [mut a, mut b] = ends(backend);
    let (send, recv) = (&mut a.link.send, &mut b.link.recv);
    // Lengths of the messages sent so far; a send or receive that must be repeated; how many were received.
    let mut lens: Vec<usize> = Vec::new();
    let (mut sending, mut receiving) = (None, None);
    let mut chunks: Option<Vec<u8>> = None;
    let (mut received, mut peeked) = (0, false);
    // Afterwards, everything that was sent is received.
    let epilogue = std::iter::repeat(
        [Op::Send(0), Op::ProgressSend, Op::ProgressRecv, Op::Release, Op::Recv, Op::Chunks].into_iter(),
    )
    .flatten();
    let mut spare = 2_000_000;
    for (i, op) in ops.iter().copied().chain(epilogue).enumerate() {
        let over = i >= ops.len();
        if over && received == lens.len() && sending.is_none() {
            break;
        }
        spare -= 1;
        prop_assert!(spare > 0, "{received} of {} messages came", lens.len());
        match op {
            Op::Send(len) if sending.is_some() || !over => {
                let len = sending.unwrap_or(len);
                let seq = lens.len() as u32;
                if send.send_from(&header(seq, len), &payload(seq, len)).unwrap() {
                    sending = None;
                    lens.push(len);
                } else {
                    sending = Some(len);
                }
            }
            Op::Reserve(len) if sending.is_none() => {
                let seq = lens.len() as u32;
                if let Some(memory) = send.reserve().unwrap() {
                    memory[..len].copy_from_slice(&payload(seq, len));
                    send.commit(&header(seq, len)).unwrap();
                    lens.push(len);
                }
            }
            Op::Chunks if !peeked && receiving.is_none() && (received < lens.len() || chunks.is_some()) => {
                let seq = received as u32;
                let got = chunks.get_or_insert_default();
                let outcome = recv.recv_chunks(&header(seq, lens[received]), &mut |at, chunk| {
                    assert_eq!(at, got.len());
                    got.extend_from_slice(chunk);
                });
                match outcome.unwrap() {
                    Received::Done => {
                        prop_assert!(chunks.take() == Some(payload(seq, lens[received])), "payload of {seq}");
                        received += 1;
                    }
                    Received::Pending => {}
                    Received::Mismatch(h) => prop_assert!(false, "expected {}, got {h}", header(seq, lens[received])),
                }
            }
            Op::Recv if !peeked && chunks.is_none() && (received < lens.len() || receiving.is_some()) => {
                let seq = received as u32;
                let len = lens[received];
                let dst = receiving.get_or_insert_with(|| vec![0; len]);
                match recv.recv_into(&header(seq, len), dst).unwrap() {
                    Received::Done => {
                        prop_assert!(*dst == payload(seq, len), "payload of {seq}");
                        receiving = None;
                        received += 1;
                    }
                    Received::Pending => {}
                    Received::Mismatch(h) => prop_assert!(false, "expected {}, got {h}", header(seq, len)),
                }
            }
            Op::Peek if receiving.is_none() && chunks.is_none() => {
                if let Some((h, data)) = recv.peek().unwrap() {
                    let seq = received as u32;
                    prop_assert!(received < lens.len() && h.agrees_with(&header(seq, lens[received])), "{h}");
                    prop_assert!(data == payload(seq, lens[received]), "payload of {seq}");
                    peeked = true;
                }
            }
            Op::Release if peeked => {
                recv.release().unwrap();
                peeked = false;
                received += 1;
            }
            Op::ProgressSend => drop(send.progress().unwrap()),
            Op::ProgressRecv => drop(recv.progress().unwrap()),
            Op::Arm => {
                send.arm().unwrap();
                recv.arm().unwrap();
                send.disarm();
                recv.disarm();
            }
            Op::Check => {
                send.check_peer().unwrap();
                recv.check_peer().unwrap();
            }
            _ => {}
        }
    }
    Ok(())
}
