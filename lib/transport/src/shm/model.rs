//! The ring under the model checker loom: [`ShmSend`] and [`ShmRecv`] as they are, over a ring of one or two lines.
//!
//! Running of scenarios, and weakening of their steps: see `transport::explore`. Run with `scripts/loom.sh`.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::memory::{Apart, Head, Line};
use super::single_copy::Probe;
use super::words::Sequence;
use super::*;
use crate::explore::{must_fail, must_hold};
use crate::{Received, RecvLink, SendLink};
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::Header;
use tinynccl_sys::sync::{Step, Words, touches, watch};

/// Payload that needs an area.
const LONG: usize = 25;
/// Payload that fits into the line.
const SHORT: usize = 9;

/// Contents of a mapping for one direction.
struct Memory {
    head: Head,
    lines: Box<[Line]>,
    ring: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the ring is raw memory, used by the protocol, which is what is being checked.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::leak` of a slice of this length.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.ring.as_ptr(), self.bytes)) });
    }
}

/// Both ends' views of one direction of a ring.
fn direction(layout: Layout) -> [Direction; 2] {
    let line = || Line { sequence: Sequence::default(), header: Words::new(), first: Words::new(), rest: Words::new() };
    let bytes = layout.ring;
    let memory = Arc::new(Memory {
        head: Head {
            consumed: Apart::default(),
            receiver: Apart::default(),
            sender: Apart::default(),
            probe: Apart(Probe::new()),
        },
        lines: (0..layout.lines).map(|_| line()).collect(),
        ring: NonNull::from(Box::leak(vec![0u8; bytes].into_boxed_slice())).cast(),
        bytes,
    });
    (0..bytes).step_by(64).for_each(|offset| watch(memory.ring.as_ptr().wrapping_add(offset), 64));
    std::array::from_fn(|_| Direction {
        head: NonNull::from(&memory.head),
        lines: NonNull::from(&*memory.lines).cast(),
        ring: memory.ring,
        layout,
        _memory: memory.clone(),
    })
}

/// The ends of one direction. They are not dropped when a scenario fails: loom is no longer there then.
struct Ring {
    send: ManuallyDrop<ShmSend>,
    recv: ManuallyDrop<ShmRecv>,
}

/// A ring with space for `depth` messages of up to 64 bytes.
fn ring(lines: usize, depth: usize, bells: &[Arc<Doorbell>; 2]) -> Ring {
    ring_of(Layout { lines, max_message: LONG, ring: depth * 64 }, bells)
}

fn ring_of(layout: Layout, bells: &[Arc<Doorbell>; 2]) -> Ring {
    zero_copy_ring(layout, bells, SingleCopy::off())
}

fn zero_copy_ring(layout: Layout, bells: &[Arc<Doorbell>; 2], single_copy: SingleCopy) -> Ring {
    let [ours, theirs] = direction(layout);
    ours.head().probe.introduce();
    let ends = |rank: usize| Ends {
        peer: Peer { rank, peer: 1 - rank, address: String::new() },
        bell: bells[1 - rank].clone(),
        lifeline: None,
        single_copy: single_copy.clone(),
    };
    Ring {
        send: ManuallyDrop::new(ShmSend::new(ours, ends(0))),
        recv: ManuallyDrop::new(ShmRecv::new(theirs, ends(1))),
    }
}

/// Doorbells of the sender and of the receiver.
fn bells() -> [Arc<Doorbell>; 2] {
    [Doorbell::new().unwrap(), Doorbell::new().unwrap()]
}

fn message(seq: u32, len: usize) -> (Header, Vec<u8>) {
    (Header { seq, len: len as u32, ..Header::default() }, vec![seq as u8 + 1; len])
}

/// Behavior of a thread that cannot go on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wait {
    /// Looks again.
    Spin,
    /// Sleeps as the executor does: arm, look once more, sleep, disarm, drain.
    Sleep,
    /// Drains in between, which the contract of a link forbids.
    DrainArmed,
}

impl Wait {
    /// `arm` and `disarm` are those of the links that are waited for.
    fn wait(self, bell: &Doorbell, arm: impl FnOnce() -> Result<bool>, disarm: impl FnOnce()) -> Result<()> {
        if self == Wait::Spin {
            loom::thread::yield_now();
            return Ok(());
        }
        let ready = arm()?;
        if self == Wait::DrainArmed {
            bell.drain();
        }
        if !ready {
            bell.wait();
        }
        disarm();
        bell.drain();
        Ok(())
    }
}

type Message = (Header, Vec<u8>);

fn send(link: &mut ShmSend, bell: &Doorbell, wait: Wait, (header, data): &Message) -> Result<()> {
    while !link.send_from(header, data)? {
        let link = std::cell::RefCell::new(&mut *link);
        wait.wait(bell, || link.borrow_mut().arm(), || link.borrow_mut().disarm())?;
    }
    Ok(())
}

/// True when the message came.
fn try_receive(link: &mut ShmRecv, (header, data): &Message) -> Result<bool> {
    let mut dst = vec![0; data.len()];
    match link.recv_into(header, &mut dst)? {
        Received::Done => assert_eq!(dst, *data, "payload of message {}", header.seq),
        Received::Pending => return Ok(false),
        Received::Mismatch(other) => panic!("order: expected {header}, got {other}"),
    }
    Ok(true)
}

fn receive(link: &mut ShmRecv, bell: &Doorbell, wait: Wait, message: &Message) -> Result<()> {
    while !try_receive(link, message)? {
        let link = std::cell::RefCell::new(&mut *link);
        wait.wait(bell, || link.borrow_mut().arm(), || link.borrow_mut().disarm())?;
    }
    Ok(())
}

/// Starts the sender's part; ends when both parts have.
fn both(
    lines: usize,
    depth: usize,
    sender: impl FnOnce(&mut ShmSend, &Doorbell) + 'static,
    receiver: impl FnOnce(&mut ShmRecv, &Doorbell),
) {
    both_over(Layout { lines, max_message: LONG, ring: depth * 64 }, sender, receiver);
}

fn both_over(
    layout: Layout,
    sender: impl FnOnce(&mut ShmSend, &Doorbell) + 'static,
    receiver: impl FnOnce(&mut ShmRecv, &Doorbell),
) {
    let bells = bells();
    let Ring { send: mut tx, recv: mut rx } = ring_of(layout, &bells);
    let mine = bells[0].clone();
    let thread = loom::thread::spawn(move || {
        sender(&mut tx, &mine);
        tx
    });
    receiver(&mut rx, &bells[1]);
    drop(ManuallyDrop::into_inner(thread.join().unwrap()));
    drop(ManuallyDrop::into_inner(rx));
}

/// Steps whose acquire and release must be noticed when they are weakened, without any help of a fence.
const ORDERINGS: [&[Step]; 4] = [
    &[Step::WakerFence, Step::Publish],
    &[Step::WakerFence, Step::SeePublished],
    &[Step::WakerFence, Step::Free],
    &[Step::WakerFence, Step::SeeFreed],
];

/// Several laps of one line and space for one message, by polling.
#[test]
fn messages_arrive_whole_and_in_order() {
    for (len, count) in [(SHORT, 3), (LONG, 2)] {
        let scenario = move || {
            both(
                1,
                1,
                move |tx, bell| (0..count).for_each(|seq| send(tx, bell, Wait::Spin, &message(seq, len)).unwrap()),
                move |rx, bell| (0..count).for_each(|seq| receive(rx, bell, Wait::Spin, &message(seq, len)).unwrap()),
            );
        };
        must_hold("polling", None, &[Step::WakerFence], scenario);
        ORDERINGS.into_iter().for_each(|steps| must_fail("polling", None, steps, scenario));
    }
}

/// Messages of different lengths, around the end of the ring: the third would go to where the first was, but is longer.
#[test]
fn messages_of_any_length_share_the_ring() {
    let scenario = || {
        let layout = Layout { lines: 4, max_message: 2 * LONG + 40, ring: 3 * 64 };
        let messages = || [LONG, 90, 90].into_iter().enumerate().map(|(i, len)| message(i as u32, len));
        both_over(
            layout,
            move |tx, bell| messages().for_each(|m| send(tx, bell, Wait::Spin, &m).unwrap()),
            move |rx, bell| messages().for_each(|m| receive(rx, bell, Wait::Spin, &m).unwrap()),
        );
    };
    must_hold("any length", Some(3), &[Step::WakerFence], scenario);
    ORDERINGS.into_iter().for_each(|steps| must_fail("any length", Some(3), steps, scenario));
}

/// Memory that was reserved is the sender's until `commit`, and what was peeked is the receiver's until `release`.
#[test]
fn reserved_and_peeked_memory_is_left_alone() {
    let scenario = || {
        both(
            2,
            1,
            |tx, _| {
                for seq in 0..2 {
                    let (header, data) = message(seq, LONG);
                    loop {
                        if let Some(memory) = tx.reserve().unwrap() {
                            memory.copy_from_slice(&data);
                            break;
                        }
                        loom::thread::yield_now();
                    }
                    loom::thread::yield_now();
                    tx.commit(&header).unwrap();
                }
            },
            |rx, _| {
                for seq in 0..2 {
                    let (header, data) = message(seq, LONG);
                    while rx.peek().unwrap().is_none() {
                        loom::thread::yield_now();
                    }
                    loom::thread::yield_now();
                    assert_eq!(rx.peek().unwrap(), Some((header, &data[..])));
                    rx.release().unwrap();
                }
            },
        );
    };
    must_hold("reserve and peek", None, &[Step::WakerFence], scenario);
    ORDERINGS.into_iter().for_each(|steps| must_fail("reserve and peek", None, steps, scenario));
}

/// The scenario holds with the fences, and loses a wake-up without one of them.
fn needs_both_fences(name: &str, preemptions: Option<usize>, scenario: impl Fn() + Sync + Send + Copy + 'static) {
    must_hold(name, preemptions, &[], scenario);
    must_fail(name, preemptions, &[Step::WakerFence], scenario);
    must_fail(name, preemptions, &[Step::SleeperFence], scenario);
}

/// The race itself: one message, and a receiver that goes to sleep.
#[test]
fn a_sleeping_receiver_is_woken() {
    fn scenario(wait: Wait) {
        both(
            1,
            1,
            |tx, bell| send(tx, bell, Wait::Sleep, &message(0, SHORT)).unwrap(),
            move |rx, bell| receive(rx, bell, wait, &message(0, SHORT)).unwrap(),
        );
    }
    needs_both_fences("one message", None, || scenario(Wait::Sleep));
    must_fail("one message, drained while armed,", None, &[], || scenario(Wait::DrainArmed));
    // The bit need not order anything by itself: the fences do.
    must_hold("one message", None, &[Step::Wake], || scenario(Wait::Sleep));
}

/// The race for credit: the second message needs the line (and the ring) of the first, and its sender goes to sleep.
#[test]
fn a_sleeping_sender_is_woken() {
    for len in [SHORT, LONG] {
        needs_both_fences("credit", Some(3), move || {
            both(
                1,
                1,
                move |tx, bell| (0..2).for_each(|seq| send(tx, bell, Wait::Sleep, &message(seq, len)).unwrap()),
                move |rx, bell| {
                    receive(rx, bell, Wait::Spin, &message(0, len)).unwrap();
                    receive(rx, bell, Wait::Sleep, &message(1, len)).unwrap();
                },
            );
        });
    }
}

/// Both sleep, over two lines and space for one message, so that the sender is refused for one or the other.
#[test]
fn both_ends_sleep() {
    needs_both_fences("both sleep", Some(2), || {
        let messages = || [LONG, LONG, SHORT, SHORT].into_iter().enumerate().map(|(i, len)| message(i as u32, len));
        both(
            2,
            1,
            move |tx, bell| messages().for_each(|m| send(tx, bell, Wait::Sleep, &m).unwrap()),
            move |rx, bell| messages().for_each(|m| receive(rx, bell, Wait::Sleep, &m).unwrap()),
        );
    });
}

/// All that was sent before the end of the sender arrives; then the receiver learns of the end, awake or asleep.
#[test]
fn the_end_comes_after_the_last_message() {
    fn scenario(wait: Wait) {
        let bells = bells();
        let Ring { send: mut tx, recv: mut rx } = ring(2, 1, &bells);
        let mine = bells[0].clone();
        let thread = loom::thread::spawn(move || {
            send(&mut tx, &mine, Wait::Sleep, &message(0, SHORT)).unwrap();
            drop(ManuallyDrop::into_inner(tx));
        });
        receive(&mut rx, &bells[1], wait, &message(0, SHORT)).unwrap();
        let e = receive(&mut rx, &bells[1], wait, &message(1, SHORT)).unwrap_err();
        assert!(matches!(e, Error::PeerLost { .. }), "{e}");
        thread.join().unwrap();
        drop(ManuallyDrop::into_inner(rx));
    }
    let awake = || scenario(Wait::Spin);
    must_hold("end of the sender, awake", None, &[Step::WakerFence], awake);
    must_fail("end of the sender, awake", None, &[Step::WakerFence, Step::Close], awake);
    must_fail("end of the sender, awake", None, &[Step::WakerFence, Step::SeeClosed], awake);
    // Its end rings unasked, so no fence is needed to learn of it.
    must_hold("end of the sender, asleep", Some(3), &[], || scenario(Wait::Sleep));
}

/// A receiver that leaves once it has the last message is no loss to the sender of that message.
#[test]
fn the_receiver_may_leave_after_the_last_message() {
    let scenario = || {
        let bells = bells();
        let Ring { send: mut tx, recv: mut rx } = ring(2, 1, &bells);
        let mine = bells[0].clone();
        let thread = loom::thread::spawn(move || {
            for seq in 0..2 {
                send(&mut tx, &mine, Wait::Spin, &message(seq, SHORT)).unwrap();
            }
            tx
        });
        for seq in 0..2 {
            receive(&mut rx, &bells[1], Wait::Spin, &message(seq, SHORT)).unwrap();
        }
        drop(ManuallyDrop::into_inner(rx));
        drop(ManuallyDrop::into_inner(thread.join().unwrap()));
    };
    must_hold("leave after the last message", None, &[Step::WakerFence], scenario);
    must_fail("leave after the last message", None, &[Step::WakerFence, Step::Close], scenario);
    must_fail("leave after the last message", None, &[Step::WakerFence, Step::SeeClosed], scenario);
}

/// A sender that sleeps for credit learns of the receiver's end.
#[test]
fn the_end_of_the_receiver_wakes_the_sender() {
    must_hold("end of the receiver", Some(3), &[], || {
        let bells = bells();
        let Ring { send: mut tx, recv: mut rx } = ring(1, 1, &bells);
        let (mine, theirs) = (bells[0].clone(), bells[1].clone());
        let thread = loom::thread::spawn(move || {
            let outcome =
                (0..3).map(|seq| send(&mut tx, &mine, Wait::Sleep, &message(seq, SHORT))).find(Result::is_err);
            assert!(matches!(outcome, Some(Err(Error::PeerLost { .. }))), "{outcome:?}");
            tx
        });
        receive(&mut rx, &theirs, Wait::Sleep, &message(0, SHORT)).unwrap();
        drop(ManuallyDrop::into_inner(rx));
        drop(ManuallyDrop::into_inner(thread.join().unwrap()));
    });
}

/// Two ranks that send and receive at once over a pair of rings, each with one doorbell for both links, as in a
/// collective.
#[test]
fn one_doorbell_for_two_links() {
    fn rank(tx: &mut ShmSend, rx: &mut ShmRecv, bell: &Doorbell) {
        let (mut sent, mut received) = (0, 0);
        while sent < 2 || received < 2 {
            let before = (sent, received);
            if sent < 2 && tx.send_from(&message(sent, SHORT).0, &message(sent, SHORT).1).unwrap() {
                sent += 1;
            }
            if received < 2 && try_receive(rx, &message(received, SHORT)).unwrap() {
                received += 1;
            }
            if before != (sent, received) {
                continue;
            }
            let mut ready = false;
            if received < 2 {
                ready |= rx.arm().unwrap();
            }
            if sent < 2 {
                ready |= tx.arm().unwrap();
            }
            if !ready {
                bell.wait();
            }
            rx.disarm();
            tx.disarm();
            bell.drain();
        }
    }
    needs_both_fences("two links", Some(2), || {
        let bells = bells();
        let back = [bells[1].clone(), bells[0].clone()];
        let Ring { send: mut there, recv: mut arriving } = ring(1, 1, &bells);
        let Ring { send: mut back, recv: mut returning } = ring(1, 1, &back);
        let mine = bells[0].clone();
        let thread = loom::thread::spawn(move || {
            rank(&mut there, &mut returning, &mine);
            (there, returning)
        });
        rank(&mut back, &mut arriving, &bells[1]);
        let (there, returning) = thread.join().unwrap();
        drop((ManuallyDrop::into_inner(there), ManuallyDrop::into_inner(returning)));
        drop((ManuallyDrop::into_inner(back), ManuallyDrop::into_inner(arriving)));
    });
}

/// The receiver may read a zero-copy payload until the link is flushed; the sender may write to it afterwards.
#[test]
fn zero_copy_memory_is_left_alone_until_it_was_pulled() {
    fn scenario(wait: Wait) {
        const LONG: usize = 100;
        let bells = bells();
        let layout = Layout { lines: 2, max_message: LONG, ring: 64 };
        let all =
            SingleCopy { pid: 1, choice: tinynccl_sys::config::SingleCopy::From(0), ordinary: Default::default() };
        // The receiver's answer is known before the first message.
        let Ring { send: mut tx, recv: mut rx } = zero_copy_ring(layout, &bells, all);
        let mine = bells[0].clone();
        let thread = loom::thread::spawn(move || {
            let (header, mut data) = message(0, LONG);
            watch(data.as_ptr(), LONG);
            touches(data.as_ptr(), LONG, true);
            // SAFETY: `data` stays until it was fetched.
            assert!(unsafe { tx.zero_copy().unwrap().send(&header, &data, false) }.unwrap());
            while !tx.progress().unwrap() {
                let link = std::cell::RefCell::new(&mut *tx);
                wait.wait(&mine, || link.borrow_mut().arm(), || link.borrow_mut().disarm()).unwrap();
                if tx.is_flushed() {
                    break;
                }
            }
            touches(data.as_ptr(), LONG, true);
            data.fill(0xee);
            tx
        });
        receive(&mut rx, &bells[1], wait, &message(0, LONG)).unwrap();
        drop(ManuallyDrop::into_inner(thread.join().unwrap()));
        drop(ManuallyDrop::into_inner(rx));
    }
    let awake = || scenario(Wait::Spin);
    must_hold("zero copy", None, &[Step::WakerFence], awake);
    ORDERINGS.into_iter().for_each(|steps| must_fail("zero copy", None, steps, awake));
    needs_both_fences("zero copy, asleep", Some(3), || scenario(Wait::Sleep));
}
