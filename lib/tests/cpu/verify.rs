//! `TINYNCCL_VERIFY`: calls are what they were without it; one flipped bit anywhere is found, and the link or the rank
//! where it flipped is named.
//!
//! `TINYNCCL_TEST_FLIPS` is the number of flips per place, 25 without it.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::cells::{COLLECTIVES, Cell, check};
use crate::common::{FABRICS, config, run_ok, tap};
use tinynccl::config::{Sums, TransportChoice, Verify};
use tinynccl::error::Suspect;
use tinynccl::transport::faulty::{self, Faults};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, LinkOptions, LinkPair, rails, relay::Routes};
use tinynccl::wire::{Algorithm, Collective, Header};
use tinynccl::{Comm, Config, DType, Error, ReduceOp, Result, Secret};

#[test]
fn verified_calls_have_their_results() {
    for fabric in FABRICS {
        for (verify, every, sum) in
            [(Verify::All, 64, Sums::Pairwise), (Verify::Sample, 3, Sums::Pairwise), (Verify::All, 64, Sums::Exact)]
        {
            for ranks in [2, 3, 5] {
                let mut config = config();
                (config.verify, config.verify_every, config.sum) = (verify, every, sum);
                run_ok(fabric, ranks, &config, |comm| {
                    for (dtype, count) in [(DType::F32, 1), (DType::Bf16, 4_000), (DType::U8, 0), (DType::F64, 90_001)]
                    {
                        for (collective, op) in
                            COLLECTIVES.into_iter().zip([ReduceOp::Sum, ReduceOp::Avg].into_iter().cycle())
                        {
                            let op = if collective == Collective::Scan { ReduceOp::Max } else { op };
                            let cell = Cell { collective, dtype, op, root: count % ranks, count };
                            check(&comm, cell, &format!("{fabric:?}, {verify}, {sum:?}"))?;
                        }
                    }
                    let (rank, next) = (comm.rank(), (comm.rank() + 1) % ranks);
                    let last = (rank + ranks - 1) % ranks;
                    for count in [0, 1, 100, 700_000] {
                        let (ours, mut theirs) = (vec![rank as u64; count], vec![9; count]);
                        comm.send_recv(&ours, next, &mut theirs, last)?;
                        assert!(theirs.iter().all(|v| *v == last as u64));
                        let mut sums = [vec![1f32; count.min(50)], vec![2f32; 30]];
                        let mut moved = vec![0; count];
                        comm.group(|group| {
                            sums.iter_mut().try_for_each(|sum| group.all_reduce_in_place(sum, ReduceOp::Sum))?;
                            group.send(&ours, next)?;
                            group.recv(&mut moved, last)
                        })?;
                        assert!(sums[1].iter().all(|v| *v == 2.0 * ranks as f32) && moved == theirs);
                        let part = count / ranks;
                        let parts: Vec<_> = (0..ranks).map(|r| r * part..(r + 1) * part).collect();
                        let (out, mut into) = (vec![rank as u16; ranks * part], vec![0; ranks * part]);
                        comm.all_to_all_v(&out, &parts, &mut into, &parts)?;
                        assert!(parts.into_iter().zip(0..).all(|(part, from)| into[part].iter().all(|v| *v == from)));
                    }
                    let work = comm.all_reduce_in_place_async(vec![1u32; 100_000], ReduceOp::Sum)?;
                    assert!(work.wait()?.iter().all(|v| *v == ranks as u32));
                    comm.close()
                });
            }
        }
    }
}

