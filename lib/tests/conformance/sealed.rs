//! Encrypted links, and what an attacker on the path between two ranks can do: hear, change, repeat and cut bytes.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::harness::*;
use tinynccl::Config;
use tinynccl::config::TransportChoice;
use tinynccl::error::Error;
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkPair, Received};

/// Bytes of a hello with its part of the encryption, and of the record with the dialer's proof: length, proof, tag.
const HELLO: usize = 80 + 48;
const PROOF: usize = 2 + 32 + 16;
/// Bytes of the acceptor's challenge (head, nonce and proof, encryption) and of the record with its welcome.
const CHALLENGE: usize = 16 + 48 + 48;
const WELCOME: usize = 2 + 16 + 16;
const DIALER: usize = 0;
const ACCEPTOR: usize = 1;

/// Bytes on their way: which connection (they are counted), from which end, how many have passed before.
struct Bytes<'a> {
    connection: usize,
    from: usize,
    at: usize,
    bytes: &'a mut Vec<u8>,
}

impl Bytes<'_> {
    /// Returns the place of byte `at` of the stream in these bytes, if it is among them.
    fn place(&self, at: usize) -> Option<usize> {
        at.checked_sub(self.at).filter(|place| *place < self.bytes.len())
    }
}

/// An attacker between a dialer and a rank: `act` looks at all bytes and changes some; false: it cuts the connection.
struct Attacker {
    address: SocketAddr,
    heard: Arc<Mutex<[Vec<u8>; 2]>>,
    connections: Arc<AtomicUsize>,
    gone: Arc<AtomicBool>,
}

