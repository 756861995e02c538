//! RDMA devices of one host share port 4791 while others come and go.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use softroce::{SendOp, Service, Status};

use crate::end::{End, loopback};

const NEIGHBOUR: &str = "SOFTROCE_TEST_NEIGHBOUR";
const READY: &str = "the neighbour is ready";

/// Another process with an open RDMA device, until it is killed.
#[test]
fn a_neighbour() {
    if std::env::var_os(NEIGHBOUR).is_none() {
        return;
    }
    let _end = End::new(&loopback(), Service::Rc);
    println!("{READY}");
    loop {
        std::thread::park();
    }
}

fn neighbour() -> Child {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "churn::a_neighbour", "--nocapture"])
        .env(NEIGHBOUR, "1")
        .stdout(Stdio::piped())
        .spawn()
        .expect("started");
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    assert!(out.lines().any(|line| line.expect("text").contains(READY)));
    child
}

#[test]
fn neighbours_that_come_and_go_disturb_nobody() {
    let (a, b) = (End::new(&loopback(), Service::Rc), End::new(&loopback(), Service::Rc));
    // One direction as packets of another host come: by the sockets that all RDMA devices share.
    let as_from_elsewhere = |attr: &mut softroce::QpAttr| {
        if let Some(path) = &mut attr.path {
            path.local = false;
        }
    };
    a.connect_with(&b.card(), as_from_elsewhere);
    b.connect(&a.card());
    let mut neighbours: Vec<Child> = (0..3).map(|_| neighbour()).collect();
    for round in 0..60 {
        a.send(round, SendOp::Write(b.card().remote), 0, 100_000);
        assert_eq!(a.wait().status, Status::Success);
        if round % 10 == 9 {
            let mut gone = neighbours.remove(0);
            gone.kill().expect("killed");
            gone.wait().expect("waited");
            neighbours.push(neighbour());
        }
    }
    for mut child in neighbours {
        child.kill().expect("killed");
        child.wait().expect("waited");
    }
}
