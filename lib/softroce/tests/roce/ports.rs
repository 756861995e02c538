//! Events of the port, in a separate network namespace: the test program starts itself there a second time.

use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use softroce::{Affected, AsyncEvent, Context, Device, EventKind, Gid, PortState, SendOp, Service, Status};

use crate::end::{End, pattern};

const CHILD: &str = "SOFTROCE_TEST_NAMESPACE";

fn ip(arguments: &str) -> bool {
    Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success())
}

/// The next event, which must be this one.
fn expect(context: &Context, kind: EventKind) {
    let mut fds =
        [libc::pollfd { fd: std::os::fd::AsRawFd::as_raw_fd(&context.async_fd()), events: libc::POLLIN, revents: 0 }];
    // SAFETY: one descriptor, open as long as the context.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), 1, 60_000) };
    assert_eq!(ready, 1, "no event; expected {kind:?}");
    assert_eq!(context.get_async_event(), Ok(AsyncEvent { kind, affected: Affected::Port(1) }));
}

fn ips(context: &Context) -> Vec<IpAddr> {
    context.device().gids().iter().map(Gid::ip).collect()
}

fn device(interface: &str) -> Device {
    Device::list().expect("interfaces").into_iter().find(|d| d.interface() == interface).expect("the interface")
}

/// Addresses and the state of the loopback interface change under an open RDMA device.
fn loopback_changes() {
    assert!(ip("link set lo up") && ip("address flush dev lo") && ip("address add 127.0.0.1/8 dev lo"));
    assert!(ip("address add 192.0.2.1/32 dev lo"));
    let (first, second) = (device("lo").open().expect("opened"), device("lo").open().expect("opened"));
    let v4 = |n: u8| IpAddr::from([192, 0, 2, n]);
    let (loopback, none) = (IpAddr::from([127, 0, 0, 1]), Gid::default().ip());
    assert_eq!(ips(&first), [loopback, v4(1)]);
    assert!(ip("address add 192.0.2.2/32 dev lo"));
    for context in [&first, &second] {
        expect(context, EventKind::GidChange);
        assert_eq!(ips(context), [loopback, v4(1), v4(2)]);
    }
    assert!(ip("address del 192.0.2.1/32 dev lo"));
    expect(&first, EventKind::GidChange);
    assert_eq!((ips(&first), first.port().gids), (vec![loopback, none, v4(2)], 3));
    assert!(first.path(Gid::from(v4(2)), 1).is_err(), "an empty entry is no address");
    assert!(ip("address add 192.0.2.3/32 dev lo"));
    expect(&first, EventKind::GidChange);
    assert_eq!(ips(&first), [loopback, v4(3), v4(2)]);
    // The new addresses carry packets.
    let (a, b) = (End::at(&first, Service::Rc, 1), End::at(&first, Service::Rc, 2));
    a.connect_with(&b.card(), |attr| {
        if let Some(path) = &mut attr.path {
            path.local = false;
        }
    });
    b.connect(&a.card());
    a.write(0, &pattern(10_000, 3));
    a.send(1, SendOp::Write(b.card().remote), 0, 10_000);
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(b.read(0, 10_000), pattern(10_000, 3));
    assert_eq!(first.port().state, PortState::Active);
    assert!(ip("link set lo down"));
    expect(&first, EventKind::PortError);
    assert_eq!(first.port().state, PortState::Down);
    assert!(ip("link set lo up"));
    expect(&first, EventKind::PortActive);
    assert_eq!(first.port().state, PortState::Active);
}

/// An interface goes under an open RDMA device.
fn interface_goes() {
    if !ip("link add veth-a type veth peer name veth-b") {
        eprintln!("SKIPPED: this kernel has no veth interfaces, so none can go");
        return;
    }
    // Without IPv6 no address comes that the test did not add.
    for name in ["veth-a", "veth-b"] {
        assert!(ip(&format!("link set {name} addrgenmode none")) && ip(&format!("link set {name} up")));
    }
    assert!(ip("address add 198.51.100.1/24 dev veth-a"));
    // The carrier comes soon after the peer is up.
    let start = Instant::now();
    while !Device::list().expect("interfaces").iter().any(|d| d.interface() == "veth-a") {
        assert!(start.elapsed() < Duration::from_secs(60), "the interface does not come up");
        std::thread::yield_now();
    }
    let context = device("veth-a").open().expect("opened");
    assert!(ip("link del veth-a"));
    let mut kinds = Vec::new();
    while kinds.last() != Some(&EventKind::DeviceFatal) {
        let event = context.get_async_event().expect("an event");
        assert_eq!(event.affected, Affected::Port(1));
        kinds.push(event.kind);
    }
    assert_eq!(kinds, [EventKind::PortError, EventKind::GidChange, EventKind::DeviceFatal]);
    assert_eq!(context.device().gids(), [Gid::default()]);
}

/// An interface with a link-local address alone is an RDMA device, behind the others and before the loopback
/// interface's.
fn link_local_alone() {
    if !ip("link add veth-c type veth peer name veth-d") {
        return;
    }
    for name in ["veth-c", "veth-d"] {
        assert!(ip(&format!("link set {name} addrgenmode none")) && ip(&format!("link set {name} up")));
    }
    assert!(ip("address add fe80::1/64 dev veth-c nodad"));
    let start = Instant::now();
    while !Device::list().expect("interfaces").iter().any(|d| d.interface() == "veth-c") {
        assert!(start.elapsed() < Duration::from_secs(60), "no card");
        std::thread::yield_now();
    }
    let context = device("veth-c").open().expect("opened");
    assert_eq!(ips(&context), ["fe80::1".parse::<IpAddr>().expect("an address")]);
    let (a, b) = (End::at(&context, Service::Rc, 0), End::at(&context, Service::Rc, 0));
    a.connect(&b.card());
    b.connect(&a.card());
    a.write(0, &pattern(100_000, 4));
    a.send(1, SendOp::Write(b.card().remote), 0, 100_000);
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(b.read(0, 100_000), pattern(100_000, 4));
}

/// Runs the three tests in the namespace.
#[test]
fn in_a_namespace() {
    if std::env::var_os(CHILD).is_some() {
        loopback_changes();
        interface_goes();
        link_local_alone();
    }
}

#[test]
fn events_tell_of_the_port() {
    let works = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    if !works(Command::new("unshare").args(["-rn", "true"])) {
        eprintln!("SKIPPED: `unshare -rn` makes no user and network namespace here");
        return;
    }
    if !works(Command::new("ip").arg("-V")) {
        eprintln!("SKIPPED: there is no `ip` program to change interfaces with");
        return;
    }
    let output = Command::new("timeout")
        .args(["120", "unshare", "-rn"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", "ports::in_a_namespace", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("started");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success(), "{text}");
    text.lines().filter(|line| line.starts_with("SKIPPED")).for_each(|line| eprintln!("{line}"));
}
