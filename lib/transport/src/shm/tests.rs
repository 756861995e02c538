use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::memory::Head;
use super::memory::{LINES, Position, taken};
use super::*;
use crate::{LinkOptions, Received, RecvLink, SendLink, ZeroCopy};
use tinynccl_plan::error::Error;
use tinynccl_sys::config;
use tinynccl_sys::threads::poll;

const OPTIONS: LinkOptions = LinkOptions { max_message: 100, depth: 3 };

struct Ring {
    memory: Arc<Mapping>,
    layout: Layout,
    send: ShmSend,
    recv: ShmRecv,
    /// Doorbells of the receiver and of the sender.
    bells: [Arc<Doorbell>; 2],
}

fn ring() -> Ring {
    zero_copy_ring(SingleCopy::off())
}

/// One that sends all long messages by zero copy.
fn zero_copy_ring(single_copy: SingleCopy) -> Ring {
    let layout = Layout::new(&OPTIONS).unwrap();
    let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
    introduce(&memory, layout, 0).unwrap();
    let bells = [Doorbell::new().unwrap(), Doorbell::new().unwrap()];
    let ends = |rank: usize| Ends {
        peer: Peer { rank, peer: 1 - rank, address: "here".into() },
        bell: bells[rank].clone(),
        lifeline: None,
        single_copy: single_copy.clone(),
    };
    let direction = || Direction::new(&memory, layout, 0).unwrap();
    let (send, recv) = (ShmSend::new(direction(), ends(0)), ShmRecv::new(direction(), ends(1)));
    Ring { memory, layout, send, recv, bells }
}

fn header(seq: u32, len: usize) -> Header {
    Header { seq, len: len as u32, ..Header::default() }
}

/// Sends so that the other end may fetch it.
fn send_zero_copy(send: &mut dyn SendLink, header: &Header, data: &[u8]) -> Result<bool> {
    // SAFETY: the tests keep `data` until it is fetched or taken back.
    unsafe { send.zero_copy().unwrap().send(header, data, false) }
}

