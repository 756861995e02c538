//! A link holds `depth` messages without the receiver's executor, and not any number.

use crate::harness::*;

/// Sends until refused; the other process only makes progress. Returns how many went.
fn fill(a: &mut End, b: &mut End, first: u32, len: usize, most: u32) -> u32 {
    let mut refused = 0;
    let mut sent = 0;
    let mut data = payload(first, len);
    // What comes back by other threads may take them a while; so much must fit in the end.
    let (least, start) = (OPTIONS.depth as u32, std::time::Instant::now());
    while sent < most && (refused < 2000 || (sent < least && start.elapsed() < PATIENCE)) {
        if a.link.send.send_from(&header(first + sent, len), &data).unwrap() {
            sent += 1;
            refused = 0;
            data = payload(first + sent, len);
        } else {
            refused += 1;
            if sent < least {
                std::thread::yield_now();
            }
            a.link.send.progress().unwrap();
            b.link.recv.progress().unwrap();
        }
    }
    sent
}

pub(crate) fn bounded(backend: Backend) {
    let [mut a, mut b] = ends(backend);
    let max = OPTIONS.max_message;
    let mut seq = 0;
    // Several rounds: credit comes back in full.
    for _ in 0..3 {
        // The kernel's buffers for TCP count as part of the link; they hold some megabytes.
        let bound = 2000;
        let sent = fill(&mut a, &mut b, seq, max, bound);
        assert!(sent >= OPTIONS.depth as u32, "only {sent} messages fit");
        assert!(sent < bound, "no bound");
        // One more is under way: it needs the same arguments until it is done.
        let next = seq + sent;
        let data = payload(next, max);
        let mut pending = true;
        while seq < next {
            recv_into(&mut b.link, seq, max);
            seq += 1;
            pending = pending && !a.link.send.send_from(&header(next, max), &data).unwrap();
        }
        std::thread::scope(|s| {
            s.spawn(|| {
                until("the last one", || {
                    pending = pending && !a.link.send.send_from(&header(next, max), &data).unwrap();
                    (!pending).then_some(())
                });
            });
            recv_peeked(&mut b.link, seq, max);
        });
        seq += 1;
    }
}

/// Both ends first send `depth` messages and only then receive: the credits carry it, with progress at both ends.
pub(crate) fn flood(backend: Backend) {
    let max = OPTIONS.max_message;
    let side = |mut end: End| {
        let depth = OPTIONS.depth as u32;
        for round in 0..30 {
            for i in 0..depth {
                let (seq, data) = (round * depth + i, payload(round * depth + i, max));
                until("credit", || {
                    end.link.recv.progress().unwrap();
                    end.link.send.send_from(&header(seq, max), &data).unwrap().then_some(())
                });
            }
            for i in 0..depth {
                let mut dst = vec![0; max];
                let seq = round * depth + i;
                until("a message", || {
                    end.link.send.progress().unwrap();
                    let got = end.link.recv.recv_into(&header(seq, max), &mut dst).unwrap();
                    (got == tinynccl::transport::Received::Done).then_some(())
                });
                assert!(dst == payload(seq, max));
            }
        }
        end
    };
    run(ends(backend), side, side);
    // The same through reserved memory, which `progress` sends on.
    let side = |mut end: End| {
        for round in 0..10u32 {
            let depth = OPTIONS.depth as u32;
            for i in 0..depth {
                until("credit", || {
                    end.link.recv.progress().unwrap();
                    end.link.send.progress().unwrap();
                    let memory = end.link.send.reserve().unwrap()?;
                    memory.copy_from_slice(&payload(round * depth + i, max));
                    Some(())
                });
                end.link.send.commit(&header(round * depth + i, max)).unwrap();
            }
            for i in 0..depth {
                until("a message", || {
                    end.link.send.progress().unwrap();
                    end.link.recv.peek().unwrap().map(|(h, data)| {
                        assert!(h.agrees_with(&header(round * depth + i, max)));
                        assert!(data == payload(round * depth + i, max));
                    })
                });
                end.link.recv.release().unwrap();
            }
        }
        flush(&mut end.link);
        end
    };
    run(ends(backend), side, side);
}
