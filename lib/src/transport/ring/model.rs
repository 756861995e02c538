//! The ring under the model checker loom: [`RingSend`] and [`RingRecv`] as they are, over a ring of one or two lines.
//!
//! loom runs each scenario in every order of its steps (or in all with a bounded number of preemptions, where that would be
//! too many), and lets every load return every value that the orderings allow. It fails a scenario when an assertion
//! does, when plain memory (payloads, headers) is read and written without an order between, and when all threads sleep,
//! which is what a lost wake-up comes to. What fences, memory and the doorbell stand for: see `transport::sync`.
//!
//! Each scenario also runs with one step of the protocol weakened, and must fail then: that shows that it would notice.
//! Run with `scripts/loom.sh`.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::memory::{Consumed, Line};
use super::words::{Sequence, State};
use super::*;
use crate::error::Error;
use crate::transport::sync::{Area, Step, Words, weaken};
use crate::transport::{Received, RecvLink, SendLink};
use crate::wire::Header;

/// Payload that needs an area.
const LONG: usize = 25;
/// Payload that fits into the line.
const SHORT: usize = 9;

/// What a mapping holds for one direction.
struct Memory {
    consumed: Consumed,
    receiver: State,
    sender: State,
    lines: Box<[Line]>,
    areas: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the areas are raw memory, used by the protocol, which is what is being checked.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak` of a slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.areas.as_ptr(), self.bytes)) });
    }
}

/// Both ends' views of one direction of a ring.
fn direction(lines: usize, depth: usize) -> [Direction; 2] {
    let layout = Layout { lines, depth, max_message: LONG, stride: 64 };
    let line = || Line {
        sequence: Sequence::default(),
        header: Words::new(),
        first: Words::new(),
        rest: Words::new(),
    };
    let bytes = depth * layout.stride;
    let memory = Arc::new(Memory {
        consumed: Consumed::default(),
        receiver: State::default(),
        sender: State::default(),
        lines: (0..lines).map(|_| line()).collect(),
        areas: NonNull::from(Box::leak(vec![0u8; bytes].into_boxed_slice())).cast(),
        bytes,
    });
    let accesses: Arc<[Area]> = (0..depth).map(|_| Area::new()).collect();
    std::array::from_fn(|_| Direction {
        consumed: NonNull::from(&memory.consumed),
        receiver: NonNull::from(&memory.receiver),
        sender: NonNull::from(&memory.sender),
        lines: NonNull::from(&*memory.lines).cast(),
        areas: memory.areas,
        layout,
        _memory: memory.clone(),
        accesses: accesses.clone(),
    })
}

/// The ends of one direction. They are not dropped when a scenario fails: loom is no longer there then.
struct Ring {
    send: ManuallyDrop<RingSend>,
    recv: ManuallyDrop<RingRecv>,
}

fn ring(lines: usize, depth: usize, bells: &[Arc<Doorbell>; 2]) -> Ring {
    let [ours, theirs] = direction(lines, depth);
    let ends = |rank: usize| Ends {
        peer: Peer { rank, peer: 1 - rank, address: String::new() },
        bell: bells[1 - rank].clone(),
        fence: Fence::Asymmetric,
        lifeline: None,
    };
    Ring {
        send: ManuallyDrop::new(RingSend::new(ours, ends(0))),
        recv: ManuallyDrop::new(RingRecv::new(theirs, ends(1))),
    }
}

/// Of the sender, of the receiver.
fn bells() -> [Arc<Doorbell>; 2] {
    [Doorbell::new().unwrap(), Doorbell::new().unwrap()]
}

fn message(seq: u32, len: usize) -> (Header, Vec<u8>) {
    (Header { seq, len: len as u32, ..Header::default() }, vec![seq as u8 + 1; len])
}

/// What a thread does that cannot go on.
#[derive(Clone, Copy, PartialEq)]
enum Wait {
    /// Looks again.
    Spin,
    /// Sleeps as the executor does: arm, look once more, sleep, disarm, drain.
    Sleep,
}

fn send(link: &mut RingSend, bell: &Doorbell, wait: Wait, (header, data): &(Header, Vec<u8>)) -> Result<()> {
    while !link.send_from(header, data)? {
        match wait {
            Wait::Spin => loom::thread::yield_now(),
            Wait::Sleep => {
                if !link.arm()? {
                    bell.wait();
                }
                link.disarm();
                bell.drain();
            }
        }
    }
    Ok(())
}

fn sleep(link: &mut RingRecv, bell: &Doorbell, wait: Wait) -> Result<()> {
    match wait {
        Wait::Spin => loom::thread::yield_now(),
        Wait::Sleep => {
            if !link.arm()? {
                bell.wait();
            }
            link.disarm();
            bell.drain();
        }
    }
    Ok(())
}

fn receive(link: &mut RingRecv, bell: &Doorbell, wait: Wait, (header, data): &(Header, Vec<u8>)) -> Result<()> {
    let mut dst = vec![0; data.len()];
    loop {
        match link.recv_into(header, &mut dst)? {
            Received::Done => break,
            Received::Pending => sleep(link, bell, wait)?,
            Received::Mismatch(other) => panic!("order: expected {header}, got {other}"),
        }
    }
    assert_eq!(dst, *data, "payload of message {}", header.seq);
    Ok(())
}

/// Runs a scenario with at most `preemptions` in each of its orders (`None`: all orders). Returns their number.
fn explore(preemptions: Option<usize>, scenario: impl Fn() + Sync + Send + 'static) -> usize {
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let mut builder = loom::model::Builder::new();
    // LOOM_MAX_PREEMPTIONS, when set, overrules.
    builder.preemption_bound = builder.preemption_bound.or(preemptions);
    builder.max_branches = 10_000;
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        scenario();
    });
    runs.load(Ordering::Relaxed)
}

/// The scenario holds, and fails with each of these steps weakened.
fn check(
    name: &str,
    preemptions: Option<usize>,
    fence: bool,
    needs: &[Step],
    scenario: impl Fn() + Sync + Send + Copy + 'static,
) {
    let without = (!fence).then_some(Step::LightFence);
    let runs = weaken(without, || explore(preemptions, scenario));
    println!("{name}: holds in {runs} executions");
    for &step in needs {
        let outcome = catch_unwind(AssertUnwindSafe(|| weaken(Some(step), || explore(preemptions, scenario))));
        let why = match outcome {
            Ok(runs) => panic!("{name}: weakening {step:?} is not noticed in {runs} executions"),
            Err(why) => why.downcast_ref::<String>().cloned().or(why.downcast_ref::<&str>().map(|s| s.to_string())),
        };
        let why = why.unwrap_or_default();
        println!("{name}: without {step:?}: {}", why.lines().find(|l| !l.trim().is_empty()).unwrap_or_default());
    }
}

/// Three messages over one line and one area, by polling. Without any fence: acquire and release alone must do it.
#[test]
fn messages_arrive_whole_and_in_order() {
    use Step::{Free, Publish, SeeFreed, SeePublished};
    for len in [SHORT, LONG] {
        check(&format!("{len} bytes"), None, false, &[Publish, SeePublished, Free, SeeFreed], move || {
            let bells = bells();
            let Ring { mut send: tx, mut recv: rx } = ring(1, 1, &bells);
            let mine = bells[0].clone();
            let sender = loom::thread::spawn(move || {
                for seq in 0..3 {
                    send(&mut tx, &mine, Wait::Spin, &message(seq, len)).unwrap();
                }
                tx
            });
            for seq in 0..3 {
                receive(&mut rx, &bells[1], Wait::Spin, &message(seq, len)).unwrap();
            }
            drop(ManuallyDrop::into_inner(sender.join().unwrap()));
            drop(ManuallyDrop::into_inner(rx));
        });
    }
}
