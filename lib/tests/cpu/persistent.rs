//! Registered buffers: over every transport the same results as ordinary ones; over RDMA without a copy on the sender.

use std::io::Write;
use std::time::Duration;

use crate::common::config;
use tinynccl::bootstrap::Server;
use tinynccl::comm::Persistent;
use tinynccl::config::TransportChoice;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp, Result};

/// Bytes of a message: calls have several, the last one shorter.
const MESSAGE: usize = 16 << 10;
const COUNT: usize = 50_007;

/// Returns true if this build and machine have RDMA, which `TINYNCCL_TEST_VERBS=1` requires.
fn has_verbs() -> bool {
    match tinynccl::transport::rdma_ports(&Config::default()) {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {e}");
            let _ = writeln!(std::io::stderr().lock(), "SKIPPED: registered buffers over RDMA: {e}");
            false
        }
    }
}

fn transports() -> impl Iterator<Item = TransportChoice> {
    let all = [TransportChoice::Tcp, TransportChoice::Shm].into_iter();
    all.chain(has_verbs().then_some(TransportChoice::Verbs))
}

/// Two ranks as threads. In a virtual machine with two nodes, each has its node's device.
fn run<R: Send>(transport: TransportChoice, config: &Config, f: impl Fn(Comm) -> R + Sync) -> [R; 2] {
    let server = Server::start("127.0.0.1:0".parse().unwrap(), 2, config).unwrap();
    let id = server.unique_id();
    let one = |rank: usize| {
        let mut config = config.clone();
        config.transport = transport;
        (config.tcp_chunk, config.shm_chunk, config.verbs_chunk) = (MESSAGE, MESSAGE, MESSAGE);
        if std::env::var("RXE_VM").as_deref() == Ok("pair") {
            config.verbs_device = Some(["rxe_ab", "rxe_ba"][rank].to_owned());
        }
        f(Comm::init(&id, rank, 2, config).unwrap())
    };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| scope.spawn(move || one(rank)));
        ranks.map(|rank| rank.join().unwrap())
    })
}

fn values(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 1000) as f32 * 0.37 + rank as f32).collect()
}

fn registered(comm: &Comm, values: &[f32]) -> Persistent<f32> {
    comm.register_persistent(values.to_vec()).unwrap()
}

/// Messages that `f` sends without a copy.
fn zero_copies(comm: &Comm, f: impl FnOnce() -> Result<()>) -> u64 {
    let before = comm.census().zero_copy_messages;
    f().unwrap();
    comm.census().zero_copy_messages - before
}

/// Every call with ordinary buffers, then with registered ones, whole and in part.
fn compare(comm: &Comm, verbs: bool) {
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let ours = values(rank, COUNT);
    let mut expected = vec![0f32; COUNT];
    let (input, mut output) = (registered(comm, &ours), registered(comm, &expected));
    assert_eq!(input.is_registered(), verbs, "{input:?}");
    // A part of a registered buffer is registered, too, wherever it begins.
    for range in [0..COUNT, 1..COUNT, 13..COUNT - 4999] {
        let n = range.len();
        let expect_zero_copies = |zero_copies: u64, what: &str| {
            assert_eq!(zero_copies > 0, verbs, "{what}, {range:?}: {zero_copies} zero_copies")
        };

        let plain = zero_copies(comm, || comm.all_reduce(&ours[range.clone()], &mut expected[..n], ReduceOp::Sum));
        assert_eq!(plain, 0, "ordinary memory");
        output.fill(-1.0);
        let l = zero_copies(comm, || comm.all_reduce(&input[range.clone()], &mut output[range.clone()], ReduceOp::Sum));
        expect_zero_copies(l, "all_reduce");
        assert!(output[range.clone()] == expected[..n], "all_reduce {range:?}");
        assert!(output[..range.start].iter().chain(&output[range.end..]).all(|&x| x == -1.0), "outside of {range:?}");

        output.copy_from_slice(&ours);
        let l = zero_copies(comm, || comm.all_reduce_in_place(&mut output[range.clone()], ReduceOp::Sum));
        expect_zero_copies(l, "all_reduce in place");
        assert!(output[range.clone()] == expected[..n], "all_reduce in place {range:?}");

        let theirs = &values(peer, COUNT)[range.clone()];
        output.fill(0.0);
        let l = zero_copies(comm, || comm.send_recv(&input[range.clone()], peer, &mut output[range.clone()], peer));
        expect_zero_copies(l, "send_recv");
        assert!(&output[range.clone()] == theirs, "send_recv {range:?}");

        output.fill(0.0);
        let l = zero_copies(comm, || match rank {
            0 => comm.send(&input[range.clone()], 1).and_then(|()| comm.recv(&mut output[range.clone()], 1)),
            _ => comm.recv(&mut output[range.clone()], 0).and_then(|()| comm.send(&input[range.clone()], 0)),
        });
        expect_zero_copies(l, "send and recv");
        assert!(&output[range.clone()] == theirs, "send and recv {range:?}");

        let mut all = registered(comm, &vec![0.0; 2 * n]);
        comm.all_gather(&input[range.clone()], &mut all).unwrap();
        assert!(all[..n] == values(0, COUNT)[range.clone()] && all[n..] == values(1, COUNT)[range.clone()]);
        let mut swapped = registered(comm, &vec![0.0; 2 * n]);
        comm.all_to_all(&all, &mut swapped).unwrap();
        let mine = &values(rank, COUNT)[range.clone()];
        assert!(&swapped[..n] == mine && &swapped[n..] == mine, "all_to_all {range:?}");
        output.copy_from_slice(&ours);
        comm.broadcast_in_place(&mut output[range.clone()], 1).unwrap();
        assert!(output[range.clone()] == values(1, COUNT)[range.clone()], "broadcast {range:?}");
    }
    comm.all_reduce(&ours, &mut expected, ReduceOp::Sum).unwrap();
    // An asynchronous call owns the buffer, and gives it back registered.
    let again = comm.all_reduce_in_place_async(input, ReduceOp::Sum).unwrap().wait().unwrap();
    assert_eq!(again.is_registered(), verbs);
    assert!(again.into_inner() == expected);
    let empty = comm.register_persistent(Vec::<u8>::new()).unwrap();
    assert!(!empty.is_registered() && empty.is_empty());
}

