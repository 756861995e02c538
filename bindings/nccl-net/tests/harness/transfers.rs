//! Connections and messages within a process.

use nccl_net_tinynccl::abi::Status;

use super::again;
use super::api::*;

const SIZES: [usize; 10] = [0, 1, 4, 8, 2048, 16_385, 65_536, 1 << 20, (4 << 20) + 1, 16 << 20];

#[test]
fn the_device_is_described() {
    for version in VERSIONS {
        let api = Api::init(version);
        let found = api.properties(0).unwrap();
        assert_eq!((found.name.as_str(), found.ptr_support, found.max_recvs), ("tinynccl", 1, 8), "{version}");
        assert!(found.speed > 0);
        assert_eq!(api.properties(1).unwrap_err(), Status::InvalidArgument);
        api.finalize();
    }
    assert!(LOG.lock().unwrap().contains("NET/tinynccl : tinynccl"), "which ports, in NCCL's log");
}

#[test]
fn messages_of_all_sizes_arrive_whole_over_every_version() {
    for version in VERSIONS {
        let api = Api::init(version);
        let pair = api.pair();
        for (seed, len) in SIZES.into_iter().enumerate() {
            // Receives have room for more than is sent.
            let (data, mut got) = (pattern(len, seed), vec![0xee; len + seed]);
            let recv = api.irecv(pair.recv, &mut [(&mut got, 7)]).unwrap();
            let send = api.isend(pair.send, &data, 7).unwrap();
            assert_eq!((api.wait(send, 1), api.wait(recv, 1)), (vec![len], vec![len]));
            api.flush(pair.recv);
            assert!(got[..len] == data[..], "version {version}, {len} bytes");
            assert!(got[len..].iter().all(|b| *b == 0xee), "nothing behind it was touched");
        }
        pair.close();
        api.finalize();
    }
}

#[test]
fn sixty_four_messages_are_under_way_and_each_finds_its_receive() {
    for version in VERSIONS {
        let api = Api::init(version);
        let pair = api.pair();
        for first_receives in [true, false] {
            let sent: Vec<Vec<u8>> = (0..64).map(|i| pattern(i * 1019, i)).collect();
            let mut got: Vec<Vec<u8>> = sent.iter().map(|s| vec![0; s.len()]).collect();
            let mut receives = Vec::new();
            let post = |receives: &mut Vec<Comm>, got: &mut Vec<Vec<u8>>| {
                // Tags in another order than they are sent in.
                for tag in (0..4).rev() {
                    for i in (tag..64).step_by(4) {
                        receives.push(api.irecv(pair.recv, &mut [(&mut got[i], tag as i32)]).unwrap());
                    }
                }
            };
            if first_receives {
                post(&mut receives, &mut got);
            }
            let sends: Vec<Comm> =
                sent.iter().enumerate().map(|(i, s)| api.isend(pair.send, s, i as i32 % 4).unwrap()).collect();
            if !first_receives {
                post(&mut receives, &mut got);
            }
            // The last first.
            sends.into_iter().rev().for_each(|s| drop(api.wait(s, 1)));
            receives.into_iter().rev().for_each(|r| drop(api.wait(r, 1)));
            assert!(got == sent, "version {version}, receives first: {first_receives}");
        }
        pair.close();
        api.finalize();
    }
}