#[test]
fn layout_is_aligned_disjoint_and_within_its_size() {
    for max_message in [1, 63, 64, 65, 128 << 10] {
        for depth in [1, 2, 3, 64, 100] {
            let layout = Layout::new(&LinkOptions { max_message, depth }).unwrap();
            assert!(layout.lines >= depth && layout.lines.is_power_of_two());
            let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
            let mut used = Vec::new();
            for index in 0..2 {
                let d = Direction::new(&memory, layout, index).unwrap();
                assert!(d.head.is_aligned());
                used.push((d.head.as_ptr() as usize, size_of::<Head>()));
                used.extend((0..layout.lines as u64).map(|i| (std::ptr::from_ref(d.line(i)) as usize, 64)));
                used.push((d.payload(Position::default()) as usize, layout.ring));
            }
            used.sort_unstable();
            assert!(used.iter().all(|(start, _)| start % 64 == 0));
            assert!(used.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{max_message} {depth}");
            let (last, len) = *used.last().unwrap();
            assert!(last + len <= memory.base().as_ptr() as usize + memory.len());
        }
    }
    let small = Arc::new(Mapping::anonymous(4096).unwrap());
    assert!(Direction::new(&small, Layout::new(&OPTIONS).unwrap(), 0).is_err());
    for bad in [(0, 4), (1 << 31, 4), (64, 0), (64, 1 << 20)] {
        assert!(Layout::new(&LinkOptions { max_message: bad.0, depth: bad.1 }).is_err());
    }
}

#[test]
fn a_peer_that_writes_nonsense_gives_a_protocol_error() {
    // A chunk beyond the message, and one beyond the slot.
    let mut r = ring();
    assert!(r.send.send_from(&header(0, 30), &[1; 30]).unwrap());
    let d = Direction::new(&r.memory, r.layout, 0).unwrap();
    for (len, chunk) in [(30, [0, 31]), (200, [0, 101]), (30, [1, 29]), (30, [0, 0]), (30, [u64::MAX, 31])] {
        let mut words = d.line(0).header.load();
        words[2] = words[2] & 0xffff_ffff | len << 32;
        d.line(0).header.store(words);
        d.line(0).rest.store(chunk);
        for _ in 0..2 {
            let e = r.recv.peek().unwrap_err();
            let got = format!("got {} bytes from byte {} on", chunk[1], chunk[0]);
            assert!(matches!(e, Error::Protocol { .. }) && e.to_string().contains(&got), "{e}");
        }
    }
    // A sequence number out of nowhere.
    let mut r = ring();
    let d = Direction::new(&r.memory, r.layout, 0).unwrap();
    d.line(0).sequence.publish(77);
    assert!(matches!(r.recv.recv_into(&header(0, 0), &mut []), Err(Error::Protocol { .. })));
    // More freed than sent, and less than was freed before.
    for freed in [10_000, u64::MAX] {
        let mut r = ring();
        let d = Direction::new(&r.memory, r.layout, 0).unwrap();
        d.head().consumed.ring.free(freed);
        let result = (0..10).map(|i| r.send.send_from(&header(i, 30), &[1; 30])).find(|r| r.is_err());
        assert!(matches!(result, Some(Err(Error::Protocol { .. }))));
    }
}

#[test]
fn small_messages_have_more_credit_than_large_ones_and_both_have_a_bound() {
    let mut r = ring();
    let mut count = |len: usize| {
        let data = vec![1; len];
        (0..1000).take_while(|i| r.send.send_from(&header(*i, len), &data).unwrap()).count()
    };
    assert_eq!(count(100), 4, "depth 3 and one more");
    assert_eq!(count(30), 0);
    assert_eq!(count(24), LINES - 4);
    assert_eq!(count(0), 0);
    assert!(r.send.reserve().unwrap().is_none());
    assert_eq!(r.recv.recv_into(&header(0, 100), &mut [0; 100]).unwrap(), Received::Done);
    assert!(r.send.reserve().unwrap().is_some());
    r.send.commit(&header(0, 40)).unwrap();
    let mut r = ring();
    let sent = (0..1000).take_while(|i| r.send.send_from(&header(*i, 30), &[1; 30]).unwrap()).count();
    assert_eq!(sent, 3 * taken(100) / taken(30) + 1, "the last one begins where a long one would still fit");
}

/// Wherever the sender is in the ring, `depth` messages of any length fit, and no two of them overlap.
#[test]
fn there_is_room_for_depth_messages_at_every_place() {
    let mut r = ring();
    let (mut seq, mut seed) = (0, 1u64);
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) % below
    };
    let data = |seq: u32, len: usize| vec![seq as u8; len];
    for _ in 0..5000 {
        let lens: Vec<usize> = (0..OPTIONS.depth).map(|_| random(OPTIONS.max_message as u64 + 1) as usize).collect();
        for (i, &len) in lens.iter().enumerate() {
            let (seq, reserves) = (seq + i as u32, random(2) == 0);
            if reserves {
                r.send.reserve().unwrap().expect("room")[..len].copy_from_slice(&data(seq, len));
                r.send.commit(&header(seq, len)).unwrap();
            } else {
                assert!(r.send.send_from(&header(seq, len), &data(seq, len)).unwrap(), "{lens:?}");
            }
        }
        for &len in &lens {
            assert_eq!(r.recv.peek().unwrap(), Some((header(seq, len), &data(seq, len)[..])));
            r.recv.release().unwrap();
            seq += 1;
        }
    }
}

