//! `Comm::send` and `Comm::recv`, as a program uses them: from ordinary memory, which is copied through the registered
//! slots of the link, or from memory that is registered itself, once or for each call.

use std::time::{Duration, Instant};

use anyhow::Result;
use tinynccl::Comm;
use tinynccl::comm::Persistent;

use crate::{Args, Level, What, bandwidth, half_round_trip};

/// The data to send.
enum Data {
    Ordinary(Vec<u8>),
    Registered(Persistent<u8>),
    /// Registered before each call, and not any more after it.
    PerCall(Vec<u8>),
}

impl Data {
    fn send(&mut self, comm: &Comm, to: usize) -> Result<()> {
        match self {
            Data::Ordinary(data) => comm.send(data, to)?,
            Data::Registered(data) => comm.send(data, to)?,
            Data::PerCall(data) => {
                let registered = comm.register_persistent(std::mem::take(data))?;
                comm.send(&registered, to)?;
                *data = registered.into_inner();
            }
        }
        Ok(())
    }
}

pub(crate) fn measure(comm: &Comm, args: &Args) -> Result<f64> {
    let data = vec![1u8; args.bytes];
    let mut into = data.clone();
    let mut data = match args.level {
        Level::Registered => Data::Registered(comm.register_persistent(data)?),
        Level::Registering => Data::PerCall(data),
        _ => Data::Ordinary(data),
    };
    let first = comm.rank() == 0;
    match args.what {
        What::Bw => {
            stream(comm, &mut data, &mut into, args.iters / 10 + 1)?;
            Ok(bandwidth(args, stream(comm, &mut data, &mut into, args.iters)?))
        }
        What::Lat => {
            let mut times = Vec::with_capacity(args.iters);
            for _ in 0..args.iters + args.iters / 10 {
                let start = Instant::now();
                if first {
                    data.send(comm, 1)?;
                    comm.recv(&mut into, 1)?;
                } else {
                    comm.recv(&mut into, 0)?;
                    data.send(comm, 0)?;
                }
                times.push(start.elapsed());
            }
            Ok(half_round_trip(times.split_off(args.iters / 10)))
        }
    }
}

fn stream(comm: &Comm, data: &mut Data, into: &mut [u8], n: usize) -> Result<Duration> {
    let mut done = [0u8];
    comm.barrier()?;
    let start = Instant::now();
    for _ in 0..n {
        if comm.rank() == 0 { data.send(comm, 1)? } else { comm.recv(into, 0)? }
    }
    if comm.rank() == 0 {
        comm.recv(&mut done, 1)?
    } else {
        comm.send(&done, 0)?
    }
    Ok(start.elapsed())
}
