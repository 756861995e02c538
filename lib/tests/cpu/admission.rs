//! Addresses at which the ranks of a job listen, and connections that they accept: ranks as processes started by hand.
//!
//! This test binary runs itself again, once per rank.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use tinynccl::bootstrap::Server;
use tinynccl::bootstrap::interface::local_addresses;
use tinynccl::config::{PortRange, TransportChoice};
use tinynccl::transport::Endpoint;
use tinynccl::{Comm, Config, Error, ReduceOp, Secret};

use program_kit::port::{Port, environment};

/// Set for a process that is one rank.
const ROLE: &str = "TINYNCCL_TEST_ADMISSION";
/// As `openssl rand -hex 32` makes them.
const SECRETS: [&str; 2] = [
    "5f1d0c6f6c7b1b9e0d9d0f0a9c3f4f7e1a2b3c4d5e6f708192a3b4c5d6e7f809",
    "0a9c3f4f7e1a2b3c4d5e6f708192a3b4c5d6e7f8095f1d0c6f6c7b1b9e0d9d0f",
];

/// Warnings of this process, in the order in which they came.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            WARNINGS.lock().expect("no panic").push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// The warnings from now on that hold `text`, and came before this returns.
fn warnings(text: &str) -> Vec<String> {
    WARNINGS.lock().expect("no panic").iter().filter(|w| w.contains(text)).cloned().collect()
}

fn listen_to_warnings() {
    // Another test may have been first.
    let _ = log::set_logger(&Warnings);
    log::set_max_level(log::LevelFilter::Warn);
}

/// One rank: adds up, prints the sum, and stays until its input ends. It does nothing unless it is started for that.
#[test]
fn a_rank() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    listen_to_warnings();
    let comm = match Comm::from_env() {
        Ok(comm) => comm,
        Err(e) => {
            println!("\nfailed: {e}");
            return;
        }
    };
    println!("\nwarned {} times", warnings("this job has no secret").len());
    let mut x = [0.0];
    comm.all_reduce(&[1.0f32], &mut x, ReduceOp::Sum).expect("all_reduce");
    println!("\nsum {}", x[0]);
    std::io::stdin().lock().read_line(&mut String::new()).expect("input");
    comm.close().expect("nothing has failed");
}

#[test]
fn a_port_that_is_held_is_free_for_whoever_asks_for_it_by_number() {
    let port = Port::loopback();
    let refused = || TcpStream::connect(port.at).expect_err("nobody listens").kind();
    assert_eq!(refused(), std::io::ErrorKind::ConnectionRefused);
    let listener = TcpListener::bind(port.at).expect("a free port");
    TcpStream::connect(port.at).expect("the listener's");
    // Not only dropped: a process that another test starts has a copy of each descriptor until it executes a program.
    socket2::SockRef::from(&listener).shutdown(Shutdown::Both).expect("it listens");
    drop(listener);
    assert_eq!(refused(), std::io::ErrorKind::ConnectionRefused);
}

/// A rank that was started by hand, with the rendezvous at `master`.
fn rank(rank: usize, world: usize, master: SocketAddr, settings: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "admission::a_rank", "--nocapture", "--test-threads=1"])
        .env(ROLE, "1")
        .envs(environment(master, rank, world))
        .env("TINYNCCL_TUNE", "off")
        .env_remove("TINYNCCL_SECRET")
        .envs(settings.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process")
}

/// Outcome that a rank prints, and the number of its warnings that there is no secret; `None` if it printed no number.
fn said(child: &mut Child) -> (String, Option<usize>) {
    let mut warned = None;
    for line in BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok) {
        if let Some(times) = line.strip_prefix("warned ") {
            warned = times.split(' ').next().and_then(|n| n.parse().ok());
        } else if line.starts_with("sum ") || line.starts_with("failed: ") {
            return (line, warned);
        }
    }
    ("it ended without a word".to_owned(), warned)
}

fn end(children: impl IntoIterator<Item = Child>) {
    let mut children: Vec<Child> = children.into_iter().collect();
    // Their input ends for all of them before the first is waited for.
    children.iter_mut().for_each(|c| drop(c.stdin.take()));
    children.iter_mut().for_each(|c| drop(c.wait()));
}

