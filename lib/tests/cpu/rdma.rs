//! A network of two nodes with an RDMA device each, or two, for one test.

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::config::TransportChoice;
use tinynccl::transport::rdma_ports;
use tinynccl::{Comm, Config};

const NETWORK: &str = "TINYNCCL_TEST_NETWORK";
const ID: &str = "TINYNCCL_TEST_ID";
const PHASE: &str = "TINYNCCL_TEST_PHASE";

/// Returns true if networks can be made here; prints once that they cannot. With `TINYNCCL_TEST_VERBS=1` they must.
pub(crate) fn has_verbs() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let mut config = Config::default();
        config.transport = TransportChoice::Verbs;
        let missing = match (rdma_ports(&config), std::env::var_os("RXE_VM")) {
            (Ok(_), Some(_)) => return true,
            (Ok(_), None) => "they change the network: they run in scripts/rxe-vm.sh only".to_owned(),
            (Err(e), _) => e.to_string(),
        };
        assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {missing}");
        let _ = writeln!(std::io::stderr().lock(), "SKIPPED: faults of RDMA networks: {missing}");
        false
    })
}

/// Runs a command of the shell that must succeed.
pub(crate) fn sh(command: &str) {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

fn said(command: &str) -> String {
    let output = Command::new("sh").args(["-ec", command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Two interfaces that are linked, `fNa` (10.1.10N.1) and `fNb` (10.1.10N.2), with the devices `rxe_fNa` and `rxe_fNb`;
/// with two rails also `gNa` (10.1.15N.1) and `gNb`.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) n: u8,
    pub(crate) rails: usize,
}

impl Network {
    pub(crate) fn new(n: u8, mtu: u32) -> Network {
        Network::with_rails(n, mtu, 1)
    }

    pub(crate) fn with_rails(n: u8, mtu: u32, rails: usize) -> Network {
        let network = Network { n, rails };
        for rail in 0..rails {
            let [a, b] = [0, 1].map(|rank| network.on_rail(rail, rank));
            let net = format!("10.1.{}", 100 + 50 * rail + usize::from(n));
            let mac = format!("02:00:00:{:02}:{n:02}", rail + 1);
            // Neighbours are entered: a lost ARP packet would fail the queue pair before any RDMA packet.
            sh(&format!(
                "ip link add {a} address {mac}:01 type veth peer name {b} address {mac}:02
                 ip addr add {net}.1/24 dev {a}; ip addr add {net}.2/24 dev {b}
                 ip link set {a} mtu {mtu} up; ip link set {b} mtu {mtu} up
                 ip neigh replace {net}.2 lladdr {mac}:02 dev {a} nud permanent
                 ip neigh replace {net}.1 lladdr {mac}:01 dev {b} nud permanent
                 rdma link add rxe_{a} type rxe netdev {a}; rdma link add rxe_{b} type rxe netdev {b}"
            ));
        }
        until("all devices are ready", || {
            [0, 1].iter().all(|&r| rdma_ports(&network.config(r)).is_ok_and(|ports| ports.len() == rails))
        });
        network
    }

    pub(crate) fn device(&self, rank: usize) -> String {
        format!("rxe_{}", self.interface(rank))
    }

    pub(crate) fn interface(&self, rank: usize) -> String {
        self.on_rail(0, rank)
    }

    /// The rank's interface on that rail.
    pub(crate) fn on_rail(&self, rail: usize, rank: usize) -> String {
        format!("{}{}{}", ["f", "g"][rail], self.n, ["a", "b"][rank])
    }

    /// Bytes that the rank's interfaces have sent, by rail: headers, acknowledgements and all.
    pub(crate) fn sent_bytes(&self, rank: usize) -> Vec<u64> {
        let of = |rail| {
            let path = format!("/sys/class/net/{}/statistics/tx_bytes", self.on_rail(rail, rank));
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}")).trim().parse().unwrap()
        };
        (0..self.rails).map(of).collect()
    }

    /// Short deadlines, and a queue pair per rail.
    pub(crate) fn config(&self, rank: usize) -> Config {
        let mut config = crate::common::config();
        config.transport = TransportChoice::Verbs;
        let devices: Vec<_> = (0..self.rails).map(|rail| format!("rxe_{}", self.on_rail(rail, rank))).collect();
        config.verbs_device = Some(devices.join(","));
        config.verbs_qps = self.rails;
        // rxe of Linux 6.1 seems to count every lost packet of a message against its retries until the whole message is
        // acknowledged: with 256 KiB, 2 % loss and fewer retries it gave up. Over two rails messages should be striped.
        config.verbs_chunk = if self.rails == 1 { 32 << 10 } else { 256 << 10 };
        (config.timeout, config.connect_timeout) = (Duration::from_secs(5), Duration::from_secs(20));
        config
    }

    /// Drops `percent` of a hundred packets of the first rail, in both directions.
    pub(crate) fn lose(&self, percent: u8) {
        self.treat(0, &format!("loss {percent}%"));
    }

    /// Sets what netem does to packets of that rail, in both directions: `how`.
    pub(crate) fn treat(&self, rail: usize, how: &str) {
        for rank in [0, 1] {
            sh(&format!("tc qdisc replace dev {} root netem limit 100000 {how}", self.on_rail(rail, rank)));
        }
    }

    pub(crate) fn set_mtu(&self, rank: usize, bytes: u32) {
        sh(&format!("ip link set {} mtu {bytes}", self.interface(rank)));
    }

    /// Packets that the interfaces have dropped on purpose.
    pub(crate) fn dropped(&self) -> u64 {
        let of = |rank| {
            let text = said(&format!("tc -s qdisc show dev {}", self.interface(rank)));
            let count =
                text.split("dropped ").nth(1).and_then(|rest| rest.split([',', ' ']).next()?.parse::<u64>().ok());
            count.unwrap_or_else(|| panic!("no count in {text}"))
        };
        of(0) + of(1)
    }

    /// Sum of counters of both devices.
    pub(crate) fn counted(&self, names: &[&str]) -> u64 {
        let of = |rank, name: &str| -> u64 {
            let path = format!("/sys/class/infiniband/{}/ports/1/hw_counters/{name}", self.device(rank));
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}")).trim().parse().unwrap()
        };
        [0, 1].iter().flat_map(|&rank| names.iter().map(move |name| of(rank, name))).sum()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The devices go with their interfaces.
        for rail in 0..self.rails {
            let _ = Command::new("ip").args(["link", "del", &self.on_rail(rail, 0)]).status();
        }
    }
}

pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "it did not come about that {what}");
        std::thread::yield_now();
    }
}

