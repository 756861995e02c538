//! The program as a user runs it, over its own device in user space. Built with the feature `verbs`, the tests that
//! need a device report that they are skipped where there is none; README.md shows how to run them in a virtual
//! machine.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use assert_cmd::assert::Assert;

fn verbs_hello(arguments: &[&str]) -> Assert {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_verbs-hello"));
    command.args(arguments).timeout(Duration::from_secs(120)).assert()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).expect("text")
}

#[test]
fn wrong_options_are_usage_errors() {
    for arguments in [
        &["--mtu", "1500"][..],
        &["--port", "0"],
        &["--timeout", "never"],
        &["--recv-bytes", "0"],
        &["--api", "fast"],
        &["peer"],
        &["list", "more"],
    ] {
        verbs_hello(arguments).code(2);
    }
}

#[cfg(not(feature = "verbs"))]
#[test]
fn built_without_verbs_it_says_what_the_crate_needs() {
    let server = Server::start(&[]);
    let text = stderr(&verbs_hello(&["client", &server.2, "--api", "safe"]).code(77));
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("cargo run -p verbs-hello --features verbs") && text.contains("libibverbs-dev"), "{text}");
    // The program that starts both sides passes it on.
    let text = stderr(&verbs_hello(&["--api", "safe", "--brief"]).code(77));
    assert!(text.contains("error: the client cannot run here; it says why above"), "{text}");
}

#[cfg(not(feature = "verbs"))]
#[test]
fn without_an_interface_it_says_what_a_device_needs() {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_verbs-hello"));
    let assert = command.arg("list").env("TINYROCE_DEVICES", ",").timeout(Duration::from_secs(60)).assert().code(77);
    let text = stderr(&assert);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("no RDMA device here") && text.contains("TINYROCE_DEVICES"), "{text}");
}

fn stdout(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stdout.clone()).expect("text")
}

/// True if there is an RDMA device, as there is without the feature. If not, checks that the program says so and
/// reports the skip.
fn device() -> bool {
    if cfg!(not(feature = "verbs")) {
        return true;
    }
    let assert = verbs_hello(&["list"]);
    if assert.get_output().status.code() != Some(77) {
        return true;
    }
    let text = stderr(&assert);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("scripts/rxe-vm.sh") && text.contains("rdma link add"), "{text}");
    // Not through a macro, whose output the test harness would capture.
    let _ = writeln!(io::stderr(), "SKIPPED: a test of verbs-hello: {}", text.trim());
    false
}

struct Server(Child, BufReader<std::process::ChildStdout>, String);

