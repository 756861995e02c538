//! Two ends in one process.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::*;
use crate::rails::connection::ends;
use crate::rails::data::control::Kind;
use crate::rails::data::frame::Frame;
use crate::rails::data::receiver::Target;
use crate::rails::data::session::Paths;
use crate::rails::data::side::Side;
use crate::seal::{self, Socket};
use tinynccl_sys::config::Config;

const SEVERAL: Paths = Paths { several: true, relayed: false };

const DEADLINE: Duration = Duration::from_secs(60);

pub(super) fn net(change: impl Fn(&mut Config)) -> Net {
    let mut config = Config::default().with(|c| {
        c.interface = Some("lo".to_owned());
        c.net_threads = 2;
    });
    change(&mut config);
    Net::new(&config).unwrap()
}

pub(super) fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(start.elapsed() < DEADLINE, "{what}");
        std::thread::yield_now();
    }
}

pub(super) fn pair(ours: &Net, theirs: &Net) -> (Sender, Receiver) {
    let (handle, listener) = theirs.listen().unwrap();
    let connecting = ours.connect(&handle).unwrap();
    let sender = until("connect", || connecting.poll().unwrap());
    (sender, until("accept", || listener.accept().unwrap()))
}

pub(super) fn wait(request: &Request) -> Vec<usize> {
    let mut sizes = [0; MAX_GROUP];
    let count = until("a request", || request.test(&mut sizes).unwrap());
    sizes[..count].to_vec()
}

pub(super) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + seed * 7 + i / 251) as u8).collect()
}

#[test]
fn messages_of_all_lengths_arrive_whole() {
    let net = net(|c| c.net_chunk = 64 << 10);
    let (sender, receiver) = pair(&net, &net);
    // A thread serves streams, and a stream names its thread.
    assert!(format!("{sender:?}").starts_with("Sender"));
    for len in [0, 1, 8, 2047, 2048, 2049, 16 << 10, 40_000, 1 << 20, (5 << 20) + 3] {
        let data = pattern(len, len);
        let mut got = vec![0u8; len + 10];
        // SAFETY: both live until their requests are done.
        unsafe {
            let recv = receiver.receive(&[(got.as_mut_ptr(), got.len(), 3)]).unwrap().unwrap();
            let send = sender.send(data.as_ptr(), len, 3).unwrap().unwrap();
            assert_eq!(wait(send), [len]);
            assert_eq!(wait(recv), [len]);
        }
        assert!(got[..len] == data[..], "{len} bytes");
    }
}

#[test]
fn messages_come_before_their_receives_and_find_them() {
    let net = net(|c| (c.net_window, c.net_chunk) = (1 << 20, 64 << 10));
    let (sender, receiver) = pair(&net, &net);
    // More than the window holds, so that the rest waits for its receive.
    let sent: Vec<Vec<u8>> = (0..3).map(|i| pattern(700_000, i)).collect();
    let mut got = vec![vec![0u8; 700_000]; 3];
    // SAFETY: all of it lives until the requests are done.
    unsafe {
        let sends: Vec<_> = sent.iter().map(|d| sender.send(d.as_ptr(), d.len(), 1).unwrap().unwrap()).collect();
        // Another tag is not held up.
        let other = sender.send([5u8].as_ptr(), 1, 2).unwrap().unwrap();
        let mut one = [0u8];
        let recv = receiver.receive(&[(one.as_mut_ptr(), 1, 2)]).unwrap().unwrap();
        assert_eq!((wait(recv), wait(other), one), (vec![1], vec![1], [5]));
        for got in &mut got {
            let recv = receiver.receive(&[(got.as_mut_ptr(), got.len(), 1)]).unwrap().unwrap();
            assert_eq!(wait(recv), [700_000]);
        }
        sends.into_iter().for_each(|s| assert_eq!(wait(s), [700_000]));
    }
    assert!(sent == got);
}

#[test]
fn a_sender_is_done_before_the_receive_is_posted() {
    // The kernel holds less than the message.
    let net = net(|c| (c.net_streams, c.socket_buffer) = (1, 64 << 10));
    let (sender, receiver) = pair(&net, &net);
    let (data, mut got) = (pattern(2 << 20, 0), vec![0u8; 2 << 20]);
    // SAFETY: both live until their requests are done.
    unsafe {
        assert_eq!(wait(sender.send(data.as_ptr(), data.len(), 0).unwrap().unwrap()), [data.len()]);
        assert_eq!(wait(receiver.receive(&[(got.as_mut_ptr(), got.len(), 0)]).unwrap().unwrap()), [data.len()]);
    }
    assert!(data == got);
}

