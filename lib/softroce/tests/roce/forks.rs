//! A child of `fork` that uses, or merely keeps, what its parent opened.

use std::io::{Read, Write};
use std::ptr;
use std::time::{Duration, Instant};

use softroce::{AttrMask, CompChannel, QpAttr, RecvRequest, SendOp, SendRequest, Service, State, Status, WindowKind};

use crate::end::{BYTES, End, loopback, pattern};

/// A process that was forked from this one.
struct Child(libc::pid_t);

impl Child {
    /// Runs `f` in it, and ends it.
    fn start(f: impl FnOnce() -> bool) -> Child {
        // SAFETY: the child calls the RDMA device, which is what these tests are about, and ends without running
        // anything else.
        match unsafe { libc::fork() } {
            0 => {
                let ok = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or(false);
                // SAFETY: ends the process.
                unsafe { libc::_exit(i32::from(!ok)) }
            }
            pid => Child(pid),
        }
    }

    /// The child's answer; `None` where it does not end.
    fn answer(self) -> Option<bool> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut status = -1;
            // SAFETY: queries our own child.
            match unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } {
                0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                0 => return None,
                _ => {
                    std::mem::forget(self);
                    return Some(status == 0);
                }
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: ends our own child, and waits for it.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, ptr::null_mut(), 0);
        }
    }
}

fn connected() -> (End, End) {
    let context = loopback();
    let (a, b) = (End::new(&context, Service::Rc), End::new(&context, Service::Rc));
    a.connect(&b.card());
    b.connect(&a.card());
    (a, b)
}

fn transfer(a: &End, b: &End, seed: u8) {
    let bytes = pattern(100_000, seed);
    a.write(0, &bytes);
    b.recv(1, 1 << 20, 100_000);
    a.send(2, SendOp::Send, 0, 100_000);
    assert_eq!((a.wait().status, b.wait().status), (Status::Success, Status::Success));
    assert_eq!(b.read(1 << 20, 100_000), bytes);
}

#[test]
fn a_child_gets_an_error_from_every_call_and_its_parent_goes_on() {
    let (a, b) = connected();
    let context = a.pd.context().clone();
    let channel = CompChannel::new().expect("a channel");
    let notifying = context.create_cq(4, 7, Some(channel.clone())).expect("a queue");
    let srq = a.pd.create_srq(4, 1, 0).expect("a queue");
    transfer(&a, &b, 1);
    b.recv(1, 1 << 20, 100_000);
    for round in 0..3 {
        let (memory, gid) = (a.memory, b.card().gid);
        let child = Child::start(|| {
            let einval = |errno: i32| assert_eq!(errno, libc::EINVAL);
            let sges = [a.sge(0, 8)];
            let request = |op| SendRequest { id: 9, op, sges: &sges, flags: Default::default(), to: None };
            for op in [SendOp::Send, SendOp::Write(b.card().remote), SendOp::Read(b.card().remote)] {
                // SAFETY: refused.
                unsafe {
                    einval(a.qp.post_send(&[request(op)]).expect_err("refused").1.errno());
                    einval(a.qp.post_send_all(&[request(op)]).expect_err("refused").1.errno());
                }
            }
            let recv = RecvRequest { id: 9, sges: &sges };
            // SAFETY: refused.
            unsafe {
                einval(a.qp.post_recv(&[recv]).expect_err("refused").1.errno());
                einval(srq.post_recv(&recv).expect_err("refused").errno());
                einval(a.pd.reg_mr(memory, BYTES, 0, Default::default()).expect_err("refused").errno());
            }
            let err = QpAttr { state: State::Err, ..QpAttr::default() };
            einval(a.qp.modify(&err, AttrMask::STATE).expect_err("refused").errno());
            einval(a.cq.check_here().expect_err("refused").errno());
            assert!(a.cq.poll_one().is_none() && b.cq.poll_one().is_none());
            notifying.req_notify(false);
            einval(notifying.resize(8).expect_err("refused").errno());
            einval(channel.get_event().expect_err("refused").errno());
            einval(context.get_async_event().expect_err("refused").errno());
            einval(context.create_cq(4, 0, None).expect_err("refused").errno());
            einval(context.path(gid, a.gid_index).expect_err("refused").errno());
            einval(a.pd.create_qp(a.qp.init()).expect_err("refused").errno());
            einval(a.pd.alloc_mw(WindowKind::Any).expect_err("refused").errno());
            einval(srq.set_limit(1).expect_err("refused").errno());
            // It may open the RDMA device itself.
            if round == 2 {
                let (c, d) = connected();
                transfer(&c, &d, 7);
            }
            // What it drops stays its parent's.
            // SAFETY: the child's copies, which nothing else drops there.
            unsafe { drop((ptr::read(&a), ptr::read(&b), ptr::read(&srq), ptr::read(&notifying))) };
            true
        });
        // Meanwhile and afterwards.
        a.write(0, &pattern(100_000, round));
        a.send(2, SendOp::Send, 0, 100_000);
        assert_eq!((a.wait().status, b.wait().status), (Status::Success, Status::Success));
        assert_eq!(b.read(1 << 20, 100_000), pattern(100_000, round));
        assert_eq!(child.answer(), Some(true));
        b.recv(1, 1 << 20, 100_000);
    }
}

