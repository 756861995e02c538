//! The rounds of a run.

use std::hint::spin_loop;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use tinynccl::transport::{Doorbell, LinkOptions, Received, inproc};
use tinynccl::wire::Header;

use super::case::Case;
use super::fence::Fence;

#[repr(align(128))]
#[derive(Debug, Default)]
struct Word(AtomicU64);

/// The state that both sides share, initially zero.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct Words {
    /// The waker's message.
    message: Word,
    /// The sleeper's flag.
    sleeps: Word,
    /// The round that has begun, by the sleeper; the last one that is done, by the waker.
    begun: Word,
    done: Word,
    /// The flag as the waker saw it.
    saw: Word,
}

/// A round that never comes: the waker has failed.
const GIVEN_UP: u64 = u64::MAX;

impl Words {
    /// Words that this process shares with the children that it forks, until it ends.
    pub(super) fn shared() -> Result<&'static Words> {
        let (read_write, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, anywhere.
        let at = unsafe { mmap_anonymous(null_mut(), size_of::<Words>(), read_write, shared) };
        // SAFETY: mapped for ever, page-aligned and zero, which is a valid `Words`.
        Ok(unsafe { &*at.context("shared memory")?.cast() })
    }

    pub(super) fn give_up(&self) {
        self.done.0.store(GIVEN_UP, Ordering::Release);
    }
}

/// Spins until `word` is `value` or more, and yields the core if that takes long.
fn wait(word: &Word, value: u64) -> u64 {
    let mut turns = 0u32;
    loop {
        let now = word.0.load(Ordering::Acquire);
        if now >= value {
            return now;
        }
        turns = turns.wrapping_add(1);
        if turns > 2000 {
            std::thread::yield_now();
        }
        spin_loop();
    }
}

fn idle(turns: u64) {
    for _ in 0..turns {
        spin_loop();
    }
}

pub(super) fn waker(words: &Words, fence: Fence, rounds: u64) {
    for round in 1..=rounds {
        wait(&words.begun, round);
        idle(round % 64);
        words.message.0.store(round, Ordering::Relaxed);
        fence.light();
        words.saw.0.store(words.sleeps.0.load(Ordering::Relaxed), Ordering::Relaxed);
        words.done.0.store(round, Ordering::Release);
    }
}

/// Runs the sleeper's side; returns the number of rounds that lost a wake-up.
pub(super) fn sleeper(words: &Words, fence: Fence, rounds: u64) -> Result<u64> {
    let mut lost = 0;
    for round in 1..=rounds {
        words.begun.0.store(round, Ordering::Release);
        idle(round / 64 % 64);
        words.sleeps.0.store(round, Ordering::Relaxed);
        fence.heavy()?;
        let seen = words.message.0.load(Ordering::Relaxed) == round;
        if wait(&words.done, round) == GIVEN_UP {
            bail!("the waker has failed");
        }
        lost += u64::from(!seen && words.saw.0.load(Ordering::Relaxed) != round);
    }
    Ok(lost)
}

/// Runs both sides over a link of the library; returns the number of rounds that lost a wake-up: neither did `arm` see
/// the message nor the bell ring.
pub(super) fn link_between_threads(case: &Case, rounds: u64) -> Result<u64> {
    let (words, hub) = (Words::default(), inproc::Hub::new());
    let bells = [Doorbell::new()?, Doorbell::new()?];
    let options = LinkOptions { max_message: 64, depth: 4 };
    let connect = |rank: usize| {
        let to = inproc::ConnectTo { comm: 0, rank, peer_rank: 1 - rank, channel: 0, options };
        hub.connect(&to, &bells[rank], &|| None, Duration::from_secs(20))
    };
    let header = |round: u64| Header { seq: round as u32, len: 8, count: 1, ..Header::default() };
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            case.pin_to(1)?;
            let mut link = connect(1)?;
            for round in 1..=rounds {
                wait(&words.begun, round);
                idle(round % 64);
                if !link.send.send_from(&header(round), &round.to_ne_bytes())? {
                    bail!("round {round}: the link has no credit");
                }
                words.done.0.store(round, Ordering::Release);
            }
            anyhow::Ok(link)
        });
        case.pin_to(0)?;
        let mut link = connect(0)?;
        let lost = receive(&words, &mut link.recv, &bells[0], rounds, header);
        // Its end must not close the link before we have read all.
        drop(thread.join().map_err(|_| anyhow::anyhow!("the waker panicked"))??);
        lost
    })
}

fn receive(
    words: &Words,
    recv: &mut Box<dyn tinynccl::transport::RecvLink>,
    bell: &Arc<Doorbell>,
    rounds: u64,
    header: impl Fn(u64) -> Header,
) -> Result<u64> {
    let mut lost = 0;
    for round in 1..=rounds {
        words.begun.0.store(round, Ordering::Release);
        idle(round / 64 % 64);
        let seen = recv.arm()?;
        wait(&words.done, round);
        let rung = poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? == 1;
        lost += u64::from(!seen && !rung);
        recv.disarm();
        bell.drain();
        let mut payload = [0; 8];
        if recv.recv_into(&header(round), &mut payload)? != Received::Done || payload != round.to_ne_bytes() {
            bail!("round {round}: expected its message, got {payload:?}");
        }
    }
    Ok(lost)
}
