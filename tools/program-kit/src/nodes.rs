//! Network namespaces as nodes: a veth link per pair, each with its own subnet, which NCCL's own sockets cannot use.
//! Needs `unshare` and `ip`, and user namespaces where it is not run by root.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::again::{self, Process};
use crate::testing::LIMIT;

/// Returns true in the process that makes the nodes of a test, in its own namespaces. The test starts that process; a
/// node calls `act` with its name.
pub fn makes_nodes(test: &str, act: impl FnOnce(&str)) -> bool {
    makes_nodes_for(LIMIT, test, act)
}

/// [`makes_nodes`] for a test that may take as long as `limit`.
pub fn makes_nodes_for(limit: Duration, test: &str, act: impl FnOnce(&str)) -> bool {
    match again::role() {
        Some(role) if role == "inside" => return true,
        Some(role) => act(&role),
        None => match possible() {
            Err(why) => eprintln!("SKIPPED: {test}: {why}"),
            // The user namespace makes us root over network namespaces.
            Ok(()) => again::start(&["unshare", "-Urn"], test, "inside", &[]).finish_within(limit),
        },
    }
    false
}

fn possible() -> Result<(), String> {
    for (program, arguments) in [("ip", &["-V"][..]), ("unshare", &["-Urn", "true"])] {
        let run = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        match run {
            Ok(status) if status.success() => {}
            Ok(_) => return Err(format!("{program} {} fails: no user namespaces here?", arguments.join(" "))),
            Err(e) => return Err(format!("{program}: {e}")),
        }
    }
    // veth pairs need a module that some kernels lack.
    let veth = ["-Urn", "ip", "link", "add", "name", "x", "type", "veth", "peer", "name", "y"];
    let made = Command::new("unshare").args(veth).stderr(Stdio::null()).status();
    if made.is_ok_and(|s| s.success()) { Ok(()) } else { Err("no veth devices here".to_owned()) }
}

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().expect("ip");
    assert!(status.success(), "ip {words}");
}

/// A node in its own network namespace, in which it waits.
pub fn node(test: &str, name: &str, settings: &[(&str, &str)]) -> Process {
    let mut node = again::start(&["unshare", "-n"], test, name, settings);
    assert_eq!(node.line(), "here");
    node
}

/// Runs a command in the network of a node.
pub fn within(node: &Process, words: &str) -> std::process::Output {
    let mut command = Command::new("nsenter");
    command.args(["-t", &node.id().to_string(), "-n"]).args(words.split(' ')).output().expect("nsenter")
}

/// Connects two nodes by a veth link, with 10.0.`subnet`.0/30.
pub fn cable(a: (&str, &Process), b: (&str, &Process), subnet: u8) {
    cable_with(a, b, |end| format!("10.0.{subnet}.{end}/30"));
}

/// Connects two nodes by a veth link, whose ends 1 and 2 have these addresses.
pub fn cable_with(a: (&str, &Process), b: (&str, &Process), address: impl Fn(usize) -> String) {
    ip(&format!("link add name {} netns {} type veth peer name {} netns {}", a.0, a.1.id(), b.0, b.1.id()));
    let inside = |node: &Process, words: &str| within(node, &format!("ip {words}"));
    for (end, (name, node)) in [(1, a), (2, b)] {
        for words in [format!("addr add {} dev {name}", address(end)), format!("link set {name} up")] {
            let run = inside(node, &words);
            assert!(run.status.success(), "{words} in node {name}: {}", String::from_utf8_lossy(&run.stderr));
        }
    }
    // The kernel takes a moment to see that both ends are plugged in.
    for (name, node) in [a, b] {
        let start = Instant::now();
        let is_up = || {
            let shown = inside(node, &format!("-o link show dev {name}")).stdout;
            String::from_utf8_lossy(&shown).contains("state UP")
        };
        while !is_up() {
            assert!(start.elapsed() < LIMIT, "{name} does not come up");
        }
    }
}

/// Bytes that an interface of this node has sent.
pub fn sent_over(interface: &str) -> u64 {
    sent_in(&std::fs::read_to_string("/proc/self/net/dev").unwrap(), interface)
}

/// Bytes that an interface has sent, by the text of a node's `/proc/net/dev`.
pub fn sent_in(text: &str, interface: &str) -> u64 {
    let line = text.lines().find_map(|l| l.trim().strip_prefix(interface)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {interface} in {text}")).split_whitespace().nth(8).unwrap().parse().unwrap()
}

/// Runs a command in the network of a node; it must succeed.
#[track_caller]
pub fn run(node: &Process, words: &str) {
    let run = within(node, words);
    assert!(run.status.success(), "{words}: {}", String::from_utf8_lossy(&run.stderr));
}