/// Thousands of laps, more than once around 32 lines and the ring, with sleeping at both ends.
#[test]
fn no_wake_up_is_lost() {
    let Ring { mut send, mut recv, bells, .. } = ring();
    let [sender_rings, receiver_rings] = bells;
    let sleep = |bell: &Doorbell| {
        let woken = poll(&mut [PollFd::new(bell, PollFlags::IN)], Duration::from_secs(20)).unwrap();
        assert_eq!(woken, 1, "a wake-up was lost");
    };
    const N: u32 = 5000;
    std::thread::scope(|s| {
        s.spawn(move || {
            for i in 0..N {
                let len = if i % 3 == 0 { 8 } else { 50 };
                while !send.send_from(&header(i, len), &vec![i as u8; len]).unwrap() {
                    if !send.arm().unwrap() {
                        sleep(&receiver_rings);
                    }
                    send.disarm();
                    receiver_rings.drain();
                }
            }
            // The receiver's end must not see the link closed before it has slept for the last message.
            send
        });
        s.spawn(move || {
            for i in 0..N {
                let len = if i % 3 == 0 { 8 } else { 50 };
                let mut dst = vec![0; len];
                while recv.recv_into(&header(i, len), &mut dst).unwrap() != Received::Done {
                    if !recv.arm().unwrap() {
                        sleep(&sender_rings);
                    }
                    recv.disarm();
                    sender_rings.drain();
                }
                assert_eq!(dst, vec![i as u8; len]);
            }
        });
    });
}

/// The race itself, without sleeping: one message and one `arm` at the same moment, again and again. Either `arm` sees
/// the message or the bell is rung. (Without the fences a few in 100,000 rounds fail on x86.)
#[test]
fn arm_sees_the_message_or_the_bell_rings() {
    const N: u64 = 20_000;
    let Ring { mut send, mut recv, bells, .. } = ring();
    let bell = &bells[0];
    let (round, sent) = (&AtomicU64::new(0), &AtomicU64::new(0));
    let wait = |word: &AtomicU64, value: u64| {
        let mut spins = 0u32;
        while word.load(Ordering::Acquire) < value {
            spins += 1;
            if spins > 2000 {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|s| {
        s.spawn(move || {
            for i in 1..=N {
                wait(round, i);
                for _ in 0..i % 64 {
                    std::hint::spin_loop();
                }
                assert!(send.send_from(&header(i as u32, 8), &[0; 8]).unwrap());
                sent.store(i, Ordering::Release);
            }
            send
        });
        let mut missed = 0;
        for i in 1..=N {
            round.store(i, Ordering::Release);
            for _ in 0..i / 64 % 64 {
                std::hint::spin_loop();
            }
            let seen = recv.arm().unwrap();
            wait(sent, i);
            let rung = poll(&mut [PollFd::new(bell, PollFlags::IN)], Duration::ZERO).unwrap() == 1;
            missed += u32::from(!seen && !rung);
            recv.disarm();
            bell.drain();
            assert_eq!(recv.recv_into(&header(i as u32, 8), &mut [0; 8]).unwrap(), Received::Done);
        }
        assert_eq!(missed, 0, "of {N}");
    });
}

/// The receiver takes a message between its publication and the sender's look at the receiver's state, and leaves.
#[test]
fn a_message_that_the_receiver_took_before_it_left_is_no_loss() {
    for len in [8, 100] {
        for taken in [true, false] {
            let mut r = ring();
            // The state of the memory after these steps of the receiver.
            let d = Direction::new(&r.memory, r.layout, 0).unwrap();
            d.head().consumed.lines.free(u64::from(taken));
            d.head().receiver.close();
            let sent = r.send.send_from(&header(0, len), &vec![1; len]);
            if taken {
                assert!(sent.unwrap());
            } else {
                assert!(matches!(sent, Err(Error::PeerLost { .. })), "{sent:?}");
            }
            // No one will take another one.
            let next = r.send.send_from(&header(1, len), &vec![1; len]);
            assert!(matches!(next, Err(Error::PeerLost { .. })), "{next:?}");
        }
    }
}

/// Longer than a message of the ring, and than a chunk.
const LONG: usize = 100_003;

fn long(seq: u32) -> Vec<u8> {
    (0..LONG as u32).map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seq) >> 11) as u8).collect()
}

