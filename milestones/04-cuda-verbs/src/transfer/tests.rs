//! The pipeline over TCP between two threads, and over a wire that checks the order of calls.

use std::collections::VecDeque;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use anyhow::{bail, ensure};
use proptest::prelude::*;

use super::*;
use crate::buffer::host::HostBuffer;
use crate::pattern;
use crate::probe::Memory;
use crate::wire::tcp::Tcp;

const LONG: Duration = Duration::from_secs(20);

fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let there = TcpStream::connect(listener.local_addr().expect("an address")).expect("connects");
    (listener.accept().expect("a connection").0, there)
}

fn buffer(len: usize) -> HostBuffer {
    HostBuffer::new(len, None).expect("memory")
}

/// One side over TCP, through staging.
fn side(
    stream: &TcpStream,
    plan: Plan,
    buffer: &HostBuffer,
    act: impl Fn(&mut Transfer<'_>) -> Result<()>,
) -> Result<()> {
    let staging = Arc::new(buffer.pinned(plan.staging())?);
    let mut wire = Tcp::new(stream, Arc::clone(&staging))?;
    act(&mut Transfer { plan, buffer, staging: Some(&staging), wire: &mut wire, patience: LONG })
}

fn move_over_tcp(sender: Plan, receiver: Plan) {
    let (here, there) = connection();
    let (from, to) = (buffer(sender.bytes), buffer(receiver.bytes));
    let (from, to) = (&from, &to);
    std::thread::scope(|scope| {
        // Each side owns its end, so a failing side does not leave the other one waiting.
        let there = there;
        scope.spawn(move || {
            for round in 1..=2 {
                pattern::fill(from, round).expect("fits");
                side(&here, sender, from, |t| t.send()).expect("sends");
            }
        });
        for round in 1..=2 {
            side(&there, receiver, to, |t| t.receive()).expect("receives");
            pattern::check(to, round).expect("every byte");
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn every_byte_arrives_whatever_the_cut(bytes in 1_usize..100_000, chunk in 1_usize..9_000, out in 2_usize..5, inn in 2_usize..5) {
        let plan = |slots| Plan { bytes, chunk: chunk.min(bytes), slots };
        move_over_tcp(plan(out), plan(inn));
    }
}

#[test]
fn one_byte_and_one_chunk() {
    for (bytes, chunk) in [(1, 1), (4096, 4096), (4097, 4096)] {
        let plan = Plan { bytes, chunk, slots: 2 };
        move_over_tcp(plan, plan);
    }
}

#[test]
fn a_peer_that_leaves_is_an_error_with_its_address() {
    let plan = Plan { bytes: 10_000, chunk: 1000, slots: 2 };
    let (here, there) = connection();
    let address = here.peer_addr().expect("an address").to_string();
    drop(there);
    let error = format!("{:#}", side(&here, plan, &buffer(plan.bytes), |t| t.receive()).expect_err("nobody there"));
    assert!(error.contains(&address) && error.contains("chunk 0"), "{error}");
}

#[test]
fn a_silent_peer_is_an_error_at_the_deadline() {
    let plan = Plan { bytes: 10_000, chunk: 1000, slots: 2 };
    let (here, _there) = connection();
    let brief = |t: &mut Transfer<'_>| {
        t.patience = Duration::from_millis(30);
        t.receive()
    };
    let error = side(&here, plan, &buffer(plan.bytes), brief).expect_err("silence").to_string();
    assert!(error.contains("no progress in time (--timeout)"), "{error}");
}

/// A wire that rejects a call order that would lose bytes: a buffer still in use, or a chunk out of order.
#[derive(Default)]
struct Strict {
    slots: usize,
    next: usize,
    left: usize,
    out: VecDeque<(usize, Range<usize>)>,
}

impl Strict {
    fn take(&mut self, index: usize, place: Range<usize>) -> Result<()> {
        ensure!(index == self.next, "chunk {index} out of turn");
        ensure!(self.out.len() < self.slots, "more than {} chunks under way", self.slots);
        if self.out.iter().any(|(_, used)| used.start < place.end && place.start < used.end) {
            bail!("chunk {index}: its place is in use");
        }
        self.next += 1;
        self.out.push_back((index, place));
        Ok(())
    }

    fn give(&mut self, index: usize) -> Result<()> {
        while self.left <= index {
            ensure!(self.out.pop_front().is_some(), "chunk {index} was never begun");
            self.left += 1;
        }
        Ok(())
    }
}

impl Wire for Strict {
    fn begin(&mut self) -> Result<()> {
        Ok(())
    }
    fn send(&mut self, index: usize, place: Range<usize>, _: Instant) -> Result<()> {
        self.take(index, place)
    }
    fn sent(&mut self, index: usize, _: Instant) -> Result<()> {
        self.give(index)
    }
    fn post(&mut self, index: usize, place: Range<usize>, _: Instant) -> Result<()> {
        self.take(index, place)
    }
    fn received(&mut self, index: usize, _: Instant) -> Result<()> {
        self.give(index)
    }
}

#[test]
fn no_place_is_used_twice_at_a_time_with_and_without_staging() {
    for slots in 2..5 {
        for chunks in 1..9 {
            let plan = Plan { bytes: chunks * 100 - 30, chunk: 100.min(chunks * 100 - 30), slots };
            let buffer = buffer(plan.bytes);
            let staging = buffer.pinned(plan.staging()).expect("memory");
            for staging in [Some(&staging), None] {
                for receive in [false, true] {
                    let mut wire = Strict { slots, ..Strict::default() };
                    let mut transfer = Transfer { plan, buffer: &buffer, staging, wire: &mut wire, patience: LONG };
                    if receive { transfer.receive() } else { transfer.send() }.expect("in order");
                    assert_eq!((wire.next, wire.left), (chunks, chunks), "{plan:?}");
                }
            }
        }
    }
}
