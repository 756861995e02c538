//! Pairs of connected ends over every backend.

use std::io::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tinynccl::config::{SingleCopy, TransportChoice};
use tinynccl::error::Error;
use tinynccl::transport::faulty::{self, Faults};
use tinynccl::transport::relay::Routes;
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, Fabric, LinkPair, inproc};
use tinynccl::{Config, Secret};

pub(crate) use crate::loops::*;

/// Everything here is over within this, or it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const SECRET: Secret = Secret::new([42; 32]);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Backend {
    InProc,
    Shm,
    ZeroCopyShm,
    Tcp,
    TcpTiny,
    TcpStreams,
    TcpTinyStreams,
    DelayedInProc,
    DelayedTcp,
    SplitInProc,
    SplitTcp,
    Verbs,
    TwoQpVerbs,
    SplitVerbs,
    Toy,
    RelayedTcp,
    RelayedShm,
    TwiceRelayedTcp,
    RelayedVerbs,
    Rails,
    RdmaRails,
    SplitRails,
    SealedTcp,
    SealedTcpTiny,
    SealedTcpTinyStreams,
    SplitSealedTcp,
    SealedRelayedTcp,
    SealedRails,
}

pub(crate) fn config(transport: TransportChoice) -> Config {
    let mut config = Config::default();
    config.transport = transport;
    // Such links take messages of any length: `zero_copy` tests that.
    config.single_copy = SingleCopy::Off;
    config
}

/// Encrypted links.
pub(crate) fn sealed() -> Config {
    config(TransportChoice::Tcp).with(|c| c.encrypt = true)
}

/// RDMA over several queue pairs per link.
pub(crate) fn queue_pairs(n: usize) -> Config {
    let mut config = config(TransportChoice::Verbs);
    config.verbs_qps = n;
    config
}

/// Two connected ends, of ranks 0 and 1.
pub(crate) fn ends(backend: Backend) -> [End; 2] {
    let delay = Faults { seed: 1, delay: 3, ..Faults::default() };
    let split = Faults { seed: 2, split: true, delay: 1, ..Faults::default() };
    match backend {
        Backend::InProc => in_process(),
        Backend::DelayedInProc => wrapped(in_process(), |l| faulty::wrap(l, &delay)),
        Backend::SplitInProc => wrapped(in_process(), |l| faulty::wrap(l, &split)),
        Backend::Shm => endpoints(&config(TransportChoice::Shm)),
        Backend::ZeroCopyShm => wrapped(endpoints(&crate::zero_copy::config()), crate::zero_copy::wrap),
        Backend::Tcp => endpoints(&config(TransportChoice::Tcp)),
        Backend::TcpTiny => {
            let mut config = config(TransportChoice::Tcp);
            config.socket_buffer = 16 << 10;
            endpoints(&config)
        }
        Backend::TcpStreams | Backend::TcpTinyStreams => {
            let mut config = config(TransportChoice::Tcp);
            config.tcp_streams = 4;
            config.socket_buffer = if backend == Backend::TcpTinyStreams { 16 << 10 } else { 0 };
            endpoints(&config)
        }
        Backend::DelayedTcp => wrapped(endpoints(&config(TransportChoice::Tcp)), |l| faulty::wrap(l, &delay)),
        Backend::Verbs => endpoints(&config(TransportChoice::Verbs)),
        Backend::TwoQpVerbs => endpoints(&queue_pairs(2)),
        Backend::SplitVerbs => wrapped(endpoints(&queue_pairs(4)), |l| faulty::wrap(l, &split)),
        Backend::SplitTcp => wrapped(endpoints(&config(TransportChoice::Tcp)), |l| faulty::wrap(l, &split)),
        Backend::Toy => {
            let config = config(TransportChoice::Auto);
            between([0, 1].map(|rank| {
                let fabrics: Vec<Box<dyn Fabric>> = vec![Box::new(crate::toy::Toy::bind())];
                Arc::new(Endpoint::with_fabrics(rank, SECRET, &config, fabrics).unwrap())
            }))
        }
        Backend::RelayedTcp => relayed(&config(TransportChoice::Tcp), 1),
        Backend::RelayedShm => relayed(&config(TransportChoice::Shm), 1),
        Backend::TwiceRelayedTcp => relayed(&config(TransportChoice::Tcp), 2),
        Backend::RelayedVerbs => relayed(&config(TransportChoice::Verbs), 1),
        Backend::Rails => rails(|_| ()),
        Backend::RdmaRails => rails(|c| c.net_rdma = true),
        Backend::SplitRails => wrapped(rails(|_| ()), |l| faulty::wrap(l, &split)),
        Backend::SealedTcp => endpoints(&sealed()),
        Backend::SealedTcpTiny => endpoints(&sealed().with(|c| c.socket_buffer = 16 << 10)),
        Backend::SealedTcpTinyStreams => {
            endpoints(&sealed().with(|c| (c.tcp_streams, c.socket_buffer) = (4, 16 << 10)))
        }
        Backend::SplitSealedTcp => wrapped(endpoints(&sealed()), |l| faulty::wrap(l, &split)),
        Backend::SealedRelayedTcp => relayed(&sealed(), 1),
        Backend::SealedRails => rails(|c| c.encrypt = true),
    }
}

