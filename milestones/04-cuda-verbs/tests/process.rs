//! The program as a user runs it. Without a GPU, or built with the feature `verbs` and without an RDMA device, the
//! tests that need one report that they are skipped. README.md shows how to run them in a virtual machine with a
//! device, and on a machine with a GPU.

#[cfg(feature = "verbs")]
mod no_memory;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use program_kit::testing::{self, output, refused, skipped};

fn cuda_verbs(arguments: &[&str]) -> Command {
    let mut command = testing::program_or("CUDA_VERBS_PROGRAM", env!("CARGO_BIN_EXE_cuda-verbs"));
    command.args(arguments);
    command
}

/// True when the program can use `what` (`--wire verbs`, `--buffer gpu`, `--path dmabuf`). If it cannot, checks that it
/// gives the reason in one line and exits with status 77, and reports the skip.
fn here(what: &[&str]) -> bool {
    let outcome = testing::run(&mut cuda_verbs(&[&["probe", "--bytes", "8K"], what].concat()));
    let text = outcome.stderr;
    if outcome.code != Some(77) {
        assert_eq!(outcome.code, Some(0), "{text}");
        return true;
    }
    // The device in user space is always there; scripts/verbs-tests.sh sets TINYNCCL_TEST_VERBS when another is.
    let must = cfg!(not(feature = "verbs")) || std::env::var_os("TINYNCCL_TEST_VERBS").is_some();
    let must = must && what.contains(&"verbs");
    assert!(!must, "an RDMA device must be here: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    skipped("a test of cuda-verbs", &text);
    false
}

struct Server(Child, BufReader<std::process::ChildStdout>, String);

impl Server {
    fn start(arguments: &[&str]) -> Server {
        let mut child = cuda_verbs(&["server", "--listen", "127.0.0.1:0", "--brief"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        lines.read_line(&mut line).expect("a first line");
        let address = line.trim().strip_prefix("listening on ").expect("the address").to_owned();
        Server(child, lines, address)
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
fn wrong_options_are_usage_errors() {
    for arguments in [
        &["--bytes", "0"][..],
        &["--chunk", "2G"],
        &["--slots", "1"],
        &["--path", "magic"],
        &["--buffer", "tape"],
        &["--wire", "rope"],
        &["--rounds", "0"],
        &["peer"],
        &["probe", "more"],
    ] {
        refused(&mut cuda_verbs(arguments), 2, &[]);
    }
}

#[test]
fn every_byte_arrives_on_any_machine_and_host_memory_is_called_so() {
    let text = output(&mut cuda_verbs(&["--buffer", "host", "--bytes", "1000001", "--chunk", "64K", "--rounds", "2"]));
    assert!(text.starts_with("buffer: 1000001 bytes of HOST memory"), "{text}");
    assert!(text.contains("2 peer memory: not taken\n    why:  the buffer is host memory"), "{text}");
    assert!(text.contains("TAKEN"), "{text}");
    for round in ["round 1", "round 2"] {
        assert!(text.contains(&format!("client | {round}: 1000001 bytes in 16 chunks, ")), "{text}");
        assert!(text.contains(&format!("server | {round}: every byte checked")), "{text}");
    }
    assert!(text.contains("client | done") && text.contains("server | done"), "{text}");
}

#[test]
fn every_stage_that_is_not_taken_has_a_reason_and_a_next_step() {
    let text = output(&mut cuda_verbs(&["probe", "--bytes", "8K"]));
    let lines: Vec<&str> = text.lines().collect();
    for (at, _) in lines.iter().enumerate().filter(|(_, line)| line.ends_with(": not taken")) {
        assert!(lines[at + 1].starts_with("    why:  ") && lines[at + 2].starts_with("    next: "), "{text}");
    }
    assert_eq!(text.matches("TAKEN").count(), 1, "{text}");
    for line in ["buffer: ", "wire: ", "1 dmabuf: ", "2 peer memory: ", "3 staging: "] {
        assert!(text.lines().any(|l| l.starts_with(line)), "{line}: {text}");
    }
}

#[test]
fn over_tcp_on_any_machine() {
    let arguments = ["--buffer", "host", "--wire", "tcp", "--bytes", "300001", "--chunk", "4K", "--slots", "5"];
    let text = output(&mut cuda_verbs(&arguments));
    assert!(text.contains("wire: TCP\n    why:  RDMA is not wanted (--wire tcp)\n"), "{text}");
    assert!(text.contains("staging over TCP") && text.contains("round 3: every byte checked"), "{text}");
}

#[test]
fn the_log_says_which_way_was_agreed_on() {
    let arguments = ["--buffer", "host", "--wire", "tcp", "--bytes", "64K", "--rounds", "1"];
    let outcome = testing::run(cuda_verbs(&arguments).env("RUST_LOG", "info"));
    let text = outcome.stderr;
    assert_eq!(outcome.code, Some(0), "{text}");
    for line in ["INFO  verbs_kit::side] side channel: connected to 127.0.0.1:", "INFO  cuda_verbs::run] staging: "] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn both_sides_must_agree() {
    let server = Server::start(&["--buffer", "host", "--bytes", "64K"]);
    let text = refused(&mut cuda_verbs(&["client", &server.2, "--buffer", "host", "--bytes", "128K"]), 1, &[]);
    assert!(text.contains("the other side has --bytes 65536") && text.contains("give both the same"), "{text}");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1), "{err}");
}

#[test]
fn strangers_and_peers_that_leave_end_the_server_with_a_reason() {
    let server = Server::start(&["--buffer", "host"]);
    let mut stranger = TcpStream::connect(&server.2).expect("connects");
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sends");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1));
    assert!(err.contains("is no cuda-verbs: expected bytes=, got 'GET'"), "{err}");

    // Over TCP, in the middle of a transfer.
    let server = Server::start(&["--buffer", "host", "--bytes", "64K", "--chunk", "16K"]);
    let mut peer = TcpStream::connect(&server.2).expect("connects");
    peer.write_all(b"bytes=65536 chunk=16384 rounds=3 wire=tcp rdma=false\nround 1\n").expect("sends");
    peer.write_all(&[0; 20_000]).expect("sends");
    peer.shutdown(std::net::Shutdown::Write).expect("shuts down");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("closed the connection in chunk 1, 12768 bytes missing"), "{err}");
}

#[test]
fn wrong_bytes_are_found() {
    let server = Server::start(&["--buffer", "host", "--bytes", "4K", "--rounds", "1"]);
    let mut peer = TcpStream::connect(&server.2).expect("connects");
    peer.write_all(b"bytes=4096 chunk=4096 rounds=1 wire=tcp rdma=false\nround 1\n").expect("sends");
    peer.write_all(&[0; 4096]).expect("sends");
    peer.write_all(b"landed\n").expect("sends");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("what came is not what was sent: byte 0 of 4096 is 0x00, expected "), "{err}");
}

#[test]
fn a_peer_that_never_sends_is_an_error_at_the_deadline() {
    let server = Server::start(&["--buffer", "host", "--bytes", "4K", "--timeout", "1"]);
    let mut peer = TcpStream::connect(&server.2).expect("connects");
    peer.write_all(b"bytes=4096 chunk=4096 rounds=3 wire=tcp rdma=false\nround 1\n").expect("sends");
    let (code, _, err) = server.finish();
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("no progress in time (--timeout)"), "{err}");
    drop(peer);
}

#[cfg(not(feature = "verbs"))]
#[test]
fn without_an_interface_there_is_no_rdma() {
    let text = refused(cuda_verbs(&["--wire", "verbs"]).env("TINYROCE_DEVICES", ","), 77, &["TINYROCE_DEVICES"]);
    assert_eq!(text.lines().count(), 1, "{text}");
    let probe = ["probe", "--buffer", "host", "--bytes", "8K"];
    let text = output(cuda_verbs(&probe).env("TINYROCE_DEVICES", ","));
    assert!(text.contains("wire: TCP\n    why:  no RDMA device here"), "{text}");
}

#[test]
fn a_path_that_does_not_work_here_is_told_from_a_failure() {
    let text = refused(&mut cuda_verbs(&["--buffer", "host", "--path", "peer-memory"]), 77, &[]);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("peer memory (--path) does not work here: the buffer is host memory"), "{text}");
    let text = refused(&mut cuda_verbs(&["--buffer", "host", "--wire", "tcp", "--path", "dmabuf"]), 77, &[]);
    assert!(text.contains("dmabuf (--path) does not work here: "), "{text}");
}

