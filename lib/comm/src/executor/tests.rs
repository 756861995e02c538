//! One rank's program against peers played by hand.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::wait::sleep_on;
use super::*;
use tinynccl_plan::algorithm::{Shape, program};
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::Error;
use tinynccl_plan::wire::{Algorithm, Collective};
use tinynccl_sys::Secret;
use tinynccl_sys::backoff::{Backoff, SLICE};
use tinynccl_sys::config::{SingleCopy, TransportChoice};
use tinynccl_transport::{ConnectTo, Doorbell, Endpoint, LinkOptions, LinkPair, Received, inproc};

/// A rank without a communicator.
pub(crate) struct Alone {
    bell: Arc<Doorbell>,
    /// The ranks whose messages were found without a wake-up.
    late: RefCell<Vec<usize>>,
    /// Runs when all links are armed and the rank is about to sleep.
    asleep: RefCell<Box<dyn FnMut()>>,
}

impl Alone {
    pub(crate) fn new(bell: Arc<Doorbell>) -> Alone {
        Alone { bell, late: RefCell::default(), asleep: RefCell::new(Box::new(|| {})) }
    }
}

impl Supervisor for Alone {
    fn failure(&self) -> Option<Error> {
        None
    }
    fn has_failed(&self) -> bool {
        false
    }
    fn doorbell(&self) -> RawFd {
        (self.asleep.borrow_mut())();
        self.bell.fd()
    }
    fn silence(&self) {
        self.bell.drain();
    }
    fn woke_late(&self, peer: usize, _: Duration) {
        self.late.borrow_mut().push(peer);
    }
    fn waiting_on(&self, _: Option<usize>) {}
    fn timed_out(&self, _: &Header, peers: &[usize], _: Duration) -> Error {
        Error::invalid("test", format!("timed out waiting for {peers:?}"))
    }
    fn explain(&self, _: &Header, error: Error) -> Error {
        error
    }
    fn has_left(&self, _: usize) -> bool {
        false
    }
    fn left(&self, _: &Header, peer: usize) -> Error {
        Error::invalid("test", format!("rank {peer} left"))
    }
    fn interrupted(&self, header: &Header) -> Error {
        Error::invalid("test", format!("{header} was interrupted"))
    }
    fn mismatch(&self, _: usize, ours: Header, theirs: Header) -> Error {
        Error::invalid("test", format!("{ours} and {theirs}"))
    }
}

/// Ends of the links between rank 2 and ranks 0 and 1 on channels 0 and 1: ours, or (`peer`) theirs, indexed
/// `[channel][rank]`.
fn connect(hub: &inproc::Hub, bell: &Arc<Doorbell>, peer: bool) -> Vec<Vec<LinkPair>> {
    let options = LinkOptions { max_message: 64, depth: 4 };
    let one = |channel, other| {
        let (rank, peer_rank) = if peer { (other, 2) } else { (2, other) };
        let to = inproc::ConnectTo { comm: 0, rank, peer_rank, channel, options };
        hub.connect(&to, bell, &|| None, Duration::from_secs(20)).expect("the other end")
    };
    (0..2).map(|channel| (0..2).map(|other| one(channel, other)).collect()).collect()
}

fn send(pair: &mut LinkPair, header: &Header, data: &[u64]) {
    let header = Header { len: (data.len() * 8) as u32, ..*header };
    assert!(pair.send.send_from(&header, bytemuck::cast_slice(data)).expect("open"), "no credit");
}

/// Lane 0 keeps a partial sum of window 0 in scratch memory while lane 1 is done with window 1, whose cut is another
/// one.
#[test]
fn lanes_in_different_windows_do_not_share_scratch_memory() {
    // Windows of 5, 4 and 4 elements: 3 + 2, 2 + 2, 2 + 2.
    const COUNT: usize = 13;
    let shape = Shape { collective: Collective::AllReduce, ranks: 3, root: 0, channels: 2 };
    let program = program(Algorithm::Direct, &shape, 2).expect("supported");
    let partition = program.partition(COUNT, 8, 24);
    assert_eq!((partition.windows(), partition.part(0, 0), partition.part(1, 0)), (3, 0..3, 5..7));

    let key = tinynccl_plan::Call {
        op: Some(ReduceOp::Sum),
        ..tinynccl_plan::Call::new(Collective::AllReduce, DType::U64, ReduceOp::Sum, 0, COUNT)
    };
    let header = key.header(0, Algorithm::Direct);
    let input = |rank: u64| (0..COUNT as u64).map(|i| 100u64.pow(rank as u32) * (i + 1)).collect::<Vec<_>>();
    let hub = inproc::Hub::new();
    let mut output = vec![0u64; COUNT];
    std::thread::scope(|scope| {
        let peers = scope.spawn(|| {
            let bell = Doorbell::new().expect("a doorbell");
            let mut links = connect(&hub, &bell, true);
            let inputs = [input(0), input(1)];
            for w in 0..3 {
                for (pair, input) in links[1].iter_mut().zip(&inputs) {
                    send(pair, &header, &input[partition.part(w, 1)]);
                }
            }
            // Rank 2's lane 0 puts this into scratch memory and waits for rank 1's.
            send(&mut links[0][0], &header, &inputs[0][partition.part(0, 0)]);
            // Lane 1's message of window 2 shows that it is done with window 1.
            let from_lane_1 = &mut links[1][0].recv;
            for _ in 0..3 {
                while from_lane_1.peek().expect("open").is_none() {
                    std::thread::yield_now();
                }
                from_lane_1.release().expect("peeked");
            }
            for w in 0..3 {
                if w > 0 {
                    send(&mut links[0][0], &header, &inputs[0][partition.part(w, 0)]);
                }
                send(&mut links[0][1], &header, &inputs[1][partition.part(w, 0)]);
            }
            links
        });
        let bell = Doorbell::new().expect("a doorbell");
        let mut links = Links::default();
        for (channel, pairs) in connect(&hub, &bell, false).into_iter().enumerate() {
            for (peer, pair) in pairs.into_iter().enumerate() {
                links.insert(channel as u32, peer, pair);
            }
        }
        let plan = Plan::compile(&key, header, &program, 3, &[], 24, false, false, |c, p| links.get(c, p))
            .expect("links are open");
        let ours = input(2);
        let buffers = Buffers { input: ours.as_ptr().cast(), output: output.as_mut_ptr().cast() };
        let policy = WaitPolicy {
            turns: 2,
            backoff: Backoff { spin: Duration::from_micros(5), yields: Duration::from_micros(200) },
            deadline: Duration::from_secs(20),
        };
        let task = Task { plan: &plan, buffers, header };
        let mut workspace = Workspace::default();
        // SAFETY: both buffers have COUNT elements and live until the end of the scope.
        unsafe { run(&[task], &mut links, &mut workspace, &Alone::new(bell), &policy) }.expect("no failure");
        peers.join().expect("the peers");
    });
    let expected: Vec<u64> = (0..COUNT as u64).map(|i| 10_101 * (i + 1)).collect();
    assert_eq!(output, expected);
}