/// Inodes of the sockets that a process holds.
fn sockets(pid: u32) -> HashSet<u64> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process of ours").flatten();
    let name = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).ok()?.to_str().map(str::to_owned);
    links.filter_map(name).filter_map(|n| n.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()).collect()
}

/// The TCP addresses at which a process listens.
fn listening(pid: u32) -> Vec<SocketAddr> {
    let ours = sockets(pid);
    let mut all = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        for line in text.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            const LISTEN: &str = "0A";
            if fields[3] == LISTEN && ours.contains(&fields[9].parse().expect("an inode")) {
                let (ip, port) = fields[1].split_once(':').expect("an address");
                all.push(SocketAddr::new(address(ip), u16::from_str_radix(port, 16).expect("a port")));
            }
        }
    }
    all
}

/// Words of the machine's order, in hexadecimal.
fn address(hex: &str) -> IpAddr {
    let words = hex.as_bytes().chunks(8).map(|w| std::str::from_utf8(w).expect("ASCII"));
    let bytes: Vec<u8> = words.flat_map(|w| u32::from_str_radix(w, 16).expect("hexadecimal").to_ne_bytes()).collect();
    match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(four) => IpAddr::V4(Ipv4Addr::from(four)),
        Err(_) => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).expect("sixteen bytes"))),
    }
}

#[test]
fn a_job_of_one_host_listens_on_loopback_alone() {
    for transport in ["shm", "tcp"] {
        let port = Port::loopback();
        let mut ranks = [0, 1].map(|r| rank(r, 2, port.at, &[("TINYNCCL_TRANSPORT", transport)]));
        for child in &mut ranks {
            assert_eq!(said(child), ("sum 2".to_owned(), Some(0)), "{transport}");
        }
        for (r, child) in ranks.iter().enumerate() {
            let all = listening(child.id());
            assert!(!all.is_empty() && all.iter().all(|a| a.ip().is_loopback()), "{transport}, rank {r}: {all:?}");
        }
        end(ranks);
    }
}

/// An address of this host that others may reach, if it has one.
fn reachable() -> Option<IpAddr> {
    let all = local_addresses(&Config::default()).expect("interfaces");
    all.iter().find(|a| !a.loopback && a.ip.is_ipv4()).map(|a| a.ip)
}

#[test]
fn ranks_started_by_hand_with_one_secret_meet_and_one_without_is_warned_about_once() {
    let Some(ip) = reachable() else { return };
    let file = tempfile::NamedTempFile::new().expect("a file");
    writeln!(&file, "{}", SECRETS[0]).expect("written");
    let path = file.path().to_str().expect("UTF-8");
    for (zero, one, warned) in [
        (vec![], vec![], [1, 0]),
        (vec![("TINYNCCL_SECRET", SECRETS[0])], vec![("TINYNCCL_SECRET_FILE", path)], [0, 0]),
    ] {
        let port = Port::new(ip);
        let mut ranks = [rank(0, 2, port.at, &zero), rank(1, 2, port.at, &one)];
        for (child, times) in ranks.iter_mut().zip(warned) {
            assert_eq!(said(child), ("sum 2".to_owned(), Some(times)));
        }
        // The rendezvous is at another address, but the ranks are on one host: for their links loopback will do.
        let links = listening(ranks[1].id());
        assert!(!links.is_empty() && links.iter().all(|a| a.ip().is_loopback()), "{links:?}");
        end(ranks);
    }
}

#[test]
fn a_leftover_rank_of_an_older_start_does_not_take_the_place_of_the_new_one() {
    let port = Port::loopback();
    // It waits for the rank 0 of its own start, which never comes; and is the first at the store of the new one.
    let mut leftover = rank(1, 2, port.at, &[("TINYNCCL_SECRET", SECRETS[0])]);
    let mut zero = rank(0, 2, port.at, &[("TINYNCCL_SECRET", SECRETS[1])]);
    let (outcome, _) = said(&mut leftover);
    assert!(outcome.contains("rank 1 was refused: wrong secret"), "{outcome}");
    let mut one = rank(1, 2, port.at, &[("TINYNCCL_SECRET", SECRETS[1])]);
    for child in [&mut zero, &mut one] {
        assert_eq!(said(child).0, "sum 2");
    }
    end([leftover, zero, one]);
}