#[test]
fn over_rdma_staging_moves_every_byte() {
    if !here(&["--wire", "verbs"]) {
        return;
    }
    for cut in [
        ["--bytes=1000001", "--chunk=64K", "--slots=2"],
        ["--bytes=70000", "--chunk=999", "--slots=7"],
        ["--bytes=1", "--chunk=1", "--slots=2"],
    ] {
        let all = [&["--buffer=host", "--wire=verbs", "--path=staging"][..], &cut].concat();
        let text = output(&mut cuda_verbs(&all));
        assert!(text.contains("registered with ") && text.contains("staging over RDMA ("), "{text}");
        assert!(text.contains("server | round 3: every byte checked"), "{text}");
    }
}

#[test]
fn over_rdma_sides_with_different_slots_and_wires_understand_each_other() {
    if !here(&["--wire", "verbs"]) {
        return;
    }
    for (server, client) in [
        (["--slots=2", "--wire=auto"], ["--slots=9", "--wire=verbs"]),
        (["--slots=9", "--wire=verbs"], ["--slots=2", "--wire=auto"]),
        (["--slots=3", "--wire=auto"], ["--slots=2", "--wire=tcp"]),
    ] {
        let shared = ["--buffer=host", "--bytes=500001", "--chunk=10000"];
        let other = Server::start(&[&shared[..], &server].concat());
        let address = other.2.clone();
        let text = output(&mut cuda_verbs(&[&["client", &address][..], &shared, &client].concat()));
        assert_eq!(text.contains("over RDMA"), !client.contains(&"--wire=tcp"), "{text}");
        let (code, out, err) = other.finish();
        assert_eq!(code, Some(0), "{out}{err}");
        assert!(out.contains("round 3: every byte checked"), "{out}");
    }
}

