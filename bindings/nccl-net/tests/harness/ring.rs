//! Rings of ranks that send on what they received.

use std::ffi::c_int;
use std::sync::Barrier;

use super::again::{self, hear, hex, say, unhex};
use super::api::*;

/// Messages of each length that go round.
const ROUNDS: usize = 2;
const LENGTHS: [usize; 4] = [8, 4096, 300_000, (1 << 20) + 1];

/// A rank: sends to the next one what it got from the one before, until its own has come back.
fn run(api: Api, rank: usize, size: usize, send: Comm, recv: Comm) {
    for len in LENGTHS {
        for round in 0..ROUNDS {
            let mut current = pattern(len, rank + round);
            for step in 1..=size {
                let mut got = vec![0; len];
                let receive = api.irecv(recv, &mut [(&mut got, round as c_int)]).unwrap();
                let request = api.isend(send, &current, round as c_int).unwrap();
                assert_eq!((api.wait(receive, 1), api.wait(request, 1)), (vec![len], vec![len]));
                let origin = (rank + size - step) % size;
                assert!(is_pattern(&got, origin + round), "rank {rank}, step {step} of {size}, {len} bytes");
                current = got;
            }
        }
    }
}

#[test]
fn ranks_as_threads() {
    const SIZE: usize = 4;
    for version in VERSIONS {
        let listening: Vec<(Handle, usize)> = (0..SIZE)
            .map(|_| {
                let (handle, listen) = Api::init(version).listen();
                (handle, listen as usize)
            })
            .collect();
        let barrier = Barrier::new(SIZE);
        std::thread::scope(|scope| {
            for rank in 0..SIZE {
                let (listening, barrier) = (&listening, &barrier);
                scope.spawn(move || {
                    let api = Api { version };
                    let listen = listening[rank].1 as Comm;
                    let (send, recv) = api.meet(listening[(rank + 1) % SIZE].0, listen);
                    api.close_listen(listen);
                    run(api, rank, SIZE, send, recv);
                    barrier.wait();
                    api.close_send(send);
                    api.close_recv(recv);
                    api.finalize();
                });
            }
        });
    }
}

#[test]
fn ranks_as_processes() {
    if let Some(role) = again::role() {
        let numbers: Vec<usize> = role.split(' ').map(|n| n.parse().unwrap()).collect();
        let (rank, size, version) = (numbers[0], numbers[1], numbers[2]);
        let api = Api::init(version as u32);
        let (handle, listen) = api.listen();
        say(&hex(&handle));
        // Neighbours connect to each other at once.
        let (send, recv) = api.meet(unhex(&hear()), listen);
        api.close_listen(listen);
        run(api, rank, size, send, recv);
        api.close_send(send);
        api.close_recv(recv);
        api.finalize();
        return say("done");
    }
    const SIZE: usize = 3;
    for version in [8, 12] {
        let role = |rank: usize| format!("{rank} {SIZE} {version}");
        let mut ranks: Vec<again::Process> =
            (0..SIZE).map(|rank| again::start(&[], "ring::ranks_as_processes", &role(rank), &[])).collect();
        let handles: Vec<String> = ranks.iter_mut().map(again::Process::line).collect();
        for (rank, process) in ranks.iter_mut().enumerate() {
            process.tell(&handles[(rank + 1) % SIZE]);
        }
        ranks.into_iter().for_each(again::Process::finish);
    }
}