/// Threads are at work with everything when the child is made: it must wait for no lock of theirs.
#[test]
fn a_child_of_a_busy_process_ends() {
    let (a, _b) = connected();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (c, d) = connected();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                transfer(&c, &d, 3);
            }
        });
        let context = a.pd.context();
        let ends: Vec<_> = (0..100)
            .map(|_| {
                let child = Child::start(|| {
                    // SAFETY: refused.
                    let refused = unsafe { a.qp.post_recv(&[RecvRequest { id: 9, sges: &[] }]) }.is_err();
                    let _ = a.qp.query();
                    let none = a.cq.poll_one().is_none() && context.create_cq(1, 0, None).is_err();
                    refused && none && loopback().create_cq(1, 0, None).is_ok()
                });
                child.answer()
            })
            .collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(ends, vec![Some(true); 100]);
    });
}

/// No socket of the RDMA device is open in a child that lives on: its number and the port are free when the parent has
/// closed.
#[test]
fn a_child_keeps_no_socket() {
    let (a, b) = connected();
    let sockets = |pid: libc::pid_t| {
        let mut all: Vec<_> = std::fs::read_dir(format!("/proc/{pid}/fd"))
            .expect("/proc")
            .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
            .filter(|link| link.to_string_lossy().starts_with("socket:"))
            .collect();
        all.sort();
        all
    };
    let own = std::process::id() as libc::pid_t;
    // Sockets at the addresses that the process's RDMA device alone has: other tests have sockets of the port, too.
    let slot = a.qp.number() >> 14;
    let address = format!("{:02X}{:02X}", slot & 0xff, slot >> 8);
    let card: Vec<_> = {
        let table = std::fs::read_to_string("/proc/net/udp").expect("/proc");
        let inodes: Vec<String> = table
            .lines()
            .filter(|line| {
                line.split_whitespace()
                    .nth(1)
                    .is_some_and(|local| local.starts_with(&address) && local.ends_with("7F:12B7"))
            })
            .filter_map(|line| line.split_whitespace().nth(9).map(|inode| format!("socket:[{inode}]")))
            .collect();
        sockets(own).into_iter().filter(|link| inodes.iter().any(|inode| link.as_os_str() == inode.as_str())).collect()
    };
    let (mut ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let child = Child::start(|| {
        theirs.write_all(&[1]).expect("written");
        // SAFETY: waits until it is killed.
        unsafe { libc::pause() };
        true
    });
    // `fork` has returned there.
    ours.read_exact(&mut [0]).expect("read");
    assert_eq!(card.len(), 3, "one for each lane");
    let inherited = sockets(child.0);
    assert!(card.iter().all(|socket| !inherited.contains(socket)), "{inherited:?} has one of {card:?}");
    drop(child);
    transfer(&a, &b, 5);
}