/// Tests over the stand-in for CUDA's driver, which scripts/gpu-tests.sh leaves out.
#[cfg(not(feature = "verbs"))]
mod standin {
    use super::*;

    /// Over the stand-in for CUDA's driver, whose device memory no processor can access: the RDMA device moves it by
    /// the driver's copies, on both sides.
    #[test]
    fn over_the_card_in_user_space_a_gpus_memory_goes_without_staging() {
        let standin = cuda_standin::folder().expect("built with these tests");
        for cut in [
            ["--bytes=1000001", "--chunk=64K", "--slots=2"],
            ["--bytes=70000", "--chunk=999", "--slots=7"],
            ["--bytes=1", "--chunk=1", "--slots=2"],
        ] {
            let all = [&["--buffer=gpu", "--wire=verbs", "--path=peer-memory"][..], &cut].concat();
            let text = output(cuda_verbs(&all).env("LD_LIBRARY_PATH", &standin));
            assert!(text.contains("2 peer memory: TAKEN: no module is needed, tinyroce"), "{text}");
            assert!(text.contains("a card in user space, for which the driver"), "{text}");
            assert!(text.contains("client | peer memory over RDMA (tinyroce"), "{text}");
            assert!(text.contains("server | round 3: every byte checked"), "{text}");
        }
    }
}

#[test]
fn a_dmabuf_of_host_pages_is_tried_for_real() {
    let text = output(&mut cuda_verbs(&["probe", "--buffer=host", "--bytes=64K"]));
    if !text.contains("HOST memory (a dmabuf of ") {
        skipped("a test of cuda-verbs", "no dmabuf can be made here");
        return;
    }
    if !here(&["--wire", "verbs"]) {
        return;
    }
    // rxe imports none, so the report shows the kernel's own answer. An adapter's driver may import one.
    let stage: Vec<&str> = text.lines().skip_while(|l| !l.starts_with("1 dmabuf: ")).take(2).collect();
    let refused =
        stage[1].contains("exports the buffer, but ibv_reg_dmabuf_mr on ") && stage[1].contains("EOPNOTSUPP (95");
    assert!(stage[0].contains("TAKEN") || refused, "{text}");
    // The buffer is that dmabuf's memory in either case, and its bytes go through staging.
    let text = output(&mut cuda_verbs(&["--buffer=host", "--bytes=100001", "--path=staging"]));
    assert!(text.contains("server | round 3: every byte checked"), "{text}");
}

#[test]
fn a_gpus_memory_by_whatever_way_there_is() {
    if !here(&["--buffer", "gpu"]) {
        return;
    }
    for more in [["--wire=auto", "--slots=2"], ["--wire=tcp", "--slots=4"]] {
        let all = [&["--buffer=gpu", "--bytes=20000001", "--chunk=1M"][..], &more].concat();
        let text = output(&mut cuda_verbs(&all));
        assert!(text.contains(" bytes on GPU 0 ("), "{text}");
        assert!(text.contains("server | round 3: every byte checked"), "{text}");
    }
    let text = refused(&mut cuda_verbs(&["--buffer=gpu", "--gpu=99"]), 77, &[]);
    assert!(text.contains("no GPU 99 (--gpu): there are "), "{text}");
}
