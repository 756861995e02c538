//! See [`crate::fuzzing`].

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::UniqueId;
use super::environment::detect::{self, Source};
use super::environment::interface::{self, LocalAddress};
use super::server::store::Store;
use super::wire::frame::{Decoder, Hello, MAX_FRAME, MAX_REGISTER};
use super::wire::message::{ToRank, ToStore};
use crate::fuzzing::variable;

/// A stream to the store, or from it. First byte: length of the chunks it comes in. Cutting changes nothing.
pub fn bootstrap_frame(data: &[u8]) {
    let Some((&chunk, stream)) = data.split_first() else { return };
    let cut = frames(stream.chunks(usize::from(chunk).max(1)));
    assert_eq!(cut, frames([stream]));
    for body in &cut.1 {
        let _ = serde_json::from_slice::<ToRank>(body);
        let _ = serde_json::from_slice::<ToStore>(body);
    }
    if let Some(Ok((hello, sealed))) = cut.0 {
        assert_eq!(Hello::decode(&hello.encode(sealed)), Ok((hello, sealed)));
    }
}

/// The hello if any (or why it is refused), and the bodies after it up to the first error.
type Frames = (Option<Result<(Hello, bool), String>>, Vec<Vec<u8>>);

fn frames<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Frames {
    let mut decoder = Decoder::default();
    let (mut hello, mut bodies) = (None, Vec::new());
    for chunk in chunks {
        decoder.extend(chunk);
        if hello.is_none() {
            let bytes = decoder.hello().transpose();
            hello = bytes.map(|b| b.and_then(|b| Hello::decode(&b)));
        }
        if !matches!(hello, Some(Ok(_))) {
            continue;
        }
        while let Ok(Some(body)) = decoder.frame(MAX_REGISTER) {
            assert!(body.len() <= MAX_REGISTER && MAX_REGISTER <= MAX_FRAME);
            bodies.push(body);
        }
    }
    (hello, bodies)
}

/// Messages of four ranks to the store, a line each: the rank's digit, then JSON, or `+` (it joins) or `!` (its
/// connection broke).
pub fn store_request(data: &[u8]) {
    const WORLD: usize = 4;
    let start = Instant::now();
    let mut store = Store::new(Some(WORLD));
    for (n, line) in data.split(|&b| b == b'\n').take(200).enumerate() {
        let now = start + Duration::from_millis(n as u64);
        let Some((digit, rest)) = line.split_first() else { continue };
        let rank = usize::from(digit & 3);
        match rest {
            b"+" => {
                let hello = Hello { nonce: [0; 16], rank: rank as u32, world_size: WORLD as u32 };
                match store.admit(&hello) {
                    Ok(admitted) => {
                        assert_eq!(admitted, rank);
                        store.register(&hello, serde_json::Value::Null, now);
                    }
                    Err(refusal) => {
                        assert!(!refusal.reason.is_empty());
                        store.note(refusal.reason);
                    }
                }
            }
            b"!" => store.lost(rank, "it broke".to_owned()),
            b"" => store.tick(),
            json => match serde_json::from_slice::<ToStore>(json) {
                Ok(message) => {
                    let text = serde_json::to_vec(&message).expect("what was parsed can be written");
                    let again: ToStore = serde_json::from_slice(&text).expect("what was written can be parsed");
                    // Numbers in a rank's endpoints may differ in their last digit; they are opaque to the store.
                    assert!(again == message || matches!(message, ToStore::Register { .. }));
                    store.handle(rank, message, now);
                }
                Err(_) => continue,
            },
        }
        for (to, message) in store.take_out() {
            assert!(to < WORLD);
            serde_json::to_vec(&message).expect("every answer can be written");
        }
    }
    for rank in 0..WORLD {
        store.lost(rank, "the end".to_owned());
    }
    assert!(store.finished());
}

/// The text of a unique id: what is accepted goes to text and back.
pub fn unique_id(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(id) = text.parse::<UniqueId>() {
        let written = id.to_string();
        assert!(written.is_ascii() && !written.contains(char::is_whitespace));
        assert_eq!(written.parse::<UniqueId>().ok(), Some(id));
    }
}

/// A launcher's environment: lines of `NAME=value`.
pub fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lookup = |name: &str| variable(&text, name);
    let is_rank = detect::started_as_rank(&lookup);
    if let Ok(plan) = detect::plan(&lookup) {
        let half = lookup("OMPI_COMM_WORLD_SIZE").is_some() || lookup("PMI_SIZE").is_some();
        assert!(is_rank || half || (plan.launcher == detect::Launcher::Slurm && plan.world_size == 1));
        assert!(plan.rank < plan.world_size);
        if let Source::Address { hosts, port, .. } = plan.source {
            assert!(port > 0 && !hosts.is_empty() && hosts.iter().all(|(_, host)| !host.is_empty()), "{hosts:?}");
        }
    }
}

/// A selection of interfaces (first line), and the addresses of a peer (the others).
pub fn interfaces(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut lines = text.lines();
    let filter = lines.next();
    let address = |interface: &str, ip: [u8; 4], prefix| LocalAddress {
        interface: interface.to_owned(),
        ip: IpAddr::from(ip),
        prefix,
        loopback: ip[0] == 127,
    };
    let all = || {
        vec![
            address("lo", [127, 0, 0, 1], 8),
            address("eth0", [10, 1, 2, 3], 24),
            address("docker0", [172, 17, 0, 1], 16),
            address("point", [192, 168, 7, 3], 0),
        ]
    };
    match interface::select(all(), filter) {
        Ok(chosen) => assert!(chosen.iter().all(|a| all().contains(a)) && !chosen.is_empty()),
        Err(e) => assert!(e.to_string().contains("TINYNCCL_IFNAME")),
    }
    let peers: Vec<SocketAddr> = lines.take(8).filter_map(|line| line.parse().ok()).collect();
    for same_host in [false, true] {
        let ordered = interface::order_candidates(&all(), &peers, same_host);
        assert!(ordered.len() <= peers.len() && ordered.iter().all(|(a, _)| peers.contains(a)));
    }
}
