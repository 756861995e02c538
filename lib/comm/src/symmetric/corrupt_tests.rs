//! In a call that is verified, every rank that reads a flipped bit in the shared region detects it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use super::allocation::Registry;
use super::board::Board;
use super::layout::Layout;
use super::run::run;
use super::task::Plan;
use super::turn::Outcome;
use crate::Comm;
use crate::engine::board::BoardState;
use crate::executor::tests::Alone;
use crate::executor::{Buffers, WaitPolicy};
use crate::reduce;
use crate::verify::Chosen;
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::{Error, Result, Suspect};
use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_sys::backoff::Backoff;
use tinynccl_sys::config::{Config, Tune, Verify};
use tinynccl_sys::doorbell::Doorbell;
use tinynccl_sys::threads::lock;
use tinynccl_transport::mapping::Mapping;

const SLOT: usize = 1 << 10;
const STAGE: usize = 4 << 10;

/// A broadcast of `count` words from rank 0.
fn broadcast(board: &mut Board, algorithm: Algorithm, data: &mut [u64]) -> Result<Outcome> {
    let collective = Collective::Broadcast;
    let (count, op) = (data.len(), Header::NO_OP);
    let header = Header {
        count: count as u64,
        seq: 1,
        root: 0,
        check: 77,
        collective: collective as u8,
        dtype: DType::U64 as u8,
        op,
        algorithm: algorithm as u8,
        ..Header::default()
    };
    let shape = Shape { collective, ranks: 2, root: 0, channels: 1 };
    let kernels = reduce::kernels(DType::U64, ReduceOp::Sum);
    let plan = Plan { shape, count, elem: 8, kernels, average: Default::default(), exact: None, header };
    let policy = WaitPolicy {
        turns: 1,
        backoff: Backoff { spin: Duration::ZERO, yields: Duration::ZERO },
        deadline: Duration::from_millis(100),
    };
    let buffers = Buffers { input: data.as_ptr().cast(), output: data.as_mut_ptr().cast() };
    let alone = Alone::new(Doorbell::new().unwrap());
    // SAFETY: the buffer holds `count` words and is ours.
    unsafe { run(board, &Registry::default(), &plan, header, buffers, &alone, &policy, None) }
}

/// Rank 0 broadcasts, `bit` of what it wrote at `offset` flips, rank 1 receives.
fn receive(
    algorithm: Algorithm,
    count: usize,
    checks: bool,
    flip: impl Fn(&Layout) -> Option<(usize, u32)>,
) -> Result<bool> {
    let layout = Layout::new(2, SLOT, STAGE).unwrap();
    let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
    let [mut root, mut other] = [0, 1].map(|rank| {
        let mut board = Board::new(memory.clone(), layout, rank).unwrap();
        if checks {
            board.check(Chosen::ALL);
        }
        board
    });
    let sent: Vec<u64> = (0..count as u64).map(|i| i.wrapping_mul(0x1234_5678_9abc_def1)).collect();
    assert_eq!(broadcast(&mut root, algorithm, &mut sent.clone()).unwrap(), Outcome::Done);
    if let Some((offset, bit)) = flip(&layout) {
        assert!(offset < layout.bytes());
        // SAFETY: within the mapping; no other thread has it.
        unsafe { *memory.base().as_ptr().add(offset) ^= 1 << bit };
    }
    let mut got = vec![0; count];
    broadcast(&mut other, algorithm, &mut got).map(|_| got == sent)
}

