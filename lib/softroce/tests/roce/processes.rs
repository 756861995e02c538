//! Two processes: the test program starts itself a second time.

use std::net::{TcpListener, TcpStream};
use std::process::Command;

use softroce::{Remote, SendOp, Service, Status};

use crate::end::{End, exchange, loopback, pattern};

const PORT: &str = "SOFTROCE_TEST_PORT";

/// The other process: takes a SEND and a WRITE, and exits on request.
#[test]
fn the_other_process() {
    let Ok(port) = std::env::var(PORT) else { return };
    let mut stream = TcpStream::connect(("127.0.0.1", port.parse().expect("a port"))).expect("connected");
    let end = End::new(&loopback(), Service::Rc);
    let theirs = exchange(&mut stream, &end.card());
    end.connect(&theirs);
    end.recv(0, 0, 1 << 20);
    end.recv(1, 0, 0);
    exchange(&mut stream, &end.card());
    let wc = end.wait();
    assert_eq!((wc.status, wc.byte_len), (Status::Success, 300_000));
    assert_eq!(end.read(0, 300_000), pattern(300_000, 1));
    let wc = end.wait();
    assert_eq!((wc.status, wc.byte_len, wc.imm), (Status::Success, 1 << 20, Some([5; 4])));
    assert_eq!(end.read(1 << 20, 1 << 20), pattern(1 << 20, 2));
    // The peer reads and adds meanwhile.
    exchange(&mut stream, &end.card());
}

#[test]
fn two_processes_send_write_read_and_add() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let port = listener.local_addr().expect("an address").port();
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "processes::the_other_process", "--nocapture"])
        .env(PORT, port.to_string())
        .spawn()
        .expect("started");
    let (mut stream, _) = listener.accept().expect("connected");
    let end = End::new(&loopback(), Service::Rc);
    let theirs = exchange(&mut stream, &end.card());
    end.connect(&theirs);
    exchange(&mut stream, &end.card());
    end.write(0, &pattern(300_000, 1));
    end.send(1, SendOp::Send, 0, 300_000);
    assert_eq!(end.wait().status, Status::Success);
    end.write(0, &pattern(1 << 20, 2));
    let at = |offset: u64| Remote { addr: theirs.remote.addr + offset, ..theirs.remote };
    end.send(2, SendOp::WriteImm(at(1 << 20), [5; 4]), 0, 1 << 20);
    assert_eq!(end.wait().status, Status::Success);
    end.send(3, SendOp::Read(at(1 << 20)), 1 << 20, 1 << 20);
    assert_eq!(end.wait().status, Status::Success);
    assert_eq!(end.read(1 << 20, 1 << 20), pattern(1 << 20, 2));
    for _ in 0..10 {
        end.send(4, SendOp::FetchAdd { remote: at(2 << 20), add: 3 }, 0, 8);
        assert_eq!(end.wait().status, Status::Success);
    }
    assert_eq!(end.read(0, 8), 27u64.to_ne_bytes().to_vec());
    exchange(&mut stream, &end.card());
    assert!(child.wait().expect("waited").success());
}