#[test]
fn grouped_receives_take_one_message_of_each_tag() {
    for version in VERSIONS {
        let api = Api::init(version);
        let pair = api.pair();
        for eager in [false, true] {
            let sent: Vec<Vec<u8>> = (0..8).map(|i| pattern(10_000 * i + 1, i)).collect();
            let mut got: Vec<Vec<u8>> = vec![vec![0; 100_000]; 8];
            let send = || -> Vec<Comm> {
                let order = [3, 1, 0, 2, 7, 5, 6, 4];
                order.into_iter().map(|i| api.isend(pair.send, &sent[i], 100 + i as i32).unwrap()).collect()
            };
            let mut sends = if eager { send() } else { Vec::new() };
            let mut group: Vec<(&mut [u8], i32)> =
                got.iter_mut().enumerate().map(|(i, g)| (&mut g[..], 100 + i as i32)).collect();
            let request = api.irecv(pair.recv, &mut group).unwrap();
            if !eager {
                assert_eq!(api.test(request, 8), Ok(None), "nothing was sent");
                sends = send();
            }
            let sizes = api.wait(request, 8);
            assert_eq!(sizes, sent.iter().map(Vec::len).collect::<Vec<_>>());
            sends.into_iter().for_each(|s| drop(api.wait(s, 1)));
            for (i, len) in sizes.into_iter().enumerate() {
                assert!(is_pattern(&got[i][..len], i), "version {version}, message {i}, eager {eager}");
            }
        }
        pair.close();
        api.finalize();
    }
}

#[test]
fn requests_end_at_their_limit_and_are_used_again() {
    let api = Api::init(12);
    let pair = api.pair();
    let mut room = [0u8; 8];
    let mut requests = Vec::new();
    loop {
        let request = api.irecv(pair.recv, &mut [(&mut room, 0)]).unwrap();
        if request.is_null() {
            break;
        }
        requests.push(request);
    }
    // What NCCL may have open: 32 for each of 8 grouped receives.
    assert_eq!(requests.len(), 256);
    for _ in 0..3 {
        let data = 5u64.to_le_bytes();
        let send = until("a free request", || Some(api.isend(pair.send, &data, 0).unwrap()).filter(|r| !r.is_null()));
        api.wait(send, 1);
        let oldest = requests.remove(0);
        assert_eq!(api.wait(oldest, 1), [8]);
        requests.push(api.irecv(pair.recv, &mut [(&mut room, 0)]).unwrap());
    }
    assert_eq!(room, 5u64.to_le_bytes());
    pair.close();
    api.finalize();
}

#[test]
fn a_listener_serves_again_and_again_and_many_connections_live_at_once() {
    let api = Api::init(11);
    let (handle, listen) = api.listen();
    let mut pairs = Vec::new();
    for _ in 0..40 {
        // Every connection of NCCL has its own copy of the handle.
        let (send, recv) = api.meet(handle, listen);
        pairs.push(Pair { api, send, recv });
    }
    api.close_listen(listen);
    for (i, pair) in pairs.iter().enumerate() {
        let (data, mut got) = (pattern(3000, i), vec![0; 3000]);
        let (send, recv) =
            (api.isend(pair.send, &data, 0).unwrap(), api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap());
        assert_eq!((api.wait(send, 1), api.wait(recv, 1)), (vec![3000], vec![3000]));
        assert!(is_pattern(&got, i));
    }
    pairs.into_iter().for_each(Pair::close);
    // Listening anew after all that.
    api.pair().close();
    api.finalize();
}

/// A receive of the random test: its tag, its number among those of the tag, and its memory.
type Posted = (usize, usize, Box<[u8]>);

