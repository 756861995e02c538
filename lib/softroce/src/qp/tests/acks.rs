//! The last acknowledgement of a queue pair that goes.

use super::*;

/// A queue pair acknowledges before it goes what its program has the completion of, also where the thread that received
/// the message has not begun to answer it, and the acknowledgement would wait for a request to travel with.
#[test]
fn a_message_whose_completion_was_polled_is_acknowledged() {
    let mut world = World::new(Service::Rc, NONE, 1);
    let [ours, theirs] = &mut world.ends;
    (0..2).for_each(|id| theirs.recv(id, 0, 100));
    ours.recv(0, 0, 100);
    ours.send(0, SendOp::Send, 0, 100, flags());
    world.serve(0);
    assert!(world.deliver());
    world.serve(1);
    // It follows the acknowledgement at once, so that the next one waits for a request.
    world.ends[1].send(1, SendOp::Send, 0, 100, flags());
    assert!(world.run(1000));

    world.ends[0].send(2, SendOp::Send, 0, 100, flags());
    world.serve(0);
    assert!(world.deliver());
    let received = world.ends[1].completions();
    assert!(received.iter().any(|wc| (wc.opcode, wc.id) == (WcOpcode::Recv, 1)), "{received:?}");
    world.ends[1].machine.hurry();
    world.serve(1);
    world.ends[1].machine.modify(&QpAttr::default(), AttrMask::STATE).expect("to RESET");
    assert!(world.run(1000), "the sender repeats forever: {}", world.describe());
    let sent = world.ends[0].completions();
    assert_eq!(sent.last().map(|wc| (wc.id, wc.status)), Some((2, Status::Success)), "{sent:?}");
}

#[test]
fn one_that_owes_nothing_sends_nothing_as_it_goes() {
    let mut world = World::new(Service::Rc, NONE, 1);
    world.ends[1].machine.hurry();
    world.serve(1);
    assert!(world.wire.is_empty());
    assert_eq!(world.ends[1].machine.next_timer(), None, "no timer that is due forever");
}