/// Our own process, which sends whatever is long by zero copy.
fn ourselves() -> SingleCopy {
    SingleCopy {
        pid: std::process::id() as i32,
        choice: config::SingleCopy::From(0),
        ordinary: ZeroCopyFrom::default(),
    }
}

#[test]
fn zero_copy_is_flushed_when_it_was_pulled() {
    let mut r = zero_copy_ring(ourselves());
    let data = [long(0), long(1)];
    for (seq, data) in data.iter().enumerate() {
        assert!(send_zero_copy(&mut r.send, &header(seq as u32, LONG), data).unwrap());
    }
    assert_eq!(r.send.bytes_moved(), 0, "nothing went through the ring");
    assert!(!r.send.is_flushed() && !r.send.progress().unwrap() && !r.send.arm().unwrap());
    assert!(r.recv.must_pull());
    assert_eq!(r.recv.peek().unwrap(), Some((header(0, LONG), &[][..])), "longer than what can be shown");
    assert!(r.recv.release().is_err());
    let mut dst = vec![0; LONG];
    assert_eq!(r.recv.recv_into(&header(0, LONG), &mut dst).unwrap(), Received::Done);
    assert!(dst == data[0]);
    assert_eq!(poll(&mut [PollFd::new(&r.bells[1], PollFlags::IN)], Duration::ZERO).unwrap(), 1, "it was armed");
    assert!(!r.send.progress().unwrap() && !r.send.is_flushed(), "one of two");
    let mut got = vec![0; LONG];
    let mut sink = |at: usize, chunk: &[u8]| got[at..at + chunk.len()].copy_from_slice(chunk);
    assert_eq!(r.recv.recv_chunks(&header(1, LONG), &mut sink).unwrap(), Received::Done);
    assert!(got == data[1]);
    assert!(r.send.arm().unwrap(), "it can go on");
    assert!(r.send.is_flushed());
    // And short messages as ever.
    assert!(send_zero_copy(&mut r.send, &header(2, 30), &[7; 30]).unwrap());
    assert!(r.send.is_flushed() && !r.recv.must_pull());
    assert_eq!(r.recv.peek().unwrap(), Some((header(2, 30), &[7; 30][..])));
}

/// A sender that cannot be read, or is not who it was, gets its long messages through in chunks.
#[test]
fn without_permission_long_messages_go_through_the_room() {
    assert!(zero_copy_ring(SingleCopy::off()).send.zero_copy().is_none());
    for single_copy in [SingleCopy { pid: 0, ..ourselves() }, SingleCopy { pid: i32::MAX, ..ourselves() }] {
        let mut r = zero_copy_ring(single_copy);
        for (seq, by_chunks) in [(0, false), (1, true)] {
            let (data, mut dst) = (long(seq), vec![0; LONG]);
            let (mut sent, mut turns) = (false, 0);
            loop {
                sent = sent || send_zero_copy(&mut r.send, &header(seq, LONG), &data).unwrap();
                let received = if by_chunks {
                    let mut sink = |at: usize, chunk: &[u8]| dst[at..at + chunk.len()].copy_from_slice(chunk);
                    r.recv.recv_chunks(&header(seq, LONG), &mut sink).unwrap()
                } else {
                    r.recv.recv_into(&header(seq, LONG), &mut dst).unwrap()
                };
                turns += 1;
                if received == Received::Done {
                    break;
                }
            }
            assert!(sent && r.send.is_flushed() && turns > 100, "{turns}");
            assert!(dst == data);
        }
    }
    // The nonce of another process.
    let layout = Layout::new(&OPTIONS).unwrap();
    let memory = Arc::new(Mapping::anonymous(layout.bytes()).unwrap());
    let direction = Direction::new(&memory, layout, 0).unwrap();
    assert!(ourselves().reader(&direction.head().probe).is_none(), "it has not said who it is");
    introduce(&memory, layout, 0).unwrap();
    assert!(ourselves().reader(&direction.head().probe).is_some() && direction.head().probe.can_pull());
    let reader = ourselves().reader(&direction.head().probe).unwrap();
    let mut dst = [0u8; 8];
    // SAFETY: `dst` has 8 bytes.
    let e = unsafe { reader.read(8, dst.as_mut_ptr(), 8) }.unwrap_err();
    assert!(e.contains("8 bytes"), "{e}");
    let other = reader.of_another();
    // SAFETY: as above.
    let e = unsafe { other.read(dst.as_ptr() as u64, dst.as_mut_ptr(), 0) }.unwrap_err();
    assert!(e.contains("another one now"), "{e}");
}

