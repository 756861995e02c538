//! Memory windows on the same wire.

use super::*;
use crate::memory::{Bind, WindowKind};

/// Range of the second end's memory that is bound.
const FROM: u64 = 8192;
const LEN: u64 = 4096;

fn bind(rkey: u32, lkey: u32) -> SendOp {
    SendOp::Bind(Bind { rkey, lkey, addr: FROM, len: LEN, access: Access::REMOTE_WRITE | Access::REMOTE_READ })
}

fn post(end: &mut End, id: u64, op: SendOp) {
    end.machine.post_send(&SendRequest { id, op, sges: &[], flags: flags(), to: None }).expect("posted");
}

/// The second end binds a window, sends its key to the first, and takes it back.
fn world(kind: WindowKind, faults: Faults, seed: u64) -> (World, u32) {
    let mut world = World::new(Service::Rc, faults, seed);
    let lets = Access::LOCAL_WRITE | Access::MW_BIND;
    let owner = &mut world.ends[1];
    let skip = owner.memory.as_ptr().align_offset(8);
    let at = owner.memory[skip..].as_mut_ptr();
    owner.table.replace(owner.key, Region { pd: 1, at, len: 1 << 16, iova: 0, access: lets, backing: Backing::Host });
    let window = owner.table.add_window(1, kind).expect("room");
    (world, window)
}

proptest! {
    /// On a bad wire, and with requests under way when one binds or invalidates: each takes place once and in order,
    /// peers write within what is bound alone, and with an invalidated key nothing.
    #[test]
    fn peers_reach_what_is_bound_and_no_other_byte(
        faults in faults(), seed: u64, kind in prop_oneof![Just(WindowKind::Any), Just(WindowKind::OneQp)],
        by_peer: bool, offset in -3000i64..6000, len in 1u32..1500
    ) {
        let (mut world, window) = world(kind, faults, seed);
        let [peer, owner] = &mut world.ends;
        peer.set(0, &[7; 1500]);
        owner.set(0, &[1; 1 << 15]);
        // A long message before and after, so that going back passes the binding.
        peer.recv(0, 32768, 3000);
        peer.recv(1, 32768, 3000);
        owner.send(0, SendOp::Send, 0, 3000, flags());
        post(owner, 1, bind(window, owner.key));
        owner.send(2, SendOp::Send, 0, 3000, flags());
        prop_assert!(world.run(100_000), "{}", world.describe());
        let done = world.ends[1].completions();
        prop_assert_eq!(done.iter().map(|wc| (wc.id, wc.status)).collect::<Vec<_>>(),
            (0..3).map(|id| (id, Status::Success)).collect::<Vec<_>>());
        prop_assert_eq!(done[1].opcode, WcOpcode::BindWindow);
        prop_assert_eq!(world.ends[0].completions().len(), 2, "received");

        let va = FROM.wrapping_add_signed(offset);
        let inside = offset >= 0 && offset as u64 + u64::from(len) <= LEN;
        if !inside {
            // A refusal that is lost is not sent again, as its queue pair is in ERR.
            world.faults = NONE;
        }
        let [peer, owner] = &mut world.ends;
        peer.send(3, SendOp::Write(Remote { addr: va, rkey: window }), 0, len, flags());
        if inside && by_peer && kind == WindowKind::OneQp {
            owner.recv(9, 0, 0);
            peer.send(4, SendOp::SendInv(window), 0, 0, flags());
        }
        prop_assert!(world.run(100_000), "{}", world.describe());
        let bytes = world.ends[1].bytes();
        let written = if inside { va as usize..(va + u64::from(len)) as usize } else { 0..0 };
        let changed = (0..1 << 15).filter(|i| bytes[*i] == 7).collect::<Vec<_>>();
        prop_assert_eq!(changed, written.collect::<Vec<_>>());
        let done = world.ends[0].completions();
        if !inside {
            prop_assert_eq!(done[0].status, Status::RemoteAccess);
            return Ok(());
        }
        prop_assert!(done.iter().all(|wc| wc.status == Status::Success), "{done:?}");

        let owner = &mut world.ends[1];
        if done.len() == 2 {
            prop_assert_eq!(owner.completions()[0].invalidated, Some(window));
        } else {
            let op = match kind {
                WindowKind::OneQp => SendOp::LocalInv(window),
                WindowKind::Any => SendOp::Bind(Bind { rkey: window ^ 1, lkey: 0, addr: 0, len: 0, access: ALL }),
            };
            post(owner, 5, op);
            prop_assert!(world.run(100_000));
            prop_assert_eq!(world.ends[1].completions()[0].status, Status::Success);
        }
        world.faults = NONE;
        world.ends[1].set(0, &[1; 1 << 15]);
        world.ends[0].send(6, SendOp::Write(Remote { addr: FROM, rkey: window }), 0, len, flags());
        prop_assert!(world.run(100_000));
        prop_assert_eq!(world.ends[0].completions()[0].status, Status::RemoteAccess);
        prop_assert!(world.ends[1].bytes()[..1 << 15].iter().all(|b| *b == 1), "by an invalidated key");
    }
}

/// A request that cannot be executed ends the queue pair, when those before it are done.
#[test]
fn what_cannot_be_bound_fails_in_its_turn() {
    let (mut world, window) = world(WindowKind::OneQp, NONE, 0);
    let [peer, owner] = &mut world.ends;
    peer.recv(0, 32768, 3000);
    owner.send(0, SendOp::Send, 0, 3000, flags());
    post(owner, 1, bind(window, owner.key));
    post(owner, 2, bind(window ^ 1, owner.key));
    owner.send(3, SendOp::Send, 0, 100, flags());
    assert!(world.run(10_000), "{}", world.describe());
    let done: Vec<_> = world.ends[1].completions().iter().map(|wc| (wc.id, wc.status)).collect();
    let bad = (2, Status::WindowBind);
    assert_eq!(done, [(0, Status::Success), (1, Status::Success), bad, (3, Status::Flushed)]);
}

#[test]
fn a_key_that_is_not_ours_cannot_be_invalidated() {
    let (mut world, window) = world(WindowKind::Any, NONE, 0);
    post(&mut world.ends[1], 1, SendOp::LocalInv(window));
    assert!(world.run(10_000));
    assert_eq!(world.ends[1].completions()[0].status, Status::LocalQpOperation);
    // Neither by a peer, which receives a refusal.
    let (mut world, window) = self::world(WindowKind::Any, NONE, 0);
    let [peer, owner] = &mut world.ends;
    owner.recv(0, 0, 0);
    peer.send(1, SendOp::SendInv(window), 0, 0, flags());
    assert!(world.run(10_000));
    assert_eq!(world.ends[0].completions()[0].status, Status::RemoteAccess);
    assert_eq!(world.ends[1].completions()[0].status, Status::Flushed);
}

/// A datagram's queue pair has no connection to give a window to.
#[test]
fn datagrams_bind_nothing() {
    let mut end = End::new(0x11, Service::Ud, 100, ALL);
    end.connect(0, 0, 0, |_| {});
    let request = SendRequest { id: 0, op: SendOp::LocalInv(1), sges: &[], flags: flags(), to: None };
    assert!(end.machine.post_send(&request).is_err());
}
