//! Arm, look, poll, disarm: no thread sleeps through a message or a credit.

use crate::harness::*;

pub(crate) fn ping_pong(backend: Backend) {
    let rounds = 3000;
    let len = |i: u32| [0, 8, 24, 25, 900][i as usize % 5];
    run(
        ends(backend),
        |mut end| {
            for i in 0..rounds {
                send_sleeping(&mut end, i, len(i)).unwrap();
                recv_sleeping(&mut end, i, len(i + 1)).unwrap();
            }
            flush(&mut end.link);
            end
        },
        |mut end| {
            for i in 0..rounds {
                recv_sleeping(&mut end, i, len(i)).unwrap();
                send_sleeping(&mut end, i, len(i + 1)).unwrap();
            }
            flush(&mut end.link);
            end
        },
    );
}

/// A stream in one direction: the sender runs out of credit again and again, the receiver out of messages.
pub(crate) fn credit(backend: Backend) {
    let messages = 400;
    let len = |i: u32| if i.is_multiple_of(7) { 20 } else { OPTIONS.max_message - i as usize };
    run(
        ends(backend),
        |mut end| {
            (0..messages).for_each(|i| send_sleeping(&mut end, i, len(i)).unwrap());
            // Messages that were reserved and committed may wait for space in the socket's buffer.
            flush(&mut end.link);
            end
        },
        |mut end| {
            (0..messages).for_each(|i| recv_sleeping(&mut end, i, len(i)).unwrap());
            end
        },
    );
}
