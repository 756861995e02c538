//! `Comm::send` and `Comm::recv`, as a program uses them.

use std::time::{Duration, Instant};

use anyhow::Result;
use tinynccl::Comm;

use crate::{Args, What, bandwidth, half_round_trip};

pub(crate) fn measure(comm: &Comm, args: &Args) -> Result<f64> {
    let mut data = vec![1u8; args.bytes];
    let first = comm.rank() == 0;
    match args.what {
        What::Bw => {
            stream(comm, &mut data, args.iters / 10 + 1)?;
            Ok(bandwidth(args, stream(comm, &mut data, args.iters)?))
        }
        What::Lat => {
            let mut times = Vec::with_capacity(args.iters);
            for _ in 0..args.iters + args.iters / 10 {
                let start = Instant::now();
                if first {
                    comm.send(&data, 1)?;
                    comm.recv(&mut data, 1)?;
                } else {
                    comm.recv(&mut data, 0)?;
                    comm.send(&data, 0)?;
                }
                times.push(start.elapsed());
            }
            Ok(half_round_trip(times.split_off(args.iters / 10)))
        }
    }
}

fn stream(comm: &Comm, data: &mut [u8], n: usize) -> Result<Duration> {
    let mut done = [0u8];
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..n {
        if comm.rank() == 0 { comm.send(data, 1)? } else { comm.recv(data, 0)? }
    }
    if comm.rank() == 0 {
        comm.recv(&mut done, 1)?
    } else {
        comm.send(&done, 0)?
    }
    Ok(start.elapsed())
}
