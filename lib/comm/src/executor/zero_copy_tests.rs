//! Programs over a link that reads zero-copy memory as late as it may.

use std::collections::VecDeque;
use std::time::Duration;

use super::tests::Alone;
use super::*;
use tinynccl_plan::algorithm::{Shape, program};
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::schedule::Program;
use tinynccl_plan::wire::{Algorithm, Collective};
use tinynccl_sys::backoff::Backoff;
use tinynccl_transport::{Doorbell, Interest, LinkOptions, LinkPair, Peer, SendLink, ZeroCopy, inproc};

/// Messages of 2 elements, in several windows of uneven length.
const MESSAGE: usize = 16;
const COUNT: usize = 13;

/// Accepts zero-copy messages at once and sends them on the third call for progress.
#[derive(Debug)]
struct Late {
    inner: Box<dyn SendLink>,
    held: VecDeque<(Header, *const u8)>,
    asked: u32,
    count: u64,
}

// SAFETY: the pointers are read while the caller keeps the memory, by one thread.
unsafe impl Send for Late {}

impl SendLink for Late {
    fn peer(&self) -> &Peer {
        self.inner.peer()
    }
    fn reserve(&mut self) -> Result<Option<&mut [u8]>> {
        if self.held.is_empty() { self.inner.reserve() } else { Ok(None) }
    }
    fn commit(&mut self, header: &Header) -> Result<()> {
        self.inner.commit(header)
    }
    fn send_from(&mut self, header: &Header, data: &[u8]) -> Result<bool> {
        if self.held.is_empty() { self.inner.send_from(header, data) } else { Ok(false) }
    }
    fn zero_copy(&mut self) -> Option<&mut dyn ZeroCopy> {
        Some(self)
    }
    fn sends_from_caller(&self, _: usize) -> bool {
        false
    }
    fn progress(&mut self) -> Result<bool> {
        self.asked += 1;
        if let Some((header, data)) = self.held.front()
            && self.asked.is_multiple_of(3)
        {
            // SAFETY: the executor keeps zero-copy memory unchanged until the link is flushed.
            let data = unsafe { std::slice::from_raw_parts(*data, header.len as usize) };
            if self.inner.send_from(header, data)? {
                self.held.pop_front();
            }
        }
        self.inner.progress()
    }
    fn is_flushed(&self) -> bool {
        self.held.is_empty() && self.inner.is_flushed()
    }
    fn check_peer(&mut self) -> Result<()> {
        self.inner.check_peer()
    }
    fn arm(&mut self) -> Result<bool> {
        Ok(self.inner.arm()? || !self.held.is_empty())
    }
    fn disarm(&mut self) {
        self.inner.disarm();
    }
    fn interest(&self) -> Interest {
        self.inner.interest()
    }
}

impl ZeroCopy for Late {
    unsafe fn send(&mut self, header: &Header, data: &[u8], _: bool) -> Result<bool> {
        self.held.push_back((*header, data.as_ptr()));
        self.count += 1;
        Ok(true)
    }
    fn takes(&self, _: &[u8]) -> bool {
        true
    }
    fn receiver_pulls(&self) -> bool {
        false
    }
    fn messages(&self) -> u64 {
        self.count
    }
    fn revoke(&mut self) {
        self.held.clear();
    }
}

/// Segments at which input and output begin in one buffer, in the in-place form.
fn in_place(shape: &Shape, rank: usize) -> Option<(usize, usize)> {
    match shape.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce => Some((0, 0)),
        Collective::AllGather => Some((rank, 0)),
        Collective::ReduceScatter => Some((0, rank)),
        Collective::Gather => Some((if rank == shape.root { rank } else { 0 }, 0)),
        Collective::Scatter => Some((0, if rank == shape.root { rank } else { 0 })),
        _ => None,
    }
}