#[test]
fn ranks_with_a_wrong_or_missing_secret_are_told_so_on_both_sides() {
    for theirs in [&[("TINYNCCL_SECRET", SECRETS[1])][..], &[]] {
        let port = Port::loopback();
        let patience = [("TINYNCCL_SECRET", SECRETS[0]), ("TINYNCCL_CONNECT_TIMEOUT", "4")];
        let mut ranks = [rank(0, 2, port.at, &patience), rank(1, 2, port.at, theirs)];
        let [zero, one] = ranks.each_mut().map(|child| said(child).0);
        assert!(one.contains("wrong secret") && one.contains("TINYNCCL_SECRET is not the same"), "{one}");
        assert!(zero.contains("rank 1") && zero.contains("refused: wrong secret"), "{zero}");
        end(ranks);
    }
}

#[test]
fn ranks_that_encrypt_meet_with_a_secret_of_their_own_alone() {
    let encrypt = ("TINYNCCL_ENCRYPT", "1");
    for more in [("TINYNCCL_TRANSPORT", "tcp"), ("TINYNCCL_TCP_RAILS", "1"), ("TINYNCCL_TRANSPORT", "auto")] {
        let port = Port::loopback();
        let settings = [encrypt, ("TINYNCCL_SECRET", SECRETS[0]), more];
        let mut ranks = [0, 1].map(|r| rank(r, 2, port.at, &settings));
        for child in &mut ranks {
            assert_eq!(said(child).0, "sum 2", "{more:?}");
        }
        end(ranks);
    }
    // What both would encrypt with, anyone can compute.
    let port = Port::loopback();
    let mut ranks = [0, 1].map(|r| rank(r, 2, port.at, &[encrypt]));
    for child in &mut ranks {
        let outcome = said(child).0;
        assert!(outcome.contains("TINYNCCL_ENCRYPT") && outcome.contains("set TINYNCCL_SECRET"), "{outcome}");
    }
    end(ranks);
    for encrypting in [0, 1] {
        let port = Port::loopback();
        let secret = [("TINYNCCL_SECRET", SECRETS[0]), ("TINYNCCL_CONNECT_TIMEOUT", "4")];
        let mut ranks = [0, 1].map(|r| {
            let settings: Vec<_> = secret.into_iter().chain((r == encrypting).then_some(encrypt)).collect();
            rank(r, 2, port.at, &settings)
        });
        for child in &mut ranks {
            let outcome = said(child).0;
            assert!(outcome.contains("TINYNCCL_ENCRYPT is") && outcome.contains("for all ranks"), "{outcome}");
        }
        end(ranks);
    }
}