fn rails(change: impl Fn(&mut Config)) -> [End; 2] {
    let mut config = config(TransportChoice::Tcp);
    config.tcp_rails = true;
    change(&mut config);
    between([0, 1].map(|rank| Arc::new(tinynccl::transport::rails::endpoint(rank, SECRET, &config).unwrap())))
}

/// Returns true if this build and this machine have RDMA; prints once per process that they do not. With
/// `TINYNCCL_TEST_VERBS=1` they must.
pub(crate) fn has_verbs() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| match Endpoint::new(0, SECRET, &config(TransportChoice::Verbs)) {
        Ok(_) => true,
        Err(e) => {
            assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {e}");
            assert!(matches!(e, Error::Unsupported { .. }), "{e}");
            // Past the test harness, which would keep it to itself.
            let _ = writeln!(std::io::stderr().lock(), "SKIPPED: every test over RDMA: {e}");
            false
        }
    })
}

impl Backend {
    /// Returns true if the backend can be tested here.
    pub(crate) fn is_available(self) -> bool {
        let verbs = [Backend::Verbs, Backend::TwoQpVerbs, Backend::SplitVerbs];
        match self {
            // In a virtual machine with several nodes only where two of them have no common subnet.
            Backend::RelayedVerbs => !matches!(nodes().as_deref(), Some("pair" | "rails" | "triangle")) && has_verbs(),
            _ => !verbs.contains(&self) || has_verbs(),
        }
    }

    /// Faulty links return "not now" before they look at anything.
    pub(crate) fn looks_at_arguments(self) -> bool {
        !matches!(
            self,
            Backend::SplitInProc
                | Backend::SplitTcp
                | Backend::SplitVerbs
                | Backend::SplitRails
                | Backend::SplitSealedTcp
        )
    }

    /// Delays look for a message before they look at the memory for it.
    pub(crate) fn looks_for_a_message_first(self) -> bool {
        !matches!(self, Backend::InProc | Backend::Shm)
    }
}

/// Transports that links between endpoints can be requested to use here.
pub(crate) fn transports() -> Vec<TransportChoice> {
    let mut all = vec![TransportChoice::Tcp, TransportChoice::Shm];
    if has_verbs() {
        all.push(TransportChoice::Verbs);
    }
    all
}

pub(crate) fn wrapped(ends: [End; 2], wrap: impl Fn(LinkPair) -> LinkPair) -> [End; 2] {
    ends.map(|end| End { link: wrap(end.link), ..end })
}

pub(crate) fn in_process() -> [End; 2] {
    let hub = inproc::Hub::new();
    both(|rank| {
        let bell = Doorbell::new().unwrap();
        let to = inproc::ConnectTo { comm: 0, rank, peer_rank: 1 - rank, channel: 0, options: OPTIONS };
        End { link: hub.connect(&to, &bell, &|| None, PATIENCE).unwrap(), bell, endpoints: Vec::new() }
    })
}