/// The memory of all ranks after the call, and the number of zero-copy messages.
fn outcome(
    programs: &[Program],
    algorithm: Algorithm,
    shape: &Shape,
    together: bool,
    late: bool,
) -> (Vec<Vec<u64>>, u64) {
    let n = shape.ranks;
    let key = tinynccl_plan::Call {
        op: Some(ReduceOp::Sum),
        ..tinynccl_plan::Call::new(shape.collective, DType::U64, ReduceOp::Sum, shape.root, COUNT)
    };
    let hub = inproc::Hub::new();
    let one = |rank: usize| {
        let bell = Doorbell::new().expect("a doorbell");
        let mut links = Links::default();
        let mut needed: Vec<_> = programs[rank].links().into_iter().collect();
        needed.sort_unstable();
        needed.dedup();
        for (channel, peer) in needed {
            let options = LinkOptions { max_message: MESSAGE, depth: 2 };
            let to = inproc::ConnectTo { comm: 0, rank, peer_rank: peer, channel, options };
            let LinkPair { send, recv, kind, any_length } =
                hub.connect(&to, &bell, &|| None, Duration::from_secs(20)).expect("the other end");
            let send = match late {
                true => Box::new(Late { inner: send, held: VecDeque::new(), asked: 0, count: 0 }),
                false => send,
            };
            links.insert(channel, peer, LinkPair { send, recv, kind, any_length });
        }
        let header = key.header(0, algorithm);
        let zero_copy = links.zero_copy(true);
        let plan =
            Plan::compile(&key, header, &programs[rank], n, &[], MESSAGE, zero_copy, false, |c, p| links.get(c, p));
        let plan = plan.expect("links are open");
        let mut memory: Vec<u64> = (0..2 * n * COUNT).map(|i| (1000 * rank + i) as u64).collect();
        let base = memory.as_mut_ptr();
        let (input, output) = match in_place(shape, rank) {
            Some(places) if together => places,
            _ => (0, n),
        };
        let (input, output) = (base.wrapping_add(input * COUNT), base.wrapping_add(output * COUNT));
        let buffers = Buffers { input: input.cast_const().cast(), output: output.cast() };
        let policy = WaitPolicy {
            turns: 2,
            backoff: Backoff { spin: Duration::from_micros(5), yields: Duration::from_micros(200) },
            deadline: Duration::from_secs(20),
        };
        let (task, mut workspace) = (Task { plan: &plan, buffers, header }, Workspace::default());
        // SAFETY: `memory` has room for all segments of input and output, apart or in place.
        unsafe { run(&[task], &mut links, &mut workspace, &Alone::new(bell), &policy) }.expect("no failure");
        (memory, links.zero_copy_messages())
    };
    let (memories, messages): (Vec<_>, Vec<u64>) = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(move || one(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).unzip()
    });
    (memories, messages.iter().sum())
}

#[test]
fn memory_is_not_overwritten_before_the_link_is_done_with_it() {
    let mut messages_by = std::collections::BTreeMap::new();
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for (ranks, channels) in [(2, 1), (3, 2), (4, 1)] {
                let shape = Shape { collective, ranks, root: 1, channels };
                let Some(programs) =
                    (0..ranks).map(|rank| program(algorithm, &shape, rank)).collect::<Option<Vec<_>>>()
                else {
                    continue;
                };
                for together in [false, true] {
                    let (expected, _) = outcome(&programs, algorithm, &shape, together, false);
                    let (got, messages) = outcome(&programs, algorithm, &shape, together, true);
                    assert!(got == expected, "{algorithm}, {shape:?}, in place: {together}");
                    *messages_by.entry((collective.name(), together)).or_insert(0) += messages;
                }
            }
        }
    }
    for collective in ["all_reduce", "all_gather", "broadcast"] {
        for together in [false, true] {
            assert!(messages_by[&(collective, together)] > 0, "{collective}, in place: {together}: {messages_by:?}");
        }
    }
}