/// Returns true if the child sleeps, or has ended and was not waited for.
pub(crate) fn is_asleep(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    stat.rsplit(") ").next().is_none_or(|rest| rest.starts_with(['S', 'D', 'Z']))
}

/// Runs both at once.
pub(crate) fn both<A: Send, B: Send>(a: impl FnOnce() -> A + Send, b: impl FnOnce() -> B + Send) -> (A, B) {
    std::thread::scope(|s| {
        let a = s.spawn(a);
        let b = b();
        (a.join().unwrap(), b)
    })
}

fn server(network: &Network) -> Server {
    Server::start("127.0.0.1:0".parse().unwrap(), 2, &network.config(0)).unwrap()
}

/// Two ranks as threads, each with its device.
pub(crate) fn run<T: Send>(network: &Network, f: impl Fn(Comm) -> T + Sync) -> [T; 2] {
    let server = server(network);
    let id = server.unique_id();
    let (f, id) = (&f, &id);
    let rank = |rank: usize| move || f(Comm::init(id, rank, 2, network.config(rank)).unwrap());
    both(rank(0), rank(1)).into()
}

/// Rank 0 here, rank 1 as a separate process: this test binary's `test`, which gets its phase from [`child`].
pub(crate) fn with_child(network: &Network, test: &str, phase: &str, timeout: Duration) -> (Comm, Child, Server) {
    let server = server(network);
    let id = server.unique_id();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .envs([(NETWORK, network.n.to_string()), (ID, id.to_string()), (PHASE, phase.to_owned())])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut config = network.config(0);
    config.timeout = timeout;
    (Comm::init(&id, 0, 2, config).unwrap(), child, server)
}

/// Network, id and phase that [`with_child`] has started us for. The network is its parent's.
pub(crate) fn child() -> Option<(std::mem::ManuallyDrop<Network>, UniqueId, String)> {
    let variable = |name: &str| std::env::var(name).ok();
    let network = Network { n: variable(NETWORK)?.parse().unwrap(), rails: 1 };
    Some((std::mem::ManuallyDrop::new(network), variable(ID)?.parse().unwrap(), variable(PHASE)?))
}