type Act = dyn Fn(Bytes<'_>) -> bool + Send + Sync;

impl Attacker {
    fn before(target: SocketAddr, act: impl Fn(Bytes<'_>) -> bool + Send + Sync + 'static) -> Attacker {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (heard, gone) = (Arc::<Mutex<[Vec<u8>; 2]>>::default(), Arc::<AtomicBool>::default());
        let connections = Arc::<AtomicUsize>::default();
        let act: Arc<Act> = Arc::new(act);
        let (ears, over, count) = (heard.clone(), gone.clone(), connections.clone());
        std::thread::spawn(move || {
            for dialer in listener.incoming() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (Ok(dialer), Ok(acceptor)) = (dialer, TcpStream::connect(target)) else { continue };
                let connection = count.fetch_add(1, Ordering::Relaxed);
                let ways = [(dialer.try_clone().unwrap(), acceptor.try_clone().unwrap()), (acceptor, dialer)];
                for (from, (mut source, mut sink)) in ways.into_iter().enumerate() {
                    let (act, ears) = (act.clone(), ears.clone());
                    std::thread::spawn(move || {
                        let mut at = 0;
                        let mut buffer = vec![0; 1 << 20];
                        while let Ok(n @ 1..) = source.read(&mut buffer) {
                            let mut bytes = buffer[..n].to_vec();
                            if connection == 0 {
                                ears.lock().unwrap()[from].extend(&bytes);
                            }
                            let goes_on = act(Bytes { connection, from, at, bytes: &mut bytes });
                            at += n;
                            if sink.write_all(&bytes).is_err() || !goes_on {
                                break;
                            }
                        }
                        let _ = sink.shutdown(Shutdown::Write);
                        let _ = source.shutdown(Shutdown::Read);
                    });
                }
            }
        });
        Attacker { address, heard, connections, gone }
    }

    /// Returns what it has heard on its first connection, from the dialer and from the acceptor.
    fn heard(&self) -> [Vec<u8>; 2] {
        self.heard.lock().unwrap().clone()
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

fn loopback(endpoint: &Endpoint) -> SocketAddr {
    *endpoint.info().tcp.iter().find(|a| a.ip().is_loopback()).unwrap()
}

fn two(config: &Config) -> [Endpoint; 2] {
    [0, 1].map(|rank| Endpoint::new(rank, SECRET, config).unwrap())
}

fn connect(from: &Endpoint, peer_rank: usize, info: &EndpointInfo, channel: u32) -> Result<LinkPair, Error> {
    connect_within(from, peer_rank, info, channel, PATIENCE)
}

fn connect_within(
    from: &Endpoint,
    peer_rank: usize,
    info: &EndpointInfo,
    channel: u32,
    limit: Duration,
) -> Result<LinkPair, Error> {
    let to = ConnectTo { comm: 1, peer_rank, info, channel, options: OPTIONS };
    from.connect(&to, &Doorbell::new().unwrap(), &|| None, limit)
}

/// The two ends of a link that goes by an attacker.
fn link([low, high]: &[Endpoint; 2], attacker: &Attacker, channel: u32) -> [LinkPair; 2] {
    let info = EndpointInfo { tcp: vec![attacker.address], ..high.info() };
    both(|rank| match rank {
        0 => connect(low, 1, &info, channel).unwrap(),
        _ => connect(high, 0, &low.info(), channel).unwrap(),
    })
}

/// Receives messages of `len` bytes until an error: it, and how many there were. All of them are right.
fn receive_all(link: &mut LinkPair, len: usize) -> (u32, Error) {
    let (mut seq, mut dst) = (0, vec![0; len]);
    let error = until("the error", || match link.recv.recv_into(&header(seq, len), &mut dst) {
        Ok(Received::Done) => {
            assert!(dst == payload(seq, len), "a wrong value in message {seq}");
            seq += 1;
            None
        }
        Ok(Received::Pending) => None,
        Ok(Received::Mismatch(h)) => panic!("a header that was not sent: {h}"),
        Err(e) => Some(e),
    });
    (seq, error)
}

/// Sends as many messages as the link takes, and drops it.
fn send_some(mut link: LinkPair, messages: u32, len: usize) {
    for seq in 0..messages {
        let data = payload(seq, len);
        let sent =
            until("credit", || link.send.send_from(&header(seq, len), &data).map(|s| s.then_some(())).transpose());
        if sent.is_err() {
            return;
        }
    }
}

fn is_in(what: &[u8], bytes: &[u8]) -> bool {
    bytes.windows(what.len()).any(|window| window == what)
}

#[test]
fn nothing_of_a_payload_or_of_a_secret_is_seen_on_the_path() {
    for encrypt in [false, true] {
        let ends = two(&sealed().with(|c| c.encrypt = encrypt));
        let attacker = Attacker::before(loopback(&ends[1]), |_| true);
        let [mut a, mut b] = link(&ends, &attacker, 2);
        for seq in 0..3 {
            send_from(&mut a, seq, 5000);
            recv_into(&mut b, seq, 5000);
            send_from(&mut b, seq, 40);
            recv_into(&mut a, seq, 40);
        }
        let heard = attacker.heard();
        assert!(heard[DIALER].len() > 15_000 && heard[ACCEPTOR].len() > 120);
        for (seq, (len, from)) in [(5000, DIALER), (40, ACCEPTOR)].into_iter().cycle().take(6).enumerate() {
            let payload = payload(seq as u32 / 2, len);
            for part in payload.chunks_exact(8) {
                assert_eq!(is_in(part, &heard[from]), !encrypt, "a part of message {seq}");
            }
            assert_eq!(is_in(bytemuck::bytes_of(&header(seq as u32 / 2, len)), &heard[from]), !encrypt);
        }
        let key = SECRET.derive("encryption", &[]);
        for secret in [SECRET.bytes(), key.bytes()] {
            assert!(!heard.iter().any(|bytes| is_in(&secret[..8], bytes)));
        }
    }
}

#[test]
fn a_byte_that_is_changed_in_the_handshake_makes_no_link() {
    // One after the other would take as long as the slowest times their number.
    let positions: Vec<(usize, usize)> = [(DIALER, HELLO + PROOF), (ACCEPTOR, CHALLENGE + WELCOME)]
        .iter()
        .flat_map(|&(from, n)| (0..n).map(move |at| (from, at)))
        .collect();
    let ends = &two(&sealed());
    for (batch, some) in positions.chunks(54).enumerate() {
        std::thread::scope(|s| {
            for (i, &(from, at)) in some.iter().enumerate() {
                s.spawn(move || {
                    let attacker = Attacker::before(loopback(&ends[1]), move |way| {
                        if let Some(place) = way.place(at).filter(|_| (way.connection, way.from) == (0, from)) {
                            way.bytes[place] ^= 1;
                        }
                        true
                    });
                    let channel = (54 * batch + i) as u32;
                    if (from, at / CHALLENGE) == (ACCEPTOR, 1) {
                        // In the welcome: the acceptor has its end, and learns that the dialer has not.
                        let info = EndpointInfo { tcp: vec![attacker.address], ..ends[1].info() };
                        let [dialer, acceptor] = both(|rank| match rank {
                            0 => connect_within(&ends[0], 1, &info, channel, Duration::from_secs(10)),
                            _ => connect(&ends[1], 0, &ends[0].info(), channel),
                        });
                        let error = dialer.unwrap_err();
                        let text = error.to_string();
                        // A longer record than was sent does not come to its end.
                        let is_length = at < CHALLENGE + 2;
                        assert!(matches!(error, Error::Protocol { peer: 1, .. }) || is_length, "{text}");
                        assert!(text.contains("not what its peer has sealed") || is_length, "{text}");
                        receive_all(&mut acceptor.unwrap(), 100);
                        return;
                    }
                    // The connection of the attack fails; the dialer comes again, and then it leaves it alone.
                    let [mut a, mut b] = link(ends, &attacker, channel);
                    send_from(&mut a, 0, 100);
                    recv_into(&mut b, 0, 100);
                    assert!(attacker.connections.load(Ordering::Relaxed) > 1, "byte {at} from end {from} made a link");
                });
            }
        });
    }
}

#[test]
fn a_byte_that_is_changed_on_a_link_is_an_error_that_names_it() {
    let ends = &two(&sealed());
    let record = 2 + 32 + 100 + 16;
    let positions: Vec<usize> = (0..2 * record).collect();
    for some in positions.chunks(50) {
        std::thread::scope(|s| {
            for &at in some {
                s.spawn(move || {
                    let attacker = Attacker::before(loopback(&ends[1]), move |way| {
                        if let Some(place) = way.place(HELLO + PROOF + at).filter(|_| way.from == DIALER) {
                            way.bytes[place] ^= 0x10;
                        }
                        true
                    });
                    let [a, mut b] = link(ends, &attacker, at as u32);
                    let (messages, error) = std::thread::scope(|s| {
                        s.spawn(|| send_some(a, 700, 100));
                        receive_all(&mut b, 100)
                    });
                    let text = error.to_string();
                    assert!(matches!(error, Error::PeerLost { peer: 0, rank: 1, .. }), "{text}");
                    assert!(text.contains("of the encrypted connection is not what its peer has sealed"), "{text}");
                    assert!(text.contains("127.0.0.1:"), "{text}");
                    assert_eq!(messages as usize, at / record, "byte {at}: {text}");
                });
            }
        });
    }
}

#[test]
fn a_record_that_is_repeated_left_out_or_moved_is_an_error() {
    let record = 2 + 32 + 100 + 16;
    for attack in 0..3 {
        let ends = &two(&sealed());
        // All of the link's records, to be given on in another order.
        let held = Mutex::new(Vec::new());
        let attacker = Attacker::before(loopback(&ends[1]), move |way| {
            if way.from != DIALER || way.at + way.bytes.len() <= HELLO + PROOF {
                return true;
            }
            let mut held = held.lock().unwrap();
            held.append(way.bytes);
            let [one, two, three] = [0, 1, 2].map(|i| held.get(i * record..(i + 1) * record));
            if let (Some(one), Some(two), Some(three)) = (one, two, three) {
                *way.bytes = match attack {
                    0 => [one, one, two].concat(),
                    1 => [one, three].concat(),
                    _ => [one, three, two].concat(),
                };
                return false;
            }
            true
        });
        let [a, mut b] = link(ends, &attacker, 2);
        let (messages, error) = std::thread::scope(|s| {
            s.spawn(|| send_some(a, 3, 100));
            receive_all(&mut b, 100)
        });
        assert_eq!(messages, 1);
        assert!(error.to_string().contains("repeated, moved or left out"), "{error}");
    }
}

#[test]
fn a_cut_does_not_look_like_the_end_of_a_link() {
    let ends = &two(&sealed());
    let attacker = Attacker::before(loopback(&ends[1]), |_| true);
    let [a, mut b] = link(ends, &attacker, 2);
    let (messages, error) = std::thread::scope(|s| {
        s.spawn(|| send_some(a, 3, 100));
        receive_all(&mut b, 100)
    });
    assert_eq!(messages, 3);
    assert!(!error.to_string().contains("without an encrypted end"), "{error}");
    // Behind the second message, and within the third one.
    for (messages, more) in [(2, 0), (2, 1), (2, 77)] {
        let most = HELLO + PROOF + messages * (2 + 32 + 100 + 16) + more;
        let attacker = Attacker::before(loopback(&ends[1]), move |way| {
            let left = most.saturating_sub(way.at);
            if way.from == DIALER && way.bytes.len() >= left {
                way.bytes.truncate(left);
                return false;
            }
            true
        });
        let [a, mut b] = link(ends, &attacker, 3);
        let (got, error) = std::thread::scope(|s| {
            s.spawn(|| send_some(a, 3, 100));
            receive_all(&mut b, 100)
        });
        assert_eq!(got as usize, messages);
        assert!(error.to_string().contains("without an encrypted end"), "{error}");
    }
}

#[test]
fn a_connection_that_is_played_again_makes_no_link() {
    let ends = two(&sealed());
    let target = loopback(&ends[1]);
    let attacker = Attacker::before(target, |_| true);
    let [mut a, mut b] = link(&ends, &attacker, 2);
    send_from(&mut a, 0, 100);
    recv_into(&mut b, 0, 100);
    let [heard, _] = attacker.heard();
    let mut again = TcpStream::connect(target).unwrap();
    again.set_read_timeout(Some(PATIENCE)).unwrap();
    again.write_all(&heard).unwrap();
    let mut answer = Vec::new();
    // Closed with bytes unread, maybe with a reset.
    let _ = again.read_to_end(&mut answer);
    // The answer has keys of its own, with which the old proof does not open.
    assert!(answer.len() <= CHALLENGE + WELCOME + 512, "{} bytes", answer.len());
    assert!(answer.is_empty() || answer[..CHALLENGE] != attacker.heard()[ACCEPTOR][..CHALLENGE]);
    send_from(&mut a, 1, 100);
    recv_into(&mut b, 1, 100);
}

#[test]
fn only_both_ends_or_none_encrypt() {
    for encrypting in [0, 1] {
        let ends = [0, 1].map(|rank| {
            let config = sealed().with(|c| c.encrypt = rank == encrypting);
            Endpoint::new(rank, SECRET, &config).unwrap()
        });
        let attacker = Attacker::before(loopback(&ends[1]), |_| true);
        let info = EndpointInfo { tcp: vec![attacker.address], ..ends[1].info() };
        let error = connect(&ends[0], 1, &info, 2).unwrap_err().to_string();
        assert!(error.contains("TINYNCCL_ENCRYPT is") && error.contains("set the same for all ranks"), "{error}");
        // The one that encrypts sends nothing else in clear text.
        assert!(attacker.heard()[DIALER].len() <= HELLO);
    }
}

#[test]
fn what_cannot_be_encrypted_is_refused_by_name() {
    let verbs = sealed().with(|c| c.transport = TransportChoice::Verbs);
    let error = Endpoint::new(0, SECRET, &verbs).unwrap_err();
    assert!(matches!(error, Error::Config { .. }), "{error}");
    assert!(error.to_string().contains("TINYNCCL_TRANSPORT") && error.to_string().contains("RDMA"), "{error}");
}

#[test]
fn silent_and_slow_clients_hold_no_rank_up() {
    let ends = two(&sealed());
    let target = loopback(&ends[1]);
    let attacker = Attacker::before(target, |_| true);
    drop(link(&ends, &attacker, 1));
    let [heard, _] = attacker.heard();
    // At every stage of the handshake some that say nothing more.
    let stages = [0, 7, 79, 80, 81, HELLO - 1, HELLO, HELLO + 1, HELLO + PROOF - 1];
    let slow: Vec<TcpStream> = stages
        .iter()
        .cycle()
        .take(45)
        .map(|&stage| {
            let mut stream = TcpStream::connect(target).unwrap();
            stream.write_all(&heard[..stage]).unwrap();
            stream
        })
        .collect();
    let [mut a, mut b] = link(&ends, &attacker, 2);
    send_from(&mut a, 0, 100);
    recv_into(&mut b, 0, 100);
    // They are closed once their time is over, not before the link was made.
    for mut stream in slow {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut rest = Vec::new();
        let end = stream.read_to_end(&mut rest);
        assert!(!matches!(&end, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock), "{end:?}");
    }
}