/// Sends and receives of several tags in random order, one far ahead of the other at times, over a window that holds
/// few of them.
#[test]
fn a_thousand_random_messages_over_a_small_window() {
    const TEST: &str = "transfers::a_thousand_random_messages_over_a_small_window";
    if again::role().is_none() {
        let settings = [("TINYNCCL_NET_WINDOW", "1M"), ("TINYNCCL_NET_CHUNK", "32K"), ("TINYNCCL_NET_STREAMS", "5")];
        return again::start(&[], TEST, "small", &settings).finish();
    }
    const ROOM: usize = 200_000;
    let api = Api::init(12);
    for seed in 1..=4u64 {
        let pair = api.pair();
        let mut state = seed;
        let mut random = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        // Of each tag how many were sent and received; message i of a tag is the pattern of both.
        let (mut sent, mut received) = ([0; 4], [0; 4]);
        let mut sends: Vec<(Comm, Box<[u8]>)> = Vec::new();
        let mut receives: Vec<(Comm, Vec<Posted>)> = Vec::new();
        let identity = |tag: usize, number: usize| tag + 4 * number;
        for step in 0.. {
            let ending = step > 500;
            let behind: Vec<usize> = (0..4).filter(|&t| received[t] < sent[t]).collect();
            let ahead: Vec<usize> = (0..4).filter(|&t| received[t] > sent[t]).collect();
            if ending && behind.is_empty() && ahead.is_empty() && sends.is_empty() && receives.is_empty() {
                break;
            }
            let to_send = if ending { ahead } else { (0..random(3)).map(|_| random(4)).collect() };
            for tag in to_send {
                let len = [0, 1, 40, 5000, 70_000, ROOM][random(6)];
                let data = pattern(len, identity(tag, sent[tag])).into_boxed_slice();
                let request = api.isend(pair.send, &data, tag as i32).unwrap();
                if !request.is_null() {
                    sent[tag] += 1;
                    sends.push((request, data));
                }
            }
            let group: Vec<usize> = if ending { behind } else { (0..4).filter(|_| random(4) == 0).collect() };
            if !group.is_empty() {
                let mut room: Vec<Box<[u8]>> = group.iter().map(|_| vec![0; ROOM].into_boxed_slice()).collect();
                let mut posted: Vec<(&mut [u8], i32)> =
                    room.iter_mut().zip(&group).map(|(r, tag)| (&mut r[..], *tag as i32)).collect();
                let request = api.irecv(pair.recv, &mut posted).unwrap();
                if !request.is_null() {
                    let kept = group.into_iter().zip(room).map(|(tag, room)| {
                        received[tag] += 1;
                        (tag, received[tag] - 1, room)
                    });
                    receives.push((request, kept.collect()));
                }
            }
            sends.retain(|(request, _)| api.test(*request, 1).unwrap().is_none());
            receives.retain(|(request, group)| {
                let Some(sizes) = api.test(*request, group.len()).unwrap() else { return true };
                for ((tag, number, room), len) in group.iter().zip(sizes) {
                    assert!(
                        is_pattern(&room[..len], identity(*tag, *number)),
                        "seed {seed}: message {number} of tag {tag}"
                    );
                }
                false
            });
            if ending {
                std::thread::yield_now();
            }
        }
        assert!(sent.iter().sum::<usize>() > 400, "{sent:?}");
        pair.close();
    }
    api.finalize();
    again::say("done");
}

/// 4 GiB and a bit in one message: lengths of 32 bits would cut it. The memory is mapped without being touched but for
/// what is checked, and the sender's is the same page over and over.
#[test]
fn a_message_beyond_4_gib_arrives() {
    const LEN: usize = (4 << 30) + (1 << 20);
    if available() < LEN as u64 + (2 << 30) {
        return eprintln!("SKIPPED: a message of 4 GiB takes as much memory, and less is free here");
    }
    if std::env::var_os("TINYNCCL_TEST_LONG").is_none() {
        return eprintln!(
            "SKIPPED: a message of 4 GiB takes a minute on a slow machine; TINYNCCL_TEST_LONG=1 sends it"
        );
    }
    let api = Api::init(12);
    let pair = api.pair();
    let mut data = vec![0u8; LEN];
    for at in (0..LEN).step_by(1 << 20) {
        data[at] = (at >> 20) as u8 | 1;
    }
    let mut got = vec![0u8; LEN];
    let recv = api.irecv(pair.recv, &mut [(&mut got, 0)]).unwrap();
    let send = api.isend(pair.send, &data, 0).unwrap();
    // NCCL's type for lengths ends at 2 GiB.
    assert_eq!((api.wait(send, 1), api.wait(recv, 1)), (vec![i32::MAX as usize], vec![i32::MAX as usize]));
    assert!(got == data);
    pair.close();
    api.finalize();
}

fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    line.and_then(|l| l.split_whitespace().next()).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) << 10
}