#[test]
fn a_piece_waits_for_its_receive_while_nobody_waits_for_others() {
    let mut memory = vec![0u8; 60_000];
    let ends = Ends::new();
    let Side::In(receiver) = &ends.into.connection.side else { panic!("a receiver") };
    let fragment = |tag| Frame::fragment(tag, 0, 60_000, 0, 60_000);
    let target = |tag, stream| match receiver.target(&fragment(tag), stream).unwrap() {
        None => "waits",
        Some(Target::Early(_)) => "early",
        Some(Target::Posted(_)) => "posted",
    };
    let mut post = |tag| {
        // SAFETY: it lives longer than the connection.
        assert!(unsafe { ends.into.receive(&[(memory.as_mut_ptr(), 60_000, tag)]) }.unwrap().is_some());
    };
    assert_eq!((target(1, Some(0)), target(1, None), target(2, Some(1))), ("waits", "early", "waits"));
    receiver.mark_late(2);
    assert_eq!((target(2, Some(1)), target(1, Some(0))), ("early", "waits"));
    post(1);
    assert_eq!((target(1, Some(0)), target(3, Some(1))), ("posted", "early"));
}

#[test]
fn a_message_that_is_too_long_is_an_error_with_both_lengths() {
    let net = net(|_| ());
    let (sender, receiver) = pair(&net, &net);
    let (data, mut got) = (pattern(100, 0), [0u8; 50]);
    // SAFETY: both live until the connection is dropped.
    unsafe {
        let recv = receiver.receive(&[(got.as_mut_ptr(), 50, 0)]).unwrap().unwrap();
        sender.send(data.as_ptr(), 100, 0).unwrap().unwrap();
        let e = until("an error", || recv.test(&mut [0; MAX_GROUP]).err()).to_string();
        assert!(e.contains("100 bytes") && e.contains("room for 50") && e.contains("127.0.0.1"), "{e}");
    }
}

#[test]
fn different_windows_are_refused_at_both_ends() {
    let (ours, theirs) = (net(|c| c.net_window = 2 << 20), net(|_| ()));
    let (handle, listener) = theirs.listen().unwrap();
    let connecting = ours.connect(&handle).unwrap();
    let dialed = until("an error", || connecting.poll().err()).to_string();
    let accepted = until("an error", || listener.accept().err()).to_string();
    for e in [dialed, accepted] {
        assert!(e.contains("TINYNCCL_NET_WINDOW"), "{e}");
    }
}