fn flips() -> usize {
    std::env::var("TINYNCCL_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(25)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// One call of a world, and the rank, the peer and the message at which a bit flips.
#[derive(Debug, Clone, Copy)]
struct Case {
    seed: u64,
    ranks: usize,
    collective: Collective,
    algorithm: Algorithm,
    count: usize,
    in_place: bool,
    victim: usize,
    peer: usize,
    message: u64,
}

impl Case {
    fn new(seed: u64) -> Case {
        use Algorithm::{AllPairs, Direct, HalvingDoubling, Ring, Tree};
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter, SendRecv};
        let mut random = Random(seed);
        let ranks = 2 + random.below(3);
        let victim = random.below(ranks);
        Case {
            seed,
            ranks,
            collective: [AllReduce, AllReduce, AllGather, Broadcast, Reduce, ReduceScatter, AllToAll, SendRecv]
                [random.below(8)],
            algorithm: [Ring, Tree, Direct, HalvingDoubling, AllPairs][random.below(5)],
            count: [1, 100, 5_000, 40_000][random.below(4)],
            in_place: random.below(2) == 1,
            victim,
            peer: (victim + 1 + random.below(ranks - 1)) % ranks,
            message: random.below(6) as u64,
        }
    }

    fn config(&self) -> Config {
        let mut config = config();
        config.verify = Verify::All;
        config.algorithm = Some(self.algorithm);
        // Over links, in many messages.
        (config.one_shot, config.stage, config.shm_chunk, config.tcp_chunk) = (0, 0, 8 << 10, 8 << 10);
        config.timeout = Duration::from_secs(20);
        config
    }

    /// Makes the call; true if this rank's result is right. `memory` gets the output's address and length.
    fn call(&self, comm: &Comm, memory: &[AtomicUsize; 2]) -> Result<bool> {
        let (rank, n, count) = (comm.rank(), self.ranks, self.count);
        let value = |rank: usize, i: usize| (rank * 1_000_003 + i * 7) as u32;
        let input = |segments: usize| (0..segments * count).map(|i| value(rank, i)).collect::<Vec<_>>();
        let sum = |i: usize| (0..n).map(|r| value(r, i)).fold(0, u32::wrapping_add);
        let show = |output: &mut [u32]| {
            memory[0].store(output.as_mut_ptr().expose_provenance(), Ordering::SeqCst);
            memory[1].store(size_of_val(output), Ordering::SeqCst);
        };
        let mut output = vec![0; n * count];
        let right =
            |output: &[u32], expected: &dyn Fn(usize) -> u32| output.iter().enumerate().all(|(i, v)| *v == expected(i));
        match self.collective {
            Collective::AllReduce if self.in_place => {
                let mut buffer = input(1);
                show(&mut buffer);
                comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum)?;
                Ok(right(&buffer, &sum))
            }
            Collective::AllReduce => {
                output.truncate(count);
                show(&mut output);
                comm.all_reduce(&input(1), &mut output, ReduceOp::Sum)?;
                Ok(right(&output, &sum))
            }
            Collective::AllGather => {
                show(&mut output);
                comm.all_gather(&input(1), &mut output)?;
                Ok(right(&output, &|i| value(i / count, i % count)))
            }
            Collective::Broadcast => {
                let mut buffer = input(1);
                show(&mut buffer);
                comm.broadcast_in_place(&mut buffer, n - 1)?;
                Ok(right(&buffer, &|i| value(n - 1, i)))
            }
            Collective::Reduce => {
                let mut buffer = input(1);
                show(&mut buffer);
                comm.reduce_in_place(&mut buffer, ReduceOp::Sum, n - 1)?;
                Ok(rank != n - 1 || right(&buffer, &sum))
            }
            Collective::ReduceScatter => {
                output.truncate(count);
                show(&mut output);
                comm.reduce_scatter(&input(n), &mut output, ReduceOp::Sum)?;
                Ok(right(&output, &|i| sum(rank * count + i)))
            }
            Collective::AllToAll => {
                show(&mut output);
                comm.all_to_all(&input(n), &mut output)?;
                Ok(right(&output, &|i| value(i / count, rank * count + i % count)))
            }
            _ => {
                let (next, last) = ((rank + 1) % n, (rank + n - 1) % n);
                output.truncate(count);
                show(&mut output);
                comm.send_recv(&input(1), next, &mut output, last)?;
                Ok(right(&output, &|i| value(last, i)))
            }
        }
    }

    /// The outcome of every rank.
    fn outcomes(
        &self,
        wrap: impl Fn(usize, usize, LinkPair) -> LinkPair + Send + Sync + 'static,
        memory: &[[AtomicUsize; 2]],
    ) -> Vec<Result<bool>> {
        let comms = Comm::threads_with_links(self.ranks, self.config(), wrap).unwrap();
        std::thread::scope(|scope| {
            let ranks =
                comms.into_iter().zip(memory).map(|(comm, memory)| scope.spawn(move || self.call(&comm, memory)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

fn no_memory(ranks: usize) -> Vec<[AtomicUsize; 2]> {
    (0..ranks).map(|_| Default::default()).collect()
}

/// Consequence of one flip.
#[derive(Debug, PartialEq)]
enum Outcome {
    /// It hit nothing: all results are right.
    Harmless,
    /// It was found, and the right place named, or another one.
    Found { rightly: bool },
}

fn judge(case: &Case, outcomes: &[Result<bool>], expected: &dyn Fn(&Suspect) -> bool) -> Outcome {
    if outcomes.iter().all(|outcome| matches!(outcome, Ok(true))) {
        return Outcome::Harmless;
    }
    let corrupt = outcomes.iter().find_map(|outcome| match outcome {
        Err(Error::Corrupt { suspect, op, offset, bytes, expected, got, .. }) => {
            assert!(op.contains("of comm 0") && *bytes > 0 && expected != got && *offset < 1 << 20, "{outcome:?}");
            Some(suspect)
        }
        _ => None,
    });
    let Some(suspect) = corrupt else { panic!("{case:?}: not found: {outcomes:?}") };
    assert!(outcomes.iter().all(|o| !matches!(o, Ok(false))), "{case:?}: a wrong result: {outcomes:?}");
    let rightly = expected(suspect);
    if !rightly {
        eprintln!("{case:?}: named {suspect}");
    }
    Outcome::Found { rightly }
}

/// Flips until so many were found, and prints how often the right place was named.
fn many(place: &str, flip: impl Fn(&Case) -> Outcome) {
    let (mut found, mut right, mut harmless) = (0, 0, 0);
    for seed in 0.. {
        match flip(&Case::new(seed)) {
            Outcome::Harmless => harmless += 1,
            Outcome::Found { rightly } => (found, right) = (found + 1, right + usize::from(rightly)),
        }
        if found == flips() {
            break;
        }
        assert!(harmless < 100 * flips(), "{place}: nothing is hit");
    }
    println!("{place}: {found} flips found of {found}, {right} at the right place; {harmless} hit nothing");
    assert!(right * 100 >= found * 99, "{place}: {right} of {found} at the right place");
}

/// A bit flips in a message that `case.victim` has sent to `case.peer`.
fn on_the_way(case: &Case, made: impl Fn(usize, usize, LinkPair) -> LinkPair + Send + Sync + 'static) -> Outcome {
    let case = *case;
    let wrap = move |rank, peer, pair| {
        let pair = made(rank, peer, pair);
        let hit = (rank, peer) == (case.victim, case.peer);
        faulty::wrap(pair, &Faults { seed: case.seed, corrupt_at: hit.then_some(case.message), ..Faults::default() })
    };
    let outcomes = case.outcomes(wrap, &no_memory(case.ranks));
    judge(
        &case,
        &outcomes,
        &|suspect| matches!(suspect, Suspect::Link { from, to, .. } if (*from, *to) == (case.victim, case.peer)),
    )
}

#[test]
fn a_bit_that_flips_in_a_slot_of_shared_memory_is_found() {
    many("shm slot", |case| on_the_way(case, |_, _, pair| pair));
}

/// Links between endpoints in the place of those between threads.
fn between(endpoints: Vec<Endpoint>, options: LinkOptions) -> impl Fn(usize, usize, LinkPair) -> LinkPair {
    let bells: Vec<Arc<Doorbell>> = endpoints.iter().map(|_| Doorbell::new().unwrap()).collect();
    let made: Vec<AtomicUsize> = (0..endpoints.len().pow(2)).map(|_| AtomicUsize::new(0)).collect();
    move |rank, peer, _| {
        // The same at both ends, which open their links in the same order.
        let channel = made[rank * endpoints.len() + peer].fetch_add(1, Ordering::SeqCst) as u32;
        let info = endpoints[peer].info();
        let to = ConnectTo { comm: 0, peer_rank: peer, info: &info, channel, options };
        endpoints[rank].connect(&to, &bells[rank], &|| None, Duration::from_secs(20)).unwrap()
    }
}

fn endpoints(ranks: usize, config: &Config) -> Vec<Endpoint> {
    let secret = Secret::new([7; 32]);
    (0..ranks).map(|rank| rails::endpoint(rank, secret, config).unwrap()).collect()
}

fn over(config: &Config, ranks: usize) -> impl Fn(usize, usize, LinkPair) -> LinkPair + use<> {
    between(endpoints(ranks, config), LinkOptions { max_message: 8 << 10, depth: 4 })
}

#[test]
fn a_bit_that_flips_in_a_socket_is_found() {
    many("socket", |case| {
        let config = case.config().with(|c| {
            c.transport = TransportChoice::Tcp;
            c.tcp_streams = 1 + case.seed as usize % 2;
            c.tcp_rails = case.seed % 3 == 0;
        });
        on_the_way(case, over(&config, case.ranks))
    });
}

/// At the sum of the end of a relayed link, whichever hop it was.
#[test]
fn a_bit_that_flips_at_a_relay_is_found() {
    many("relay", |case| {
        let case = Case { ranks: 2, victim: case.victim % 2, peer: 1 - case.victim % 2, ..*case };
        let config = case.config().with(|c| c.transport = TransportChoice::Tcp);
        let endpoints = endpoints(3, &config);
        let world: Vec<_> = endpoints.iter().map(Endpoint::info).collect();
        endpoints.iter().for_each(|endpoint| endpoint.introduce(world.clone(), Routes::new(3, |_, b| b == 2)));
        on_the_way(&case, between(endpoints, LinkOptions { max_message: 8 << 10, depth: 4 }))
    });
}

/// Sends messages between two ranks over RDMA until flips were found, in a process whose card flips bits.
#[test]
fn messages_over_a_card_that_flips_bits() {
    if std::env::var_os("TINYROCE_FLIP").is_none() {
        return;
    }
    let (mut found, mut right, mut calls) = (0, 0, 0);
    while found < flips() {
        let config = Case::new(0).config().with(|c| c.transport = TransportChoice::Verbs);
        let comms = Comm::threads_with_links(2, config.clone(), over(&config, 2)).unwrap();
        let outcomes: Vec<(u64, Result<()>)> = std::thread::scope(|scope| {
            let ranks = comms.iter().map(|comm| {
                scope.spawn(move || {
                    let mut buffer = vec![0u32; 25_000];
                    let sent: Vec<u32> = (0..25_000).map(|i| i * 7).collect();
                    for call in 0..50 {
                        let outcome = match comm.rank() {
                            0 => comm.send(&sent, 1),
                            _ => comm.recv(&mut buffer, 0).inspect(|()| assert!(buffer == sent, "not found")),
                        };
                        if outcome.is_err() {
                            return (call, outcome);
                        }
                    }
                    (50, Ok(()))
                })
            });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        calls += outcomes[1].0;
        match &outcomes[1].1 {
            Ok(()) => {}
            Err(Error::Corrupt { suspect, .. }) => {
                let named = matches!(&**suspect, Suspect::Link { from: 0, to: 1, path } if path.starts_with("verbs"));
                (found, right) = (found + 1, right + usize::from(named));
            }
            Err(other) => panic!("{other}"),
        }
    }
    println!("softroce: {found} flips found of {found} in {calls} messages, {right} at the right place");
    assert!(right * 100 >= found * 99, "{right} of {found}");
}

/// Also where the card's own sum is right.
#[test]
fn a_bit_that_flips_in_an_rdma_packet_is_found() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "verify::messages_over_a_card_that_flips_bits", "--nocapture"])
        .envs([("TINYROCE_FLIP", "1"), ("TINYROCE_DEVICES", "lo")])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    println!("{}", text.lines().find(|line| line.contains("softroce: ")).expect("its line"));
}

/// A bit flips in the memory of `case.victim` when it has received a message for which `when` is true.
fn in_memory(case: &Case, when: impl Fn(&Header) -> bool + Send + Sync + 'static) -> Outcome {
    let case = *case;
    let memory = Arc::new(no_memory(case.ranks));
    let (theirs, seen) = (memory.clone(), Arc::new(AtomicU64::new(0)));
    let when = Arc::new(when);
    let wrap = move |rank: usize, _, pair| {
        if rank != case.victim {
            return pair;
        }
        let (memory, seen, when) = (theirs.clone(), seen.clone(), when.clone());
        tap::wrap(
            pair,
            Arc::new(move |header| {
                if when(header) && seen.fetch_add(1, Ordering::SeqCst) == case.message {
                    let [at, bytes] = [0, 1].map(|i| memory[case.victim][i].load(Ordering::SeqCst));
                    let bit = Random(case.seed ^ 0x5555).below(8 * bytes);
                    let byte = std::ptr::with_exposed_provenance_mut::<u8>(at + bit / 8);
                    // SAFETY: inside the output of the rank, in whose thread this runs while the call has the buffer.
                    unsafe { *byte ^= 1 << (bit % 8) };
                }
            }),
        )
    };
    let outcomes = case.outcomes(wrap, &memory);
    judge(&case, &outcomes, &|suspect| matches!(suspect, Suspect::Memory { rank } if *rank == case.victim))
}

#[test]
fn a_bit_that_flips_in_a_buffer_in_flight_is_found() {
    many("buffer in flight", |case| in_memory(case, |_| true));
}

#[test]
fn a_bit_that_flips_in_a_result_is_found() {
    many("result", |case| in_memory(&Case { message: 0, ..*case }, |header| header.algorithm == Header::SUMS));
}