/// The topology of the virtual machine that this runs in, if it does.
fn nodes() -> Option<String> {
    std::env::var("RXE_VM").ok()
}

/// In a virtual machine of `scripts/rxe-vm.sh` with several nodes, rank 0 is node a and rank 1 is node b: packets
/// between them cross a network. Otherwise both use the same devices. Names are prefixes: of several rails a node has
/// them all.
pub(crate) fn of_rank(config: &Config, rank: usize) -> Config {
    let mut config = config.clone();
    let nodes = matches!(nodes().as_deref(), Some("pair" | "rails" | "line" | "triangle"));
    if config.transport == TransportChoice::Verbs && nodes {
        config.verbs_device = Some(["rxe_ab", "rxe_ba"][rank].to_owned());
    }
    config
}

pub(crate) fn endpoints(config: &Config) -> [End; 2] {
    between([0, 1].map(|rank| Arc::new(Endpoint::new(rank, SECRET, &of_rank(config, rank)).unwrap())))
}

/// A link between two endpoints.
fn between(endpoints: [Arc<Endpoint>; 2]) -> [End; 2] {
    both(|rank| {
        let bell = Doorbell::new().unwrap();
        let info = endpoints[1 - rank].info();
        let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options: OPTIONS };
        let link = endpoints[rank].connect(&to, &bell, &|| None, PATIENCE).unwrap();
        End { link, bell, endpoints: vec![endpoints[rank].clone()] }
    })
}

/// Ranks 0 and 1 that only reach each other through rank 2, or through ranks 2 and 3.
pub(crate) fn relayed(config: &Config, relays: usize) -> [End; 2] {
    let line = config.transport == TransportChoice::Verbs && nodes().as_deref() == Some("line");
    let of_node = |rank: usize| {
        let mut config = config.clone();
        if line {
            config.verbs_device = Some(["rxe_ab", "rxe_cb", "rxe_ba,rxe_bc"][rank].to_owned());
        }
        config
    };
    let endpoints: Vec<Arc<Endpoint>> =
        (0..2 + relays).map(|rank| Arc::new(Endpoint::new(rank, SECRET, &of_node(rank)).unwrap())).collect();
    let world: Vec<_> = endpoints.iter().map(|e| e.info()).collect();
    let way: Vec<usize> = [0].into_iter().chain(2..2 + relays).chain([1]).collect();
    let hop = |a, b| way.windows(2).any(|w| w == [a, b] || w == [b, a]);
    // On a line the addresses decide it.
    let near = |a: usize, b| if line { !endpoints[a].far(&world).contains(&b) } else { hop(a, b) };
    let routes = || Routes::new(world.len(), near);
    // A relay may receive a request before it has the member table.
    let (ends, between) = endpoints.split_at(2);
    ends.iter().for_each(|e| e.introduce(world.clone(), routes()));
    std::thread::scope(|s| {
        let made = s.spawn(|| {
            both(|rank| {
                let bell = Doorbell::new().unwrap();
                let to =
                    ConnectTo { comm: 0, peer_rank: 1 - rank, info: &world[1 - rank], channel: 0, options: OPTIONS };
                let link = ends[rank].connect(&to, &bell, &|| None, PATIENCE).unwrap();
                assert!(link.kind.ends_with(", relayed"), "{}", link.kind);
                End { link, bell, endpoints: [&[ends[rank].clone()], between].concat() }
            })
        });
        between.iter().for_each(|e| e.introduce(world.clone(), routes()));
        made.join().unwrap()
    })
}

/// Runs `f` for ranks 0 and 1, each in its thread.
pub(crate) fn both<T: Send>(f: impl Fn(usize) -> T + Sync) -> [T; 2] {
    let f = &f;
    std::thread::scope(|s| [0, 1].map(|rank| s.spawn(move || f(rank))).map(|t| t.join().unwrap()))
}
