//! Memory that the program unmaps before it deregisters it: requests end with an error, and the process goes on.

use std::ptr;

use softroce::{Access, Mr, RecvRequest, Remote, SendFlags, SendOp, SendRequest, Service, Sge, Status};

use crate::end::{End, loopback};

const LEN: usize = 64 << 10;

/// Registered pages that are there, or not any more.
fn pages(end: &End, mapped: bool) -> Mr {
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    // SAFETY: the test's own pages. Once they are gone nothing uses them but the RDMA device, which checks first.
    unsafe {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = libc::mmap(ptr::null_mut(), LEN, access, kind, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        let mr = end.pd.reg_mr(at.cast(), LEN, at as u64, all).expect("registered");
        if !mapped {
            // Something else of the process's may not come to lie there.
            assert_ne!(libc::mmap(at, LEN, libc::PROT_NONE, kind | libc::MAP_FIXED, -1, 0), libc::MAP_FAILED);
        }
        mr
    }
}

#[test]
fn unmapped_memory_fails_its_requests() {
    let context = loopback();
    let remote = |mr: &Mr| Remote { addr: mr.addr() as u64, rkey: mr.rkey() };
    type Op = fn(Remote) -> SendOp;
    let cases: [(Op, usize); 4] = [
        (SendOp::Write, LEN),
        (SendOp::Read, LEN),
        (|_| SendOp::Send, LEN),
        (|remote| SendOp::FetchAdd { remote, add: 1 }, 8),
    ];
    for (op, len) in cases {
        for (ours, theirs) in [(true, true), (false, true), (true, false)] {
            let (a, b) = (End::new(&context, Service::Rc), End::new(&context, Service::Rc));
            a.connect(&b.card());
            b.connect(&a.card());
            let (own, target) = (pages(&a, ours), pages(&b, theirs));
            let sge = |mr: &Mr| [Sge { addr: mr.addr() as u64, len: len as u32, lkey: mr.lkey() }];
            let flags = SendFlags { signaled: true, ..SendFlags::default() };
            // SAFETY: as in `pages`.
            unsafe {
                b.qp.post_recv(&[RecvRequest { id: 1, sges: &sge(&target) }]).expect("posted");
                let request = SendRequest { id: 2, op: op(remote(&target)), sges: &sge(&own), flags, to: None };
                a.qp.post_send(&[request]).expect("posted");
            }
            let status = a.wait().status;
            match (ours, theirs) {
                (true, true) => assert_eq!(status, Status::Success),
                (false, _) => assert_eq!(status, Status::LocalProtection),
                (_, false) => assert!(matches!(status, Status::RemoteAccess | Status::RemoteOperation), "{status:?}"),
            }
        }
    }
}