/// Connects `n` times and sends bytes that are no hello; waits until the connection is rejected, every time.
fn strangers(address: SocketAddr, n: usize) {
    for _ in 0..n {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(&[b'x'; 200]).expect("room in the buffer");
        // The end, maybe with a reset.
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

#[test]
fn many_strangers_make_few_lines_in_the_log() {
    listen_to_warnings();
    const RANK: usize = 4711;
    let mut config = Config::default();
    config.transport = TransportChoice::Tcp;
    let endpoint = Endpoint::local(RANK, Secret::random().expect("random bytes"), &config).expect("an endpoint");
    strangers(endpoint.info().tcp[0], 300);
    let ours = format!("rank {RANK}: rejected connections");
    let first = warnings(&ours);
    assert!(first.len() == 1 && first[0].contains("does not speak our protocol"), "{first:?}");
    drop(endpoint);
    let all = warnings(&ours);
    assert!(all.len() == 2 && all[1].ends_with("300 in all"), "{all:?}");

    let server = Server::start("127.0.0.1:0".parse().expect("an address"), 1, &config).expect("a store");
    let address = server.unique_id().addresses()[0];
    strangers(address, 300);
    let ours = format!("rendezvous store at {address}: turned away");
    let first = warnings(&ours);
    assert!(first.len() == 1 && first[0].contains("not a tinynccl hello"), "{first:?}");
    drop(server);
    let all = warnings(&ours);
    assert!(all.len() == 2 && all[1].ends_with("300 in all"), "{all:?}");
}

#[test]
fn links_listen_at_the_ports_that_were_named() {
    // In a separate process: one that another test forks here holds our sockets, too, until it runs its program.
    const ALONE: &str = "TINYNCCL_TEST_PORTS";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().expect("this binary"));
        alone.args(["--exact", "admission::links_listen_at_the_ports_that_were_named", "--nocapture"]).env(ALONE, "1");
        let output = alone.output().expect("a process");
        let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        return assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }
    // Held by this test: below the ports that the kernel gives away, so that no other process takes it in between.
    let (first, port) = (10_000 + std::process::id() as u16 % 10_000..30_000)
        .find_map(|port| Some((TcpListener::bind(("127.0.0.1", port)).ok()?, port)))
        .expect("a free port");
    let mut config = Config::default();
    config.port_range = PortRange::new(port, port);
    let secret = Secret::random().expect("random bytes");
    let e = Endpoint::local(0, secret, &config).expect_err("the port is taken");
    let text = e.to_string();
    assert!(matches!(e, Error::Config { .. }) && !text.contains('\n'), "{text}");
    assert!(text.contains(&format!("TINYNCCL_PORT_RANGE=\"{port}-{port}\"")) && text.contains("are taken"), "{text}");
    drop(first);
    let endpoint = Endpoint::local(0, secret, &config).expect("the port is free");
    assert_eq!(endpoint.info().tcp, [SocketAddr::from(([127, 0, 0, 1], port))]);
    // A connection that it closed may stay in the kernel; its successor listens there all the same.
    strangers(endpoint.info().tcp[0], 1);
    drop(endpoint);
    Endpoint::local(0, secret, &config).expect("the port is free again");
}

/// Set for a process that reads its settings.
const READER: &str = "TINYNCCL_TEST_READER";

#[test]
fn a_setting_that_is_not_text_is_refused_and_not_taken_for_none_or_for_another() {
    const TEST: &str = "admission::a_setting_that_is_not_text_is_refused_and_not_taken_for_none_or_for_another";
    if std::env::var_os(READER).is_some() {
        let config = Config::from_env().map(drop);
        let place = tinynccl::bootstrap::rendezvous_from_env(&Config::default()).map(drop);
        let text = |outcome: tinynccl::Result<()>| outcome.map_or_else(|e| e.to_string(), |()| "fine".to_owned());
        println!("\n@{} @{}", text(config).replace('\n', " "), text(place).replace('\n', " "));
        return;
    }
    let said = |name: &str, value: &[u8]| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", TEST, "--nocapture"]).env(READER, "1").stdin(Stdio::null());
        // A world of one that needs no other.
        command.envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")]);
        let port = Port::loopback();
        command.env("MASTER_PORT", port.at.port().to_string()).env("TORCHELASTIC_RUN_ID", "a");
        command.env(name, OsStr::from_bytes(value));
        let out = String::from_utf8(command.output().expect("its end").stdout).expect("text");
        let line = out.lines().find_map(|line| line.strip_prefix('@')).unwrap_or_else(|| panic!("{out}")).to_owned();
        let (config, place) = line.split_once(" @").expect("two of them");
        (config.to_owned(), place.to_owned())
    };
    assert_eq!(said("TINYNCCL_TIMEOUT", b"9"), ("fine".to_owned(), "fine".to_owned()));
    let secret = [b"\xff\xfe and sixteen more characters".as_slice(), b"                "];
    for value in secret {
        let (config, _) = said("TINYNCCL_SECRET", value);
        assert!(config.contains("TINYNCCL_SECRET") && config.contains("expected"), "{config}");
        assert!(!config.contains("sixteen"), "{config}");
    }
    for name in ["TINYNCCL_SECRET_FILE", "TINYNCCL_IFNAME", "TINYNCCL_TRACE", "TINYNCCL_ALGO"] {
        let (config, _) = said(name, b"a\xffb");
        assert!(config.contains(name) && config.contains("UTF-8"), "{config}");
    }
    for name in ["MASTER_ADDR", "TORCHELASTIC_RUN_ID", "LOCAL_RANK"] {
        let (_, place) = said(name, b"1\xff");
        assert!(place.contains(name) && place.contains("UTF-8"), "{place}");
    }
}