#[test]
fn registered_buffers_give_the_results_of_ordinary_ones() {
    for transport in transports() {
        for algorithm in [None, Some(Algorithm::Ring), Some(Algorithm::Direct), Some(Algorithm::RecursiveDoubling)] {
            // With the shared region, ranks that share memory would have no links.
            let mut config = config();
            (config.algorithm, config.one_shot) = (algorithm, 0);
            run(transport, &config, |comm| compare(&comm, transport == TransportChoice::Verbs));
        }
    }
}

/// Large enough that the allocator takes it from the kernel and gives it back at once: the next one gets the same
/// address.
const LARGE: usize = 36 << 20;

/// Guards against a cache of registrations by address: memory is freed, other memory gets its address, and the device
/// sends the pages of before.
#[test]
fn memory_at_an_address_that_was_registered_before_is_sent_as_it_is() {
    for transport in transports() {
        let [reused, _] = run(transport, &config(), |comm| {
            let mut reused = 0;
            let mut last = 0;
            for round in 0..8u8 {
                if comm.rank() == 1 {
                    for part in 0..2 {
                        let mut got = vec![0u8; 100_000];
                        comm.recv(&mut got, 0).unwrap();
                        assert!(
                            got.iter().all(|&x| x == 2 * round + part),
                            "round {round}, part {part}: got {}",
                            got[0]
                        );
                    }
                    continue;
                }
                // Registered, and sent; freed; the same again, not registered.
                for part in 0..2 {
                    let memory = vec![2 * round + part; LARGE];
                    reused += u32::from(memory.as_ptr().addr() == last);
                    last = memory.as_ptr().addr();
                    let now = zero_copies(&comm, || match part {
                        0 => comm.send(&comm.register_persistent(memory)?[LARGE / 2..][..100_000], 1),
                        _ => comm.send(&memory[LARGE / 2..][..100_000], 1),
                    });
                    assert_eq!(now > 0, part == 0 && transport == TransportChoice::Verbs);
                }
            }
            reused
        });
        assert!(reused > 0, "{transport}: no address came twice, so nothing was tested");
    }
}

/// A call that fails leaves no trace in the buffer's life: it can be read, given back and freed.
#[test]
fn a_failed_call_lets_go_of_the_buffer() {
    for transport in transports() {
        let mut config = config();
        config.timeout = Duration::from_millis(800);
        run(transport, &config, |comm| {
            comm.barrier().unwrap();
            let mut buffer = comm.register_persistent(vec![1u8; 4 << 20]).unwrap();
            if comm.rank() == 0 {
                // The other rank does not receive: sooner or later the link is full.
                let error = (0..64).find_map(|_| comm.send(&buffer, 1).err()).expect("64 times 4 MiB are too much");
                assert!(error.to_string().contains("rank"), "{error}");
            } else {
                comm.recv(&mut [0u8; 4], 0).unwrap_err();
            }
            buffer.fill(2);
            assert!(buffer.into_inner().iter().all(|&x| x == 2));
        });
    }
}