impl Server {
    fn start(arguments: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_verbs-hello"))
            .args(["server", "--listen", "127.0.0.1:0", "--brief"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        lines.read_line(&mut line).expect("a first line");
        let Some(address) = line.trim().strip_prefix("listening on ") else {
            let _ = child.kill();
            panic!("{line:?} for the address: {:?}", child.wait_with_output());
        };
        Server(child, lines, address.to_owned())
    }

    /// Exit code, standard output and standard error.
    fn finish(mut self) -> (Option<i32>, String, String) {
        let (mut out, mut err) = (String::new(), String::new());
        self.1.read_to_string(&mut out).expect("text");
        self.0.stderr.take().expect("piped").read_to_string(&mut err).expect("text");
        (self.0.wait().expect("it ends").code(), out, err)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn both_interfaces_deliver_the_text_both_ways() {
    if !device() {
        return;
    }
    for api in if cfg!(feature = "verbs") { &["steps", "safe"][..] } else { &["steps"] } {
        let text = stdout(&verbs_hello(&["--api", api, "--text", "hello, grüße"]).success());
        assert!(text.starts_with("Dev "), "{text}");
        assert_eq!(text.matches("received 14 bytes: \"hello, grüße\"").count(), 2, "{text}");
        assert_eq!(text.matches("opcode RECV, byte_len 14").count(), 2, "{text}");
        assert_eq!(text.matches("opcode SEND").count(), 2, "{text}");
    }
}

#[test]
fn every_step_is_confirmed_by_the_device() {
    if !device() {
        return;
    }
    let text = stdout(&verbs_hello(&[]).success());
    let client: Vec<&str> = text.lines().filter(|l| l.starts_with("client | ")).collect();
    let at = |what: &str| client.iter().position(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {text}"));
    let order = ["state RESET", "the device says INIT", "the device says RTR", "the device says RTS"].map(at);
    assert!(order.is_sorted(), "{text}");
    for name in ["qp_access_flags", "path_mtu", "rq_psn", "dest_qp_num", "timeout", "retry_cnt", "rnr_retry"] {
        assert!(at(name) > 0, "{text}");
    }
}

#[test]
fn the_smaller_mtu_counts() {
    if !device() {
        return;
    }
    let server = Server::start(&["--mtu", "512"]);
    let text = stdout(&verbs_hello(&["client", &server.2, "--mtu", "256"]).success());
    let line = text.lines().find(|l| l.trim_start().starts_with("path_mtu")).expect("path_mtu");
    assert_eq!(line.split_whitespace().nth(1), Some("256"), "{text}");
    let (code, out, err) = server.finish();
    assert_eq!(code, Some(0), "{out}{err}");
}

#[test]
fn what_does_not_exist_is_named_with_what_does() {
    if !device() {
        return;
    }
    for (arguments, expected) in [
        (&["list", "--device", "nosuch"][..], "no RDMA device called nosuch (--device); there are: "),
        (&["list", "--port", "77"], "not 77 (--port)"),
        (&["list", "--gid-index", "250"], "has no entry 250; it has 0 ("),
    ] {
        let text = stderr(&verbs_hello(arguments).code(1));
        assert!(text.starts_with("error: ") && text.contains(expected), "{text}");
    }
}

#[test]
fn a_text_longer_than_the_receivers_buffer_fails_on_both_sides() {
    if !device() {
        return;
    }
    let server = Server::start(&["--recv-bytes", "8"]);
    let text = stderr(&verbs_hello(&["client", &server.2]).code(1));
    // The specification requires REM_INV_REQ_ERR and LOC_LEN_ERR; rxe in Linux 6.1 reports REM_OP_ERR and
    // LOC_QP_OP_ERR.
    assert!(text.contains("REM_INV_REQ_ERR") || text.contains("REM_OP_ERR"), "{text}");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1));
    assert!(err.contains("LOC_LEN_ERR") || err.contains("LOC_QP_OP_ERR"), "{err}");
}

#[test]
fn strangers_and_peers_that_leave_end_the_server_with_a_reason() {
    if !device() {
        return;
    }
    let server = Server::start(&[]);
    let mut stranger = TcpStream::connect(&server.2).expect("connects");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sends");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1));
    assert!(err.contains("is no verbs-hello: expected qpn=, got 'GET'"), "{err}");

    let server = Server::start(&[]);
    drop(TcpStream::connect(&server.2).expect("connects"));
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1));
    assert!(err.contains("before its endpoint") || err.contains("send to 127.0.0.1"), "{err}");
}

#[test]
fn a_peer_that_never_sends_is_an_error_at_the_deadline() {
    if !device() {
        return;
    }
    let server = Server::start(&["--timeout", "1"]);
    let mut peer = TcpStream::connect(&server.2).expect("connects");
    let mut mine = String::new();
    BufReader::new(peer.try_clone().expect("clone")).read_line(&mut mine).expect("its endpoint");
    let gid = mine.split_whitespace().find(|f| f.starts_with("gid=")).expect("a GID").to_owned();
    peer.write_all(format!("qpn=16777000 psn=1 {gid} lid=0 mtu=1024\nready\n").as_bytes()).expect("sends");
    drop(peer);
    // For the server the connection is up: a receiver cannot detect that its peer is gone.
    let (code, out, err) = server.finish();
    assert_eq!(code, Some(1), "{out}");
    assert!(err.contains("no completion of wr_id 1 within") && err.contains("--timeout"), "{err}");
}

#[test]
fn a_peer_that_does_not_answer_is_an_error_of_the_send() {
    if !device() {
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut mine = String::new();
        BufReader::new(stream.try_clone().expect("clone")).read_line(&mut mine).expect("its endpoint");
        let gid = mine.split_whitespace().find(|f| f.starts_with("gid=")).expect("a GID");
        // No QP has this number, so every packet to it is dropped.
        stream.write_all(format!("qpn=16777000 psn=1 {gid} lid=0 mtu=1024\nready\n").as_bytes()).expect("sends");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let text = stderr(&verbs_hello(&["client", &address, "--timeout", "60"]).code(1));
    assert!(text.contains("wr_id 2, status RETRY_EXC_ERR (12)"), "{text}");
    server.join().expect("the test's server ends");
}

#[test]
fn nobody_listens_and_nobody_comes() {
    if !device() {
        return;
    }
    let text = stderr(&verbs_hello(&["client", "127.0.0.1:1"]).code(1));
    assert!(text.contains("cannot connect to 127.0.0.1:1"), "{text}");
    let (code, _, err) = Server::start(&["--timeout", "0.1"]).finish();
    assert_eq!(code, Some(1));
    assert!(err.contains("no client came within 100ms"), "{err}");
}
