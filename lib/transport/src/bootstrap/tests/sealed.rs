//! The store with TINYNCCL_ENCRYPT: nothing is seen on the path, and nothing is changed there without an error.

use std::net::{Shutdown, TcpListener};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use tinynccl_sys::threads::lock;

fn store(world_size: usize, encrypt: bool) -> (Server, Config) {
    let config = config().with(|c| (c.encrypt, c.connect_timeout) = (encrypt, Duration::from_secs(10)));
    let server = Server::start_with("127.0.0.1:0".parse().unwrap(), SECRET, world_size, &config, server::LINGER);
    (server.unwrap(), config)
}

/// An attacker on the path to a store, who hears all and changes a byte of the first connection.
struct Attacker {
    address: SocketAddr,
    /// From ranks, and from the store.
    heard: Arc<Mutex<[Vec<u8>; 2]>>,
    connections: Arc<AtomicUsize>,
}

impl Attacker {
    /// `change`: from which end (0: the rank), and which byte.
    fn before(store: SocketAddr, change: Option<(usize, usize)>) -> Attacker {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, heard) = (listener.local_addr().unwrap(), Arc::<Mutex<[Vec<u8>; 2]>>::default());
        let connections = Arc::<AtomicUsize>::default();
        let (ears, count) = (heard.clone(), connections.clone());
        std::thread::spawn(move || {
            while let (Ok((near, _)), Ok(far)) = (listener.accept(), TcpStream::connect(store)) {
                let number = count.fetch_add(1, Ordering::Relaxed);
                let ways = [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)];
                for (end, (mut from, mut to)) in ways.into_iter().enumerate() {
                    let ears = ears.clone();
                    std::thread::spawn(move || {
                        let (mut at, mut bytes) = (0, [0; 4096]);
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            lock(&ears)[end].extend(&bytes[..n]);
                            if let Some((_, place)) = change.filter(|(of, _)| (*of, 0) == (end, number))
                                && (at..at + n).contains(&place)
                            {
                                bytes[place - at] ^= 1;
                            }
                            at += n;
                            if to.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Attacker { address, heard, connections }
    }

    fn id(&self) -> UniqueId {
        UniqueId::new(SECRET, vec![self.address])
    }
}

#[test]
fn what_ranks_exchange_is_not_seen_on_the_path() {
    for encrypt in [false, true] {
        let (server, config) = store(2, encrypt);
        let attacker = Attacker::before(address(&server), None);
        let id = attacker.id();
        let call = |rank: usize| {
            let info = json!({ "address of a rank": rank });
            let session = Session::join(&id, rank, 2, info.clone(), &config).unwrap();
            assert_eq!(session.infos()[rank], info);
            let all = session.exchange("the key of it", &[0, 1], vec![rank as u8; 8], LONG).unwrap();
            assert_eq!(all, [vec![0; 8], vec![1; 8]]);
            session
        };
        let sessions: Vec<Session> = std::thread::scope(|s| {
            let ranks: Vec<_> = (0..2).map(|rank| s.spawn(move || call(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        drop(sessions);
        let heard = lock(&attacker.heard).concat();
        for text in ["address of a rank", "the key of it", "0101010101010101", "Register", "generation"] {
            let seen = heard.windows(text.len()).any(|window| window == text.as_bytes());
            assert_eq!(seen, !encrypt, "{text}");
        }
        assert!(!heard.windows(8).any(|window| window == &SECRET.bytes()[..8]));
    }
}

#[test]
fn a_store_and_a_rank_of_which_one_encrypts_are_told_so() {
    for ours in [false, true] {
        let (server, config) = store(2, ours);
        let id = server.unique_id();
        let config = config.with(|c| c.connect_timeout = Duration::from_millis(2500));
        let other = config.clone().with(|c| c.encrypt = !ours);
        std::thread::scope(|s| {
            let zero = s.spawn(|| Session::join(&id, 0, 2, Value::Null, &config).unwrap_err().to_string());
            let one = Session::join(&id, 1, 2, Value::Null, &other).unwrap_err().to_string();
            let text = format!("TINYNCCL_ENCRYPT is {} here and {}", u8::from(ours), u8::from(!ours));
            assert!(one.contains(&text), "{one}");
            let zero = zero.join().unwrap();
            assert!(zero.contains(&text), "{zero}");
        });
    }
}

#[test]
fn another_secret_is_named_with_encryption_too() {
    let (server, config) = store(1, true);
    let config = config.with(|c| c.connect_timeout = Duration::from_millis(2500));
    let id = UniqueId::new(Secret::new([1; 32]), server.unique_id().addresses().to_vec());
    let e = Session::join(&id, 0, 1, Value::Null, &config).unwrap_err().to_string();
    assert!(e.contains("rank 0 was refused: wrong secret"), "{e}");
}

#[test]
fn no_byte_of_the_handshake_with_the_store_can_be_changed() {
    // The rank's hello and its part of the encryption, and its sealed proof; the store's challenge and sealed welcome.
    let from_rank = (0..36 + 48 + 60).map(|at| (0, at));
    let from_store = (0..440).step_by(5).map(|at| (1, at));
    let all: Vec<(usize, usize)> = from_rank.chain(from_store).collect();
    for some in all.chunks(40) {
        std::thread::scope(|s| {
            for &(end, at) in some {
                s.spawn(move || {
                    let (server, config) = store(1, true);
                    let attacker = Attacker::before(address(&server), Some((end, at)));
                    // It comes again, and the attacker lets it; or it takes what it hears for the store's last word.
                    match Session::join(&attacker.id(), 0, 1, json!("mine"), &config) {
                        Ok(session) => {
                            assert_eq!(session.infos(), [json!("mine")]);
                            assert!(attacker.connections.load(Ordering::Relaxed) > 1, "byte {at} of end {end}");
                        }
                        Err(e) => assert!(matches!(e, Error::Bootstrap { .. } | Error::Timeout { .. }), "{e}"),
                    }
                });
            }
        });
    }
}

#[test]
fn who_plays_a_connection_again_is_no_rank() {
    let (server, config) = store(2, true);
    let attacker = Attacker::before(address(&server), None);
    std::thread::scope(|s| {
        let zero = s.spawn(|| Session::join(&attacker.id(), 0, 2, Value::Null, &config).unwrap());
        // What rank 0 has sent, with its proof.
        let heard = loop {
            let heard = lock(&attacker.heard)[0].clone();
            if heard.len() > 36 + 48 + 60 {
                break heard;
            }
            std::thread::yield_now();
        };
        let mut again = TcpStream::connect(address(&server)).unwrap();
        again.set_read_timeout(Some(LONG)).unwrap();
        again.write_all(&heard).unwrap();
        let _ = again.read_to_end(&mut Vec::new());
        let one = Session::join(&server.unique_id(), 1, 2, Value::Null, &config).unwrap();
        drop((zero.join().unwrap(), one));
    });
}
