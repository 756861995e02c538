//! The program as a user runs it: server and client as processes, and the failures between them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;

const PROGRAM: &str = env!("CARGO_BIN_EXE_tcp-echo");

/// A server process, killed at the end of the test.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(extra: &[&str]) -> Server {
        let mut child = Command::new(PROGRAM)
            .args(["server", "--listen", "127.0.0.1:0"])
            .args(extra)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a first line");
        let address = line.trim().strip_prefix("listening on ").expect("the address").to_owned();
        Server { child, address }
    }

    fn finish(mut self) -> (Option<i32>, String) {
        let mut stderr = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("text");
        (self.child.wait().expect("it ends").code(), stderr)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tcp_echo(args: &[&str]) -> assert_cmd::assert::Assert {
    assert_cmd::Command::new(PROGRAM).args(args).timeout(std::time::Duration::from_secs(60)).assert()
}

fn stderr(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).expect("text")
}

#[test]
fn the_log_says_who_connected_and_what_came_of_it() {
    let run = |level| {
        let mut command = assert_cmd::Command::new(PROGRAM);
        command.args(["--round-trips", "3", "--max-size", "64"]).env("RUST_LOG", level);
        stderr(&command.timeout(std::time::Duration::from_secs(60)).assert().success())
    };
    assert_eq!(run("warn"), "");
    let text = run("debug");
    for line in [
        "DEBUG tcp_echo::client] trying 127.0.0.1:",
        "INFO  tcp_echo::client] connected: 127.0.0.1:",
        "INFO  tcp_echo::server] client 127.0.0.1:",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

/// Runs a client against a server that calls `behave` on the first connection. Returns the client's one error line.
fn against(behave: impl FnOnce(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let server = thread::spawn(move || behave(listener.accept().expect("a client").0));
    let assert = tcp_echo(&["client", "--connect", &address, "--round-trips", "3", "--timeout", "5"]).code(1);
    server.join().expect("the test's server ends");
    let text = stderr(&assert);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("error: ") && text.contains(&address), "{text}");
    text
}

/// Reads the header and payload of the client's first frame (8 bytes).
fn first_frame(stream: &mut TcpStream) -> [u8; 16] {
    let mut frame = [0; 16];
    stream.read_exact(&mut frame).expect("a frame");
    frame
}

#[test]
fn alone_it_prints_latency_and_a_table() {
    let assert = tcp_echo(&["--round-trips", "20", "--max-size", "4K"]).success();
    let text = String::from_utf8(assert.get_output().stdout.clone()).expect("text");
    assert!(text.contains("8-byte round trip: min "), "{text}");
    for size in ["8", "32", "128", "512", "2048", "4096"] {
        assert!(text.lines().any(|l| l.split_whitespace().next() == Some(size)), "no row of {size} bytes: {text}");
    }
    assert!(text.contains("every byte came back as it was sent"), "{text}");
    assert_eq!(text.matches(" median ").count(), 6, "four ways to send, one summary, one heading: {text}");
}

#[test]
fn one_server_serves_several_clients_and_survives_a_stranger() {
    let mut server = Server::start(&[]);
    let mut stranger = TcpStream::connect(&server.address).expect("connects");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sends");
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer); // closed, or reset because unread bytes were left
    assert!(answer.is_empty(), "strangers get no answer");
    let args = ["client", "--connect", &server.address, "--round-trips", "5", "--max-size", "100"];
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| tcp_echo(&args).success());
        }
    });
    server.child.kill().expect("it still runs");
    let (_, stderr) = server_output(server);
    assert!(stderr.contains("a frame begins with \"GET \", expected \"ECHO\""), "{stderr}");
}

fn server_output(server: Server) -> (Option<i32>, String) {
    server.finish()
}

#[test]
fn a_frame_over_the_limit_is_refused_by_name() {
    let server = Server::start(&["--max-frame", "1K", "--once"]);
    let assert = tcp_echo(&["client", "--connect", &server.address, "--round-trips", "1", "--max-size", "2K"]).code(1);
    let (code, text) = server.finish();
    assert_eq!(code, Some(1));
    assert!(text.contains("announces a frame of 2048 bytes, the limit is 1024"), "{text}");
    assert!(stderr(&assert).starts_with("error: echo with "), "{}", stderr(&assert));
}

#[test]
fn a_client_that_leaves_within_a_frame_is_named() {
    let server = Server::start(&["--once"]);
    let mut client = TcpStream::connect(&server.address).expect("connects");
    client.write_all(b"ECHO\x64\0\0\0only this").expect("sends");
    drop(client);
    let (code, text) = server.finish();
    assert_eq!(code, Some(1));
    assert!(text.contains("closed the connection within a frame's payload: 9 of 100 bytes"), "{text}");
}

#[test]
fn a_silent_client_is_dropped_at_the_timeout() {
    let server = Server::start(&["--once", "--timeout", "0.2"]);
    let client = TcpStream::connect(&server.address).expect("connects");
    let (code, text) = server.finish();
    assert_eq!(code, Some(1));
    assert!(text.contains("no byte moved within the timeout"), "{text}");
    drop(client);
}

#[test]
fn a_server_that_closes_within_a_frame() {
    let text = against(|mut stream| {
        let frame = first_frame(&mut stream);
        stream.write_all(&frame[..13]).expect("sends");
    });
    assert!(text.contains("within a frame's payload: 5 of 8 bytes"), "{text}");
}

#[test]
fn a_server_that_speaks_something_else() {
    let text = against(|mut stream| {
        first_frame(&mut stream);
        stream.write_all(b"SSH-2.0-x\r\n").expect("sends");
    });
    assert!(text.contains("a frame begins with \"SSH-\""), "{text}");
}

#[test]
fn a_server_that_answers_with_too_much() {
    let text = against(|mut stream| {
        first_frame(&mut stream);
        stream.write_all(b"ECHO\xff\xff\xff\xff").expect("sends");
    });
    assert!(text.contains("announces a frame of 4294967295 bytes, the limit is 8"), "{text}");
}

#[test]
fn a_server_that_changes_a_byte() {
    let text = against(|mut stream| {
        let mut frame = first_frame(&mut stream);
        frame[11] ^= 1;
        stream.write_all(&frame).expect("sends");
    });
    assert!(text.contains("byte 3 of 8 came back as"), "{text}");
}

#[test]
fn a_port_in_use_is_one_clear_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let assert = tcp_echo(&["server", "--listen", &address]).code(1);
    assert_eq!(
        stderr(&assert).trim(),
        format!("error: cannot listen on {address}: Address already in use (os error 98)")
    );
}

#[test]
fn nobody_listening_and_unknown_hosts() {
    let address = "127.0.0.1:1";
    let text = stderr(&tcp_echo(&["client", "--connect", address]).code(1));
    assert!(text.contains(address) && text.contains("Connection refused"), "{text}");
    for host in ["no-such-host.invalid:4701", "localhost", "localhost:99999"] {
        let text = stderr(&tcp_echo(&["client", "--connect", host]).code(1));
        assert!(text.starts_with(&format!("error: cannot resolve {host}")), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn wrong_flags_are_usage_errors() {
    for args in [&["--max-size", "0"][..], &["client", "--timeout", "never"], &["--round-trips", "0"], &["peer"]] {
        tcp_echo(args).code(2);
    }
}
