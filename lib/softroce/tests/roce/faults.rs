//! Loss, delay and traces that the environment sets, each in a separate process.

use std::process::Command;

use softroce::{DELAY_VARIABLE, LOSS_VARIABLE, Remote, SendOp, Service, Status, TRACE_VARIABLE};

use crate::end::{End, loopback, pattern};

const CHILD: &str = "SOFTROCE_TEST_FAULTS";

/// Transfers with the loss, delay and trace of the environment.
#[test]
fn transfers() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (a, b) = (End::new(&loopback(), Service::Rc), End::new(&loopback(), Service::Rc));
    // 1 ms: a lost last packet is sent again soon.
    a.connect_with(&b.card(), |attr| attr.timeout = 8);
    b.connect_with(&a.card(), |attr| attr.timeout = 8);
    for round in 0..20u8 {
        let bytes = pattern(200_000, round);
        a.write(0, &bytes);
        b.recv(u64::from(round), 0, 200_000);
        a.send(1, SendOp::Send, 0, 200_000);
        assert_eq!((b.wait().status, a.wait().status), (Status::Success, Status::Success));
        assert_eq!(b.read(0, 200_000), bytes);
        a.send(2, SendOp::Read(b.card().remote), 1 << 20, 200_000);
        assert_eq!(a.wait().status, Status::Success);
        assert_eq!(a.read(1 << 20, 200_000), bytes);
        let word = Remote { addr: b.card().remote.addr + (1 << 20), ..b.card().remote };
        a.send(3, SendOp::FetchAdd { remote: word, add: 1 }, 64, 8);
        assert_eq!(a.wait().status, Status::Success);
        assert_eq!(a.read(64, 8), u64::from(round).to_ne_bytes().to_vec());
    }
}

fn run(variable: &str, value: &str) {
    let status = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "faults::transfers"])
        .env(CHILD, "1")
        .env(variable, value)
        .status()
        .expect("started");
    assert!(status.success(), "{variable}={value}");
}

#[test]
fn transfers_survive_loss() {
    run(LOSS_VARIABLE, "2");
}

#[test]
fn transfers_survive_a_long_way() {
    run(DELAY_VARIABLE, "300");
}

#[test]
fn a_trace_has_the_packets() {
    let name = std::env::temp_dir().join(format!("softroce-test-{}.pcap", std::process::id()));
    run(TRACE_VARIABLE, name.to_str().expect("text"));
    let trace = std::fs::read(&name).expect("a trace");
    std::fs::remove_file(&name).expect("removed");
    assert_eq!(trace[..4], 0xa1b2_3c4du32.to_le_bytes());
    // The first packet: its record, IPv4, to UDP port 4791, RC SEND_FIRST.
    let ip = 24 + 16;
    assert_eq!((trace[ip], &trace[ip + 22..ip + 24], trace[ip + 28]), (0x45, &4791u16.to_be_bytes()[..], 0));
}
