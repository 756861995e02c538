//! Registered memory and its pages, and dialers that give up, on a device.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::link::memory::Region;
use super::listen;
use super::nics::{Nic, Nics};
use super::sys::{Access, Capacity, Channel, Cq, Mr, Outcome, Qp, Sge, Timing, Write};
use crate::fabric::Accept;
use crate::linger::Linger;
use crate::wait::Wait;
use crate::{LinkOptions, Peer};
use tinynccl_sys::config::{Config, TransportChoice};
use tinynccl_sys::doorbell::Doorbell;

const PAGE: usize = 4096;

/// The devices; none, with a message, where there are none.
fn nics() -> Option<Nics> {
    let config = Config::default().with(|c| c.transport = TransportChoice::Verbs);
    match Nics::open(0, &config) {
        Ok(nics) => Some(nics),
        Err(e) => {
            assert!(std::env::var_os("TINYNCCL_TEST_VERBS").is_none(), "TINYNCCL_TEST_VERBS is set, but {e}");
            let _ = writeln!(std::io::stderr().lock(), "SKIPPED: RDMA: {e}");
            None
        }
    }
}

/// A queue pair that is connected to itself.
fn loopback(nic: &Nic, nics: &Nics) -> (Qp, Arc<Cq>) {
    let pd = &nic.device.pd;
    let cq = Cq::new(pd.context(), Channel::new(pd.context()).unwrap(), 16).unwrap();
    let qp = Qp::new(pd, &cq, &Capacity { sends: 4, recvs: 4, inline: 0 }).unwrap();
    let at = &nic.port;
    qp.init(at.address.port).unwrap();
    qp.post_receives(4, 0).unwrap();
    let to = nic.remote((qp.number(), 7), at.address.gid, at.address.lid, at.mtu);
    qp.ready_to_receive(&to).unwrap();
    qp.ready_to_send(7, &nics.timing).unwrap();
    (qp, cq)
}

/// Requests that no peer will acknowledge come back at once when the queue pair is stopped: what they read can be
/// freed.
#[test]
fn a_stopped_queue_pair_gives_back_what_was_posted() {
    let Some(nics) = nics() else { return };
    let all = nics.all();
    let nic = all.first().unwrap();
    let pd = &nic.device.pd;
    let cq = Cq::new(pd.context(), Channel::new(pd.context()).unwrap(), 16).unwrap();
    let qp = Qp::new(pd, &cq, &Capacity { sends: 8, recvs: 4, inline: 0 }).unwrap();
    let at = &nic.port;
    qp.init(at.address.port).unwrap();
    // No such queue pair.
    let to = nic.remote((qp.number() ^ 0x00f0_0000, 7), at.address.gid, at.address.lid, at.mtu);
    qp.ready_to_receive(&to).unwrap();
    // Some 17 s until it would give up by itself.
    qp.ready_to_send(7, &Timing { timeout: 19, retries: 6, rnr_retries: 6 }).unwrap();
    let memory = Region::new([pd], PAGE, Access::Source).unwrap();
    let lkey = memory.mr(0).unwrap().lkey();
    for id in 1..=4 {
        let write = Write {
            from: Sge { at: memory.base(), len: 8, lkey },
            then: Some(Sge { at: memory.base(), len: PAGE as u32, lkey }),
            remote: 4096,
            word: 0,
            signaled: true,
            inline: false,
        };
        // SAFETY: the region lives until after the queue pair's requests have come back.
        unsafe { qp.post_write(id, 1, &write) }.unwrap();
    }
    assert_eq!(cq.poll().unwrap().len(), 0);
    qp.stop().unwrap();
    let (start, mut back) = (Instant::now(), Vec::new());
    while back.len() < 4 {
        for completion in cq.poll().unwrap().iter() {
            assert!(matches!(completion.outcome, Outcome::Failed { .. }), "{completion:?}");
            back.push(completion.id);
        }
        assert!(start.elapsed() < Duration::from_secs(10), "only {back:?} came back");
        std::thread::yield_now();
    }
    assert_eq!(back, [1, 2, 3, 4]);
}