#[test]
fn a_flipped_bit_is_noticed_wherever_it_is() {
    let (line, area, stage) = (|l: &Layout| l.line(0, 1), |l: &Layout| l.area(0, 1), |l: &Layout| l.stage(0, 1));
    type Place = fn(&Layout) -> usize;
    let header: (&str, Place, usize, usize) = ("header", line, 8, 40);
    for (algorithm, count, (name, place, from, to)) in [
        (Algorithm::OneShot, 2, header),
        (Algorithm::OneShot, 2, ("inline", line, 40, 56)),
        (Algorithm::OneShot, 100, header),
        (Algorithm::OneShot, 100, ("area", area, 0, 800)),
        (Algorithm::OneShot, 100, ("sums", |l: &Layout| l.sum(0, 1), 0, 16)),
        (Algorithm::Staged, 300, header),
        (Algorithm::Staged, 300, ("stage", stage, 0, 2400)),
    ] {
        assert!(receive(algorithm, count, true, |_| None).unwrap(), "{algorithm}, {count} words, nothing flipped");
        for byte in from..to {
            let e = receive(algorithm, count, true, |l| Some((place(l) + byte, byte as u32 % 8))).unwrap_err();
            let named = |suspect: &Suspect| matches!(suspect, Suspect::Link { from: 0, to: 1, .. });
            let is_told = matches!(&e, Error::Corrupt { rank: 1, suspect, .. } if named(suspect));
            assert!(is_told, "{algorithm}, byte {byte} of the {name}: {e}");
        }
    }
}

/// Without verification the flip goes undetected.
#[test]
fn without_sums_a_flipped_bit_of_the_payload_is_taken() {
    for (algorithm, count) in [(Algorithm::OneShot, 100), (Algorithm::Staged, 300)] {
        let place = |l: &Layout| if algorithm == Algorithm::Staged { l.stage(0, 1) } else { l.area(0, 1) };
        assert!(!receive(algorithm, count, false, |l| Some((place(l) + 99, 3))).unwrap());
    }
}

/// The other rank reads our input where it is: it changes after we have published its sums, and before the other rank
/// comes.
#[test]
fn a_flipped_bit_of_a_symmetric_input_is_noticed() {
    const COUNT: usize = 10_007;
    let config = Config::default().with(|c| {
        (c.verify, c.tune) = (Verify::All, Tune::Off);
        c.timeout = Duration::from_secs(30);
    });
    for seed in 0..25usize {
        let comms = Comm::threads(2, config.clone()).unwrap();
        let (met, at) = (Barrier::new(2), AtomicUsize::new(0));
        let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
            let ranks = comms.iter().map(|comm| {
                let (met, at) = (&met, &at);
                scope.spawn(move || {
                    let mut input = comm.alloc::<u32>(COUNT)?;
                    let mut output = comm.alloc::<u32>(COUNT)?;
                    input.iter_mut().zip(0..).for_each(|(x, i)| *x = i);
                    comm.all_reduce(&input, &mut output, ReduceOp::Sum)?;
                    if comm.rank() == 0 {
                        at.store(input.as_mut_ptr().expose_provenance(), Ordering::SeqCst);
                        met.wait();
                    } else {
                        met.wait();
                        let mut engine = lock(&comm.inner.engine);
                        let BoardState::Open(board) = &mut engine.board else { panic!("no shared region") };
                        let next = board.start(0);
                        while !board.has_arrived(0, next) {
                            std::thread::yield_now();
                        }
                        // The second half is ours to reduce.
                        let word = COUNT / 2 + 64 + seed * 190;
                        let word =
                            std::ptr::with_exposed_provenance_mut::<u32>(at.load(Ordering::SeqCst)).wrapping_add(word);
                        // SAFETY: inside the other rank's buffer, which it only waits for now.
                        unsafe { word.write_volatile(word.read_volatile() ^ 1 << (seed % 32)) };
                    }
                    comm.all_reduce(&input, &mut output, ReduceOp::Sum)
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let error = outcomes[1].as_ref().unwrap_err();
        let Error::Corrupt { rank: 1, suspect, offset, bytes, .. } = error else { panic!("{error}") };
        assert!(matches!(**suspect, Suspect::Link { from: 0, to: 1, .. }), "{error}");
        let at = 4 * (COUNT / 2 + 64 + seed * 190) as u64;
        assert!((*offset..offset + bytes).contains(&at), "{error}");
        assert!(outcomes[0].is_err());
    }
}