/// A message that arrives during a sleep without a wake-up is found when the slice is over and counted as late; one
/// that rings the doorbell is not.
#[test]
fn a_lost_wake_up_is_noticed() {
    for rings in [false, true] {
        let hub = inproc::Hub::new();
        let [polled, other, theirs] = [(); 3].map(|()| Doorbell::new().expect("a doorbell"));
        let rung = if rings { &polled } else { &other };
        let (ours, mut theirs) = std::thread::scope(|scope| {
            let peer = scope.spawn(|| connect(&hub, &theirs, true));
            (connect(&hub, rung, false), peer.join().expect("the peers"))
        });
        let mut links = Links::default();
        for (peer, pair) in ours.into_iter().next().expect("a channel").into_iter().enumerate() {
            links.insert(0, peer, pair);
        }
        let header = Header { count: 1, ..Header::default() };
        let alone = Alone::new(polled.clone());
        let mut sent = false;
        *alone.asleep.borrow_mut() = Box::new(move || {
            if !std::mem::replace(&mut sent, true) {
                send(&mut theirs[0][1], &header, &[7]);
            }
        });
        let policy = WaitPolicy {
            turns: 1,
            backoff: Backoff { spin: Duration::ZERO, yields: Duration::ZERO },
            deadline: Duration::from_secs(20),
        };
        let index = links.get(0, 1).expect("a link");
        assert!(peek(&mut links, index as usize, &header, &alone, &policy).expect("no failure"));
        assert_eq!(*alone.late.borrow(), if rings { vec![] } else { vec![1] });
    }
}

/// The peer pulls the last message of a call and leaves, between our last look at the link and the sleep.
#[test]
fn a_peer_that_leaves_with_all_that_was_sent_ends_no_sleep_in_a_failure() {
    const LEN: usize = 100_000;
    let (transport, single_copy) = (TransportChoice::Shm, SingleCopy::From(0));
    let config = tinynccl_sys::Config::default().with(|c| {
        c.transport = transport;
        c.single_copy = single_copy;
    });
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, Secret::new([42; 32]), &config).expect("an endpoint"));
    let bells = [(); 2].map(|()| Doorbell::new().expect("a doorbell"));
    let connect = |rank: usize| {
        let info = endpoints[1 - rank].info();
        let options = LinkOptions { max_message: 64, depth: 4 };
        let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options };
        endpoints[rank].connect(&to, &bells[rank], &|| None, Duration::from_secs(20)).expect("the other end")
    };
    let (ours, mut theirs) = std::thread::scope(|scope| {
        let peer = scope.spawn(|| connect(1));
        (connect(0), peer.join().expect("the peer"))
    });
    let mut links = Links::default();
    links.insert(0, 1, ours);
    let header = Header { len: LEN as u32, ..Header::default() };
    let data = vec![7; LEN];
    let send = links.sends[0].zero_copy().expect("one process may read its own memory");
    // SAFETY: `data` is not changed and outlives the links.
    assert!(unsafe { send.send(&header, &data, false) }.expect("open"));
    assert!(!links.flush().expect("open"), "nothing is pulled yet");
    assert_eq!(theirs.recv.recv_into(&header, &mut vec![0; LEN]).expect("open"), Received::Done);
    drop(theirs);
    sleep_on(&mut links, (&[], &[0]), &header, &Alone::new(bells[0].clone()), SLICE).expect("the peer has everything");
    assert!(links.flush().expect("the peer has everything"));
    // It takes no further message.
    let lost = sleep_on(&mut links, (&[], &[0]), &header, &Alone::new(bells[0].clone()), SLICE);
    assert!(matches!(lost, Err(Error::PeerLost { peer: 1, .. })), "{lost:?}");
}