#[test]
fn a_handshake_that_breaks_is_tried_again() {
    let (ours, theirs) = (net(|_| ()), net(|_| ()));
    let (handle, listener) = theirs.listen().unwrap();
    // Passes on all but the first connection and the third.
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let ports = (proxy.local_addr().unwrap().port(), 0);
    let behind = handle.acceptor_at(Ipv4Addr::LOCALHOST.into());
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Write);
        })
    };
    std::thread::scope(|scope| {
        let passing = scope.spawn(|| {
            let mut threads = Vec::new();
            for number in 0..6 {
                let (near, _) = proxy.accept().unwrap();
                if number % 2 == 1 || number > 2 {
                    let far = TcpStream::connect(behind).unwrap();
                    threads.push(copy(near.try_clone().unwrap(), far.try_clone().unwrap()));
                    threads.push(copy(far, near));
                }
            }
            threads
        });
        let connecting = ours.connect(&Handle { ports, ..handle }).unwrap();
        let sender = until("connect", || connecting.poll().unwrap());
        let receiver = until("accept", || listener.accept().unwrap());
        let (data, mut got) = (pattern(1 << 20, 1), vec![0u8; 1 << 20]);
        // SAFETY: both live until their requests are done.
        unsafe {
            let recv = receiver.receive(&[(got.as_mut_ptr(), got.len(), 0)]).unwrap().unwrap();
            assert_eq!(wait(sender.send(data.as_ptr(), data.len(), 0).unwrap().unwrap()), [data.len()]);
            assert_eq!(wait(recv), [data.len()]);
        }
        assert!(data == got);
        drop((sender, receiver));
        passing.join().unwrap().into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn no_route_is_an_error_at_both_ends_that_names_all_ports() {
    // Loopback of two "hosts": no data gets from one to the other.
    let (ours, theirs) = (net(|_| ()), net(|_| ()));
    let (handle, listener) = theirs.listen().unwrap();
    let elsewhere = Handle { host: handle.host + 1, ..handle };
    let connecting = ours.connect(&elsewhere).unwrap();
    let dialed = until("an error", || connecting.poll().err()).to_string();
    assert!(dialed.contains("from ports lo 127.0.0.1/8") && dialed.contains("to ports 127.0.0.1/8"), "{dialed}");
    if elsewhere.others.is_empty() {
        assert!(listener.accept().unwrap().is_none(), "there is no address but loopback's");
    } else {
        // The listener receives the error over another interface.
        let accepted = until("an error", || listener.accept().err()).to_string();
        assert!(accepted.contains(&dialed), "{accepted}");
    }
}

/// Streams of a connection whose two ends are here, as if over several rails.
pub(super) struct Ends {
    net: Net,
    pub(super) out: Sender,
    into: Receiver,
}

impl Ends {
    pub(super) fn new() -> Ends {
        Ends::over(net(|c| (c.net_chunk, c.net_window) = (64 << 10, 1 << 20)))
    }

    fn over(net: Net) -> Ends {
        let (outs, intos) = (0..4).map(|index| sockets(index, net.inner.config.encrypt)).unzip();
        let out = ends::sender("out".to_owned(), (outs, SEVERAL), &net.inner.resources()).unwrap();
        let into = ends::receiver("in".to_owned(), (intos, SEVERAL), &net.inner.resources()).unwrap();
        Ends { net, out, into }
    }

    /// Returns the numbers of the streams that both ends take for alive.
    fn alive(&self) -> Vec<usize> {
        let there = |index: usize| self.into.connection.alive().any(|(i, _)| i == index);
        self.out.connection.alive().map(|(index, _)| index).filter(|index| there(*index)).collect()
    }

    /// Adds a stream in a position that both ends have retired, or in a new one.
    fn add(&self) {
        let (out, into) = (&self.out.connection, &self.into.connection);
        let next = |connection: &connection::Connection, position| {
            connection.beside(position).map_or(position, |s| s.number() + connection.positions())
        };
        let numbers = (0..out.positions()).map(|position| next(out, position).max(next(into, position)));
        let free: Vec<usize> = numbers.filter(|number| out.is_free(*number) && into.is_free(*number)).collect();
        let Some(&index) = free.first() else { return };
        let sealed = self.net.inner.config.encrypt;
        let (ours, theirs) = sockets(index % out.positions(), sealed);
        let workers = &self.net.inner.workers;
        assert!(into.add(index, theirs, workers) && out.add(index, ours, workers));
        // Now and then the peer has one that the sender never had.
        if let Some(&last) = free.last().filter(|last| index.is_multiple_of(5) && **last != index) {
            let (own, stray) = sockets(last % out.positions(), sealed);
            assert!(into.add(last, stray, workers));
            if index.is_multiple_of(2) {
                // It ends by a reset.
                rustix::net::sockopt::set_socket_linger(&own, Some(Duration::ZERO)).unwrap();
            }
        }
        until("the stream", || into.alive().any(|(i, _)| i == index).then_some(()));
    }
}

/// Both ends of a TCP connection, on one of two addresses, encrypted if `sealed`.
fn sockets(index: usize, sealed: bool) -> (Socket, Socket) {
    let listener = TcpListener::bind((Ipv4Addr::new(127, 0, 0, 1 + index as u8 % 2), 0)).unwrap();
    let out = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let into = listener.accept().unwrap().0;
    for socket in [&out, &into] {
        socket.set_nonblocking(true).unwrap();
        socket.set_nodelay(true).unwrap();
    }
    let mut both = [out, into].map(|socket| Socket::new(socket, sealed));
    if sealed {
        seal::pair(&mut both);
    }
    both.into()
}

#[test]
fn lost_streams_cost_no_message_and_repeat_none() {
    for seed in 0..4 {
        let mut random = numbers(seed);
        let ends = Ends::over(net(|c| {
            (c.net_chunk, c.net_window, c.encrypt) = (64 << 10, 1 << 20, seed % 2 == 1);
        }));
        let (mut sent, mut lost) = (0, 0);
        while lost < 60 {
            let messages: Vec<Vec<u8>> = (0..8)
                .map(|_| {
                    sent += 1;
                    let len = [0, 7, 1500, 40_000, 700_000][random() % 5];
                    pattern(len, sent)
                })
                .collect();
            let mut got = vec![vec![0u8; 700_000]; 8];
            // SAFETY: all of it lives until the requests are done.
            unsafe {
                let late = random().is_multiple_of(2);
                let receive = |got: &mut Vec<Vec<u8>>| -> Vec<*const Request> {
                    let post = |g: &mut Vec<u8>| ends.into.receive(&[(g.as_mut_ptr(), g.len(), 0)]).unwrap().unwrap();
                    got.iter_mut().map(|g| std::ptr::from_ref(post(g))).collect()
                };
                let early = if late { Vec::new() } else { receive(&mut got) };
                let sends: Vec<_> =
                    messages.iter().map(|m| ends.out.send(m.as_ptr(), m.len(), 0).unwrap().unwrap()).collect();
                for _ in 0..random() % 3 {
                    let alive = ends.alive();
                    if alive.len() > 2 {
                        let stream = alive[random() % alive.len()];
                        let connection =
                            if random().is_multiple_of(2) { &ends.out.connection } else { &ends.into.connection };
                        if random().is_multiple_of(2) {
                            connection.fail_stream(stream, "a test loses it".to_owned());
                        } else {
                            // As if it stalled, at this end.
                            connection.suspect(stream, true);
                            connection.retire(stream, "a test doubts it");
                        }
                        lost += 1;
                    }
                }
                let receives = if late { receive(&mut got) } else { early };
                for (receive, message) in receives.into_iter().zip(&messages) {
                    assert_eq!(wait(&*receive), [message.len()]);
                }
                sends.into_iter().zip(&messages).for_each(|(s, m)| assert_eq!(wait(s), [m.len()]));
            }
            for (number, (got, message)) in got.iter().zip(&messages).enumerate() {
                assert!(got[..message.len()] == message[..], "seed {seed}, message {number} before {sent}");
            }
            until("four streams", || {
                ends.add();
                (ends.alive().len() >= 4).then_some(())
            });
        }
    }
}

#[test]
fn a_receiver_that_leaves_at_once_has_acknowledged_what_it_has() {
    let data = pattern(700_000, 1);
    let mut ends = Ends::new();
    for round in 0..300 {
        let Ends { net, out, into } = ends;
        let len = [4000, 700_000][round % 2];
        let mut got = vec![0u8; len];
        // SAFETY: both live until their requests are done.
        unsafe {
            let receive = into.receive(&[(got.as_mut_ptr(), len, 0)]).unwrap().unwrap();
            let send = out.send(data.as_ptr(), len, 0).unwrap().unwrap();
            wait(receive);
            drop(into);
            assert_eq!(wait(send), [len], "round {round}");
        }
        assert!(got == data[..len]);
        ends = Ends::over(net);
    }
}

/// Numbers that look random (Knuth's multiplier), the same for the same seed.
pub(super) fn numbers(seed: u64) -> impl FnMut() -> usize {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    }
}

#[test]
fn control_frames_that_make_no_sense_end_the_connection() {
    let cases: [(bool, Kind, i32, u64); 5] = [
        (true, Kind::Ack, 0, 1),
        (true, Kind::Retire, 1, 0),
        (true, Kind::RetireAck, 99, 0),
        (false, Kind::StreamFailed, 1, 0),
        (false, Kind::Retire, -1, 0),
    ];
    for (to_sender, kind, about, number) in cases {
        let net = net(|_| ());
        let (ours, theirs) = sockets(0, false);
        let all = (vec![ours, sockets(1, false).0], SEVERAL);
        let (sender, receiver, connection);
        if to_sender {
            sender = ends::sender("x".to_owned(), all, &net.inner.resources()).unwrap();
            connection = sender.connection.clone();
        } else {
            receiver = ends::receiver("x".to_owned(), all, &net.inner.resources()).unwrap();
            connection = receiver.connection.clone();
        }
        theirs.tcp().write_all(bytemuck::bytes_of(&Frame::control(kind, about, number))).unwrap();
        until("its end", || connection.is_over().then_some(()));
    }
}
