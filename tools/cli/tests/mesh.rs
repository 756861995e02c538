//! `mesh` among nodes that are network namespaces: the test program starts itself a second time in a separate one.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Stdio};

use program_kit::testing;

/// Environment variable that is set in the process inside the namespace.
const INSIDE: &str = "MESH_TEST_INSIDE";

/// Runs `inside` in a separate network namespace, as root there, in a separate process.
fn in_namespace(test: &str, inside: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return inside();
    }
    let namespace = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "--"]);
        command
    };
    if !namespace().args(["ip", "link"]).output().is_ok_and(|tried| tried.status.success()) {
        return testing::skipped(test, "no network namespace for us here, or no iproute2 (apt-get install iproute2)");
    }
    let program = std::env::current_exe().expect("this program's path");
    let mut again = namespace();
    again.arg(program).args(["--exact", &format!("mesh::{test}"), "--nocapture"]).env(INSIDE, "1");
    let outcome = testing::run(&mut again);
    assert_eq!(outcome.code, Some(0), "{}{}", outcome.stdout, outcome.stderr);
}

/// A node that waits for its virtual links.
struct Node {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Node {
    fn new(rank: usize, store: &str) -> Node {
        let wait = r#"echo here; read -r line; exec "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--net", "--", "sh", "-c", wait, "sh", env!("CARGO_BIN_EXE_tinynccl-cli"), "mesh", "--check"]);
        place(&mut command, rank, store).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("unshare");
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line of the node");
        assert_eq!(line, "here\n");
        let node = Node { process, output };
        node.ip("link set lo up");
        node
    }

    /// `ip` in the node's namespace.
    fn ip(&self, arguments: &str) -> String {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.process.id().to_string(), "--net", "ip"]).args(arguments.split(' '));
        testing::output(&mut command)
    }

    fn go(&mut self) {
        self.process.stdin.take().expect("piped").write_all(b"go\n").expect("the node waits");
    }

    fn status(mut self) -> Option<i32> {
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("its output");
        assert_eq!(rest, "", "only the first node prints");
        self.process.wait().expect("its end").code()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Of a failed test; else it has ended.
        let _ = self.process.kill();
    }
}

fn place<'a>(command: &'a mut Command, rank: usize, store: &str) -> &'a mut Command {
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env("TINYNCCL_SECRET", "secret of a test");
    command.env("MASTER_ADDR", store).env("MASTER_PORT", "29555")
}

fn ip(arguments: &str) -> String {
    testing::output(Command::new("ip").args(arguments.split(' ')))
}

/// Waits until the kernel has seen that a link is up, which may take it a second.
fn await_up(show: impl Fn() -> String) {
    while !show().contains("state UP") {}
}

/// A line of three nodes, with node 0 in the middle; `more` adds further links between the others. The links vanish
/// some time after their nodes, so those of each line have a separate `name`.
fn line(name: &str, more: impl FnOnce(&Node, &Node)) -> (program_kit::process::Outcome, [Option<i32>; 2]) {
    let mut nodes = [Node::new(1, "10.77.1.1"), Node::new(2, "10.77.2.1")];
    for (number, node) in (1..).zip(&nodes) {
        let pid = node.process.id();
        ip(&format!("link add {name}{number} type veth peer name cable netns {pid}"));
        ip(&format!("addr add 10.77.{number}.1/24 dev {name}{number}"));
        ip(&format!("link set {name}{number} up"));
        node.ip(&format!("addr add 10.77.{number}.2/24 dev cable"));
        node.ip("link set cable up");
        await_up(|| ip(&format!("link show {name}{number}")));
        await_up(|| node.ip("link show cable"));
    }
    more(&nodes[0], &nodes[1]);
    nodes.iter_mut().for_each(Node::go);
    let mut first = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    let outcome = testing::run(place(&mut first, 0, "10.77.1.1").args(["mesh", "--check"]));
    (outcome, nodes.map(Node::status))
}

#[test]
fn a_line_and_a_cable_that_does_not_answer() {
    in_namespace("a_line_and_a_cable_that_does_not_answer", || {
        ip("link set lo up");
        let (outcome, others) = line("first", |_, _| {});
        let text = &outcome.stdout;
        assert_eq!((outcome.code, others), (Some(0), [Some(0); 2]), "{text}{}", outcome.stderr);
        assert!(text.starts_with("3 nodes, 2 cables\n"), "{text}");
        assert!(
            text.contains("node 0 - node 2: a cable\n  first2 10.77.2.1 - cable 10.77.2.2, 10.77.2.0/24"),
            "{text}"
        );
        assert_eq!(text.matches(", ping ").count(), 2, "{text}");
        assert!(text.contains("node 1 - node 2: no common subnet, through node 0\n"), "{text}");

        // One subnet by its addresses, but no link.
        let (outcome, others) = line("second", |one, two| {
            for (host, node) in (1..).zip([one, two]) {
                node.ip("link add stray type veth peer name end");
                node.ip(&format!("addr add 10.77.3.{host}/24 dev stray"));
                for port in ["end", "stray"] {
                    node.ip(&format!("link set {port} up"));
                }
                await_up(|| node.ip("link show stray"));
            }
        });
        let text = &outcome.stdout;
        assert_eq!((outcome.code, others), (Some(1), [Some(1); 2]), "{text}{}", outcome.stderr);
        assert!(text.contains("node 1 - node 2: a cable\n  stray 10.77.3.1 - stray 10.77.3.2"), "{text}");
        assert!(text.contains("FAILED: the ping of node 1: ") && text.contains("the ping of node 2: "), "{text}");
    });
}

/// Without a job: the ports of this machine alone.
#[test]
fn alone_it_lists_this_node() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("mesh.svg");
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    let text = testing::output(command.args(["mesh", "--check", "--svg", picture.to_str().unwrap()]));
    assert!(text.starts_with("1 node, 0 cables\n\nnode 0: "), "{text}");
    assert!(std::fs::read_to_string(picture).unwrap().contains("<title>1 node, 0 cables</title>"));
}