/// Writes a page from `from` to `to` and waits for both completions.
fn write(qp: &Qp, cq: &Cq, from: (NonNull<u8>, &Mr), to: &Region) {
    let write = Write {
        from: Sge { at: from.0, len: PAGE as u32, lkey: from.1.lkey() },
        then: None,
        remote: to.base().as_ptr() as u64,
        word: 5,
        signaled: true,
        inline: false,
    };
    // SAFETY: the page is mapped and registered, though maybe not the same page.
    unsafe { qp.post_write(1, to.mr(0).unwrap().rkey(), &write) }.unwrap();
    let start = Instant::now();
    let mut done = 0;
    while done < 2 {
        for completion in cq.poll().unwrap().iter() {
            assert!(
                matches!(completion.outcome, Outcome::Sent | Outcome::Written { len: PAGE, word: 5 }),
                "{completion:?}"
            );
            done += 1;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "no completion");
        std::thread::yield_now();
    }
}

/// A fresh page of `value` anywhere, or in the place of ours at `at`.
fn page(at: Option<NonNull<u8>>, value: u8) -> NonNull<u8> {
    let (hint, flags) = match at {
        Some(at) => (at.as_ptr().cast(), MapFlags::PRIVATE | MapFlags::FIXED),
        None => (std::ptr::null_mut(), MapFlags::PRIVATE),
    };
    // SAFETY: a new mapping, where nothing is mapped or a page of ours to which nothing refers any more.
    let page = unsafe { mmap_anonymous(hint, PAGE, ProtFlags::READ | ProtFlags::WRITE, flags) }.unwrap();
    let page = NonNull::new(page.cast::<u8>()).unwrap();
    // SAFETY: just mapped, for us alone.
    unsafe { page.as_ptr().write_bytes(value, PAGE) };
    page
}

/// The bug that a cache of registrations by address has: memory is freed, the allocator gives the same address out
/// again with other pages, and the cache finds "its" registration, which still is of the old pages.
#[test]
fn a_registration_is_of_pages_and_not_of_an_address() {
    let Some(nics) = nics() else { return };
    let all = nics.all();
    let nic = all.first().unwrap();
    let (qp, cq) = loopback(nic, &nics);
    let pd = &nic.device.pd;
    let target = Region::new([pd], PAGE, Access::Target).unwrap();
    // SAFETY: within the region; the device has written, and nothing is under way.
    let first = || unsafe { target.base().as_ptr().read_volatile() };

    let address = page(None, b'A');
    // SAFETY: on purpose not kept: the device only reads, from pages that the registration pins.
    let stale = unsafe { Mr::new(pd, address, PAGE, Access::Source) }.unwrap();
    write(&qp, &cq, (address, &stale), &target);
    assert_eq!(first(), b'A');

    // In one step: another thread could take the address in between.
    assert_eq!(page(Some(address), b'B'), address, "the same address, another page");
    write(&qp, &cq, (address, &stale), &target);
    // The RDMA device in user space pins nothing: it reads what the program sees at the address.
    let sent = if cfg!(feature = "verbs") { b'A' } else { b'B' };
    assert_eq!(first(), sent, "the program sees B at this address, and a device that pins pages sends A");

    // SAFETY: mapped until the end of the test.
    let fresh = unsafe { Mr::new(pd, address, PAGE, Access::Source) }.unwrap();
    write(&qp, &cq, (address, &fresh), &target);
    assert_eq!(first(), b'B');
    drop((stale, fresh));
    // SAFETY: as above.
    unsafe { munmap(address.as_ptr().cast(), PAGE) }.unwrap();
}

/// It may have closed its connection while our welcome was on the way. The one that comes next finds us waiting.
#[test]
fn a_dialer_that_hangs_up_before_its_card_may_come_again() {
    let Some(nics) = nics() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let (socket, from) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let (bell, wait) = (Doorbell::new().unwrap(), Wait::new(1, 0, Duration::from_secs(30), &|| None));
    let options = LinkOptions { max_message: 4096, depth: 4 };
    let accept = Accept { options: &options, bell: &bell, ranks: (1, 0), wait: &wait, further: &|_| unreachable!() };
    let who = Peer { rank: 1, peer: 0, address: from.to_string() };
    let again = listen::finish(&nics, socket, who, &accept, &Linger::new(bell.clone())).unwrap().unwrap_err();
    assert!(again.contains("rank 1 lost rank 0") && again.contains("it closed the connection"), "{again}");
}
