//! The program as a user runs it, over its own device in user space. Built with the feature `verbs`, the tests report
//! that they are skipped where there is no device; README.md shows how to run them in a virtual machine.

use std::io::{self, Write};
use std::time::Duration;

use assert_cmd::assert::Assert;

fn rdma_write(arguments: &[&str]) -> Assert {
    let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_rdma-write"));
    command.args(arguments).timeout(Duration::from_secs(120)).assert()
}

fn stderr(assert: &Assert) -> String {
    String::from_utf8(assert.get_output().stderr.clone()).expect("text")
}

#[test]
fn wrong_options_are_usage_errors() {
    for bytes in ["0", "63", "67108865", "-1", "8K"] {
        rdma_write(&["--bytes", bytes]).code(2);
    }
    for arguments in [&["--mtu", "100"][..], &["peer"]] {
        rdma_write(arguments).code(2);
    }
}

/// The output of a run without a subcommand; `None` without an RDMA device.
fn both_sides(arguments: &[&str]) -> Option<String> {
    let assert = rdma_write(arguments);
    if cfg!(feature = "verbs") && assert.get_output().status.code() == Some(77) {
        let text = stderr(&assert);
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains("scripts/rxe-vm.sh") && text.contains("rdma link add"), "{text}");
        // Not through a macro, whose output the test harness would capture.
        let _ = writeln!(io::stderr(), "SKIPPED: a test of rdma-write: {}", text.trim());
        return None;
    }
    Some(String::from_utf8(assert.success().get_output().stdout.clone()).expect("text"))
}

/// The indented lines of `side` below its line that begins with `title`.
fn below<'a>(text: &'a str, side: &str, title: &str) -> Vec<&'a str> {
    let own = text.lines().filter_map(|l| l.strip_prefix(side)?.strip_prefix(" | "));
    own.skip_while(|l| !l.starts_with(title)).skip(1).take_while(|l| l.starts_with("  ")).map(str::trim).collect()
}

#[test]
fn each_side_sees_what_it_should() {
    let Some(text) = both_sides(&[]) else { return };
    let sent = below(&text, "client", "WRITE, ");
    assert_eq!(sent, ["completion: wr_id 1, status SUCCESS (0), opcode RDMA_WRITE"], "{text}");
    let seen = below(&text, "server", "after the WRITE");
    assert_eq!(seen[0], "no completion: no notice of it", "{text}");
    let told = below(&text, "server", "asleep");
    let expected = "opcode RECV_RDMA_WITH_IMM, byte_len 8192, imm_data 0xc0ffee";
    assert!(told[0].contains(expected), "{text}");
    let read = below(&text, "client", "READ, ");
    assert!(read[0].ends_with("opcode RDMA_READ, byte_len 8192") && read[1] == "every byte is the server's", "{text}");
    assert_eq!(below(&text, "server", "after the READ")[0], "no completion: no notice of it", "{text}");
}

#[test]
fn each_fault_is_refused_and_breaks_both_queue_pairs() {
    let Some(text) = both_sides(&["--bytes", "5000"]) else { return };
    for (title, status) in [
        ("WRITE with a wrong rkey", "REM_ACCESS_ERR"),
        ("WRITE beyond the end", "REM_ACCESS_ERR"),
        ("WRITE to a memory region without", "REM_ACCESS_ERR"),
        ("WRITE to a queue pair without", "REM_INV_REQ_ERR"),
    ] {
        let client = below(&text, "client", title);
        assert!(client[0].starts_with(&format!("completion: wr_id 1, status {status}")), "{title}: {text}");
        assert!(client[1].starts_with("completion: wr_id 2, status WR_FLUSH_ERR"), "{title}: {text}");
        assert_eq!(client[2], "our QP is now in state ERR", "{title}: {text}");
        let server = below(&text, "server", &format!("after the {title}"));
        assert!(server.contains(&"our QP is now in state ERR"), "{title}: {text}");
        assert!(server.contains(&"our memory is as it was"), "{title}: {text}");
    }
}

#[test]
fn odd_sizes_and_many_packets() {
    for arguments in [["--bytes", "64", "--mtu", "256"], ["--bytes", "100001", "--mtu", "1024"]] {
        let Some(text) = both_sides(&arguments) else { return };
        assert!(text.contains(&format!("byte_len {}, imm_data 0xc0ffee", arguments[1])), "{text}");
    }
}