#[test]
fn what_was_taken_back_is_not_received() {
    for drops in [false, true] {
        let mut r = zero_copy_ring(ourselves());
        let data = long(0);
        assert!(send_zero_copy(&mut r.send, &header(0, LONG), &data).unwrap());
        if drops {
            drop(r.send);
        } else {
            r.send.revoke();
            assert!(matches!(r.send.send_from(&header(1, 8), &[0; 8]), Err(Error::PeerLost { .. })));
        }
        let mut dst = vec![0; LONG];
        for _ in 0..2 {
            let lost = r.recv.recv_into(&header(0, LONG), &mut dst);
            assert!(matches!(lost, Err(Error::PeerLost { .. })), "{lost:?}");
        }
    }
    // The receiver has pulled everything: the link stays.
    let mut r = zero_copy_ring(ourselves());
    let data = long(0);
    assert!(send_zero_copy(&mut r.send, &header(0, LONG), &data).unwrap());
    assert_eq!(r.recv.recv_into(&header(0, LONG), &mut vec![0; LONG]).unwrap(), Received::Done);
    r.send.revoke();
    assert!(r.send.send_from(&header(1, 8), &[0; 8]).unwrap());
    // A receiver that goes without having fetched is lost to the sender that waits for it.
    assert!(send_zero_copy(&mut r.send, &header(2, LONG), &data).unwrap());
    drop(r.recv);
    assert!(matches!(r.send.progress(), Err(Error::PeerLost { .. })));
}

#[test]
fn small_pages_use_zero_copy_from_where_it_was_measured_to_pay() {
    let copy = SingleCopy { choice: config::SingleCopy::Auto, ..ourselves() };
    let mut r = zero_copy_ring(copy.clone());
    let data = long(0);
    // Whatever was found out about this buffer before.
    for (from, expected) in [(usize::MAX, 0), (LONG, 1), (LONG + 1, 1), (1, 2)] {
        copy.ordinary.set(from);
        while !send_zero_copy(&mut r.send, &header(0, LONG), &data).unwrap() {
            let _ = r.recv.recv_into(&header(0, LONG), &mut vec![0; LONG]).unwrap();
        }
        while !r.send.is_flushed() || r.recv.peek().unwrap().is_some() {
            let _ = r.recv.recv_into(&header(0, LONG), &mut vec![0; LONG]).unwrap();
            let _ = r.send.progress().unwrap();
        }
        assert_eq!(r.send.messages(), expected, "from {from}");
    }
    // One way up to 1 MiB, both ways at any length. Memory that was never touched lies on no pages at all.
    let memory = Mapping::anonymous((3 << 20) + 4096).unwrap();
    let mut known = Default::default();
    copy.ordinary.set(64 << 10);
    for (len, two_way, takes) in [
        ((64 << 10) - 1, true, false),
        (64 << 10, false, true),
        (1 << 20, false, true),
        ((1 << 20) + 1, false, false),
        ((1 << 20) + 1, true, true),
        (3 << 20, true, true),
    ] {
        // SAFETY: the mapping is longer, zeroed, and nobody writes to it.
        let data = unsafe { std::slice::from_raw_parts(memory.base().as_ptr(), len) };
        assert_eq!(copy.takes(data, two_way, &mut known), takes, "{len} {two_way}");
    }
}
