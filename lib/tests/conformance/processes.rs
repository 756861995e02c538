//! Two processes: this test binary runs itself again as the other one.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::harness::*;
use tinynccl::config::TransportChoice;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, EndpointInfo, LinkPair, Received};

const ROLE: &str = "TINYNCCL_TEST_CHILD";
const MARK: &str = "INFO ";

/// The other process: echoes every message until its peer is gone. It does nothing unless it is started for that.
#[test]
fn child_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let endpoint = Endpoint::new(1, SECRET, &of_rank(&config(role.parse().unwrap()), 1)).unwrap();
    println!("\n{MARK}{}", serde_json::to_string(&endpoint.info()).unwrap());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let info: EndpointInfo = serde_json::from_str(&line).unwrap();
    let bell = Doorbell::new().unwrap();
    let mut link = connect(&endpoint, 0, &info, &bell);
    let lost: Result<()> = (0u32..).try_for_each(|seq| {
        let mut message = None;
        while message.is_none() {
            message = link.recv.peek()?.map(|(h, data)| (h, data.to_vec()));
            if message.is_none() {
                if !link.recv.arm()? {
                    sleep(&bell, &[link.recv.interest()]);
                }
                link.recv.disarm();
                bell.drain();
            }
        }
        link.recv.release()?;
        let (h, data) = message.unwrap();
        assert_eq!(h.seq, seq);
        until("credit", || link.send.send_from(&h, &data).map(|sent| sent.then_some(())).transpose())
    });
    assert!(matches!(lost, Err(Error::PeerLost { peer: 0, .. })), "{lost:?}");
}

fn connect(endpoint: &Endpoint, peer_rank: usize, info: &EndpointInfo, bell: &std::sync::Arc<Doorbell>) -> LinkPair {
    let to = ConnectTo { comm: 0, peer_rank, info, channel: 0, options: OPTIONS };
    endpoint.connect(&to, bell, &|| None, PATIENCE).unwrap()
}

fn start(transport: TransportChoice) -> (Child, BufReader<ChildStdout>, Endpoint, LinkPair, std::sync::Arc<Doorbell>) {
    let (child, stdout, endpoint, info) = meet(transport);
    let bell = Doorbell::new().unwrap();
    let link = connect(&endpoint, 1, &info, &bell);
    (child, stdout, endpoint, link, bell)
}

/// Starts the other process; both know how to reach each other.
fn meet(transport: TransportChoice) -> (Child, BufReader<ChildStdout>, Endpoint, EndpointInfo) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::child_process", "--nocapture", "--test-threads=1"])
        .env(ROLE, transport.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let info: EndpointInfo = loop {
        let mut line = String::new();
        assert!(stdout.read_line(&mut line).unwrap() > 0, "the child ended");
        if let Some(info) = line.strip_prefix(MARK) {
            break serde_json::from_str(info).unwrap();
        }
    };
    let endpoint = Endpoint::new(0, SECRET, &of_rank(&config(transport), 0)).unwrap();
    writeln!(child.stdin.take().unwrap(), "{}", serde_json::to_string(&endpoint.info()).unwrap()).unwrap();
    (child, stdout, endpoint, info)
}

fn shared_memory_files() -> Vec<String> {
    std::fs::read_dir("/dev/shm")
        .map(|dir| dir.filter_map(|e| Some(e.ok()?.file_name().to_string_lossy().into_owned())).collect())
        .unwrap_or_default()
}

fn exchange(link: &mut LinkPair, seqs: std::ops::Range<u32>) {
    for seq in seqs {
        let len = [0, 8, 24, 25, 5000, OPTIONS.max_message][seq as usize % 6];
        send_from(link, seq, len);
        recv_into(link, seq, len);
    }
}

#[test]
fn messages_cross_and_closing_ends_the_other_process() {
    let verbs = has_verbs().then_some((TransportChoice::Verbs, "verbs"));
    for (transport, kind) in [(TransportChoice::Auto, "shm"), (TransportChoice::Tcp, "tcp")].into_iter().chain(verbs) {
        let (mut child, _stdout, _endpoint, mut link, _bell) = start(transport);
        assert_eq!(link.kind, kind);
        exchange(&mut link, 0..300);
        drop(link);
        assert!(child.wait().unwrap().success());
    }
}

#[test]
fn a_killed_process_is_noticed_by_sleepers_and_askers_and_leaves_nothing() {
    for transport in transports() {
        let before = shared_memory_files();
        let (mut child, _stdout, _endpoint, link, bell) = start(transport);
        let mut end = link;
        exchange(&mut end, 0..20);
        assert!(end.recv.peek().unwrap().is_none());
        // Asleep when it happens, or about to be: the hang-up wakes.
        assert!(!end.recv.arm().unwrap());
        child.kill().unwrap();
        sleep(&bell, &[end.recv.interest()]);
        end.recv.disarm();
        // Who woke and finds nothing learns why before it sleeps again.
        let lost = until("the loss", || end.recv.arm().err());
        assert!(matches!(lost, Error::PeerLost { rank: 0, peer: 1, .. }), "{lost}");
        assert!(is_peer_lost(&end.recv.check_peer(), 0));
        let lost = end.recv.recv_into(&header(20, 8), &mut [0; 8]);
        assert!(is_peer_lost(&lost, 0), "{lost:?}");
        until("the loss", || end.send.check_peer().err());
        let lost = end.send.send_from(&header(20, 8), &payload(20, 8));
        assert!(is_peer_lost(&lost, 0), "{lost:?}");
        child.wait().unwrap();
        let left: Vec<String> = shared_memory_files().into_iter().filter(|f| !before.contains(f)).collect();
        assert!(!left.iter().any(|f| f.contains("nccl")), "{left:?}");
    }
}

#[test]
fn what_a_killed_process_sent_before_is_received() {
    for transport in transports() {
        let (mut child, _stdout, _endpoint, mut link, _bell) = start(transport);
        send_from(&mut link, 0, 100);
        send_from(&mut link, 1, 5000);
        // Both echoes are here, or the second would not be.
        until("both echoes", || {
            link.recv.progress().unwrap();
            link.send.is_flushed().then_some(())
        });
        recv_into(&mut link, 0, 100);
        let whole = until("the second echo", || link.recv.peek().unwrap().map(|(h, d)| (h, d.len())));
        assert_eq!((whole.0.seq, whole.1), (1, 5000));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut dst = vec![0; 5000];
        assert_eq!(link.recv.recv_into(&header(1, 5000), &mut dst).unwrap(), Received::Done);
        assert!(dst == payload(1, 5000));
        let lost = until("the loss", || link.recv.check_peer().err());
        assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
    }
}

#[test]
fn a_process_that_is_killed_while_it_connects_is_an_error_in_time() {
    for transport in transports() {
        // Killed when we wait for it for the nth time.
        for n in 1..=3 {
            let (child, _stdout, endpoint, info) = meet(transport);
            let child = std::cell::RefCell::new(child);
            let asked = std::cell::Cell::new(0);
            let kill = || {
                asked.set(asked.get() + 1);
                if asked.get() == n {
                    child.borrow_mut().kill().unwrap();
                }
                None
            };
            let bell = Doorbell::new().unwrap();
            let to = ConnectTo { comm: 0, peer_rank: 1, info: &info, channel: 0, options: OPTIONS };
            let lost = match endpoint.connect(&to, &bell, &kill, PATIENCE) {
                Err(e) => e,
                Ok(mut link) => {
                    // It was faster. Now it is gone.
                    child.borrow_mut().kill().unwrap();
                    until("the loss", || link.recv.check_peer().err())
                }
            };
            assert!(matches!(lost, Error::PeerLost { peer: 1, .. }), "{transport}: {lost}");
            child.borrow_mut().wait().unwrap();
        }
    }
}

#[test]
fn a_process_that_is_killed_in_a_flood_is_lost_to_the_sender() {
    for transport in transports() {
        let (mut child, _stdout, _endpoint, mut link, _bell) = start(transport);
        let max = OPTIONS.max_message;
        let mut sent = 0;
        // Its echoes are not taken, so it comes to a stop, and so do we: in the middle of something.
        let lost = until("the loss", || {
            let outcome = link.send.send_from(&header(sent, max), &payload(sent, max));
            if let Ok(true) = outcome {
                sent += 1;
                if sent == 5 {
                    child.kill().unwrap();
                }
            }
            outcome.err().or_else(|| link.send.check_peer().err())
        });
        assert!(matches!(lost, Error::PeerLost { rank: 0, peer: 1, .. }), "{transport}: {lost}");
        child.wait().unwrap();
    }
}
