//! Speed of a connection of `tinynccl::transport::rails`, the one under NVIDIA's NCCL. `scripts/net-rails.sh` runs its
//! ends between network namespaces.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::Parser;
use program_kit::size;
use tinynccl::Config;
use tinynccl::transport::rails::{Handle, Listener, MAX_GROUP, Net, Receiver, Request, Sender};

use crate::messages::{Messages, half_round_trip};

/// Messages in flight.
const DEPTH: usize = 8;
const LARGEST: usize = 16 << 20;
/// Round trips of a ping.
const TURNS: usize = 10_000;

/// Speed of a connection over several network interfaces: one end of it, or a relay between two.
#[derive(Debug, Parser)]
pub(crate) enum End {
    /// Prints a handle, receives, and prints at the end megabytes per second from the first message to the last, and
    /// the longest time between two messages.
    Receive,
    /// Sends to the receivers of these handles, to all at the same time.
    Send {
        /// Handles as the receivers print them, separated by commas.
        handles: String,
        #[arg(default_value = "3", value_parser = size::seconds)]
        seconds: Duration,
        /// Length of a message.
        #[arg(default_value = "1M", value_parser = size::within(0..=LARGEST))]
        bytes: usize,
    },
    /// Prints a handle, reads the other end's, and prints the median of half a round trip.
    Ping {
        /// Length of a message.
        #[arg(default_value = "8", value_parser = size::within(1..=LARGEST))]
        bytes: usize,
    },
    /// Relays until its input ends.
    Relay,
}

pub(crate) fn run(end: &End) -> Result<i32> {
    let net = Net::new(&Config::from_env()?)?;
    match end {
        End::Receive => receive(&net)?,
        End::Send { handles, seconds, bytes } => {
            let senders = handles.split(',').map(|handle| connect(&net, handle)).collect::<Result<Vec<_>>>()?;
            send(&net, &senders, *bytes, *seconds)?;
        }
        End::Ping { bytes } => ping(&net, *bytes)?,
        End::Relay => {
            println!("relays");
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
        }
    }
    Ok(0)
}

/// Repeats a call until it gives something.
fn until<T>(mut call: impl FnMut() -> tinynccl::Result<Option<T>>) -> Result<T> {
    loop {
        match call()? {
            Some(there) => return Ok(there),
            None => std::thread::yield_now(),
        }
    }
}

/// Waits for connections to a handle, which is printed and returned.
fn listen(net: &Net) -> Result<(String, Listener)> {
    let (handle, listener) = net.listen()?;
    let text: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{text}");
    Ok((text, listener))
}

fn connect(net: &Net, handle: &str) -> Result<Sender> {
    let byte = |at: usize| u8::from_str_radix(handle.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..handle.len()).step_by(2).map(byte).collect();
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok()).context("expected a handle as the receiver prints it")?;
    let connecting = net.connect(&Handle::parse(&bytes)?)?;
    until(|| connecting.poll())
}

/// One end of a connection in each direction.
struct Pair {
    sender: Sender,
    receiver: Receiver,
    data: Vec<u8>,
}

fn done(request: Option<&Request>) -> Result<()> {
    let request = request.context("expected a free request")?;
    until(|| request.test(&mut [0; MAX_GROUP])).map(drop)
}

impl Messages for Pair {
    fn send(&mut self, bytes: usize) -> Result<()> {
        // SAFETY: the data outlives the request, the only one.
        done(unsafe { self.sender.send(self.data.as_ptr(), bytes, 0) }?)
    }

    fn recv(&mut self, bytes: usize) -> Result<()> {
        // SAFETY: as above.
        done(unsafe { self.receiver.receive(&[(self.data.as_mut_ptr(), bytes, 0)]) }?)
    }
}

fn ping(net: &Net, bytes: usize) -> Result<()> {
    let (ours, listener) = listen(net)?;
    let mut theirs = String::new();
    std::io::stdin().read_line(&mut theirs)?;
    let theirs = theirs.trim();
    let sender = connect(net, theirs)?;
    let mut pair = Pair { sender, receiver: until(|| listener.accept())?, data: vec![7; bytes] };
    println!("{:.1} us", half_round_trip(&mut pair, ours.as_str() < theirs, bytes, TURNS)?);
    Ok(())
}

fn send(net: &Net, senders: &[Sender], bytes: usize, time: Duration) -> Result<()> {
    let mut data = vec![7u8; bytes];
    // SAFETY: `data` is there for longer.
    let _registered = unsafe { net.register(data.as_mut_ptr(), bytes) };
    let mut open: Vec<Vec<Option<&Request>>> = senders.iter().map(|_| vec![None; DEPTH]).collect();
    let start = Instant::now();
    while start.elapsed() < time || open.iter().flatten().any(Option::is_some) {
        for (sender, open) in senders.iter().zip(&mut open) {
            for place in open {
                if let Some(request) = place
                    && request.test(&mut [0; MAX_GROUP])?.is_some()
                {
                    *place = None;
                }
                if place.is_none() && start.elapsed() < time {
                    // SAFETY: `data` lives until all requests are done, and nothing writes to it.
                    *place = unsafe { sender.send(data.as_ptr(), data.len(), 0)? };
                }
            }
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn receive(net: &Net) -> Result<()> {
    let (_, listener) = listen(net)?;
    let receiver = until(|| listener.accept())?;
    let mut memory = vec![vec![0u8; LARGEST]; DEPTH];
    // SAFETY: `memory` is there for longer.
    let register = |memory: &mut Vec<u8>| unsafe { net.register(memory.as_mut_ptr(), LARGEST) };
    let _registered: Vec<_> = memory.iter_mut().map(register).collect();
    // SAFETY: `memory` outlives the requests, each of which has a separate vector.
    let mut post = |place: usize| unsafe { receiver.receive(&[(memory[place].as_mut_ptr(), LARGEST, 0)]) };
    let mut open = (0..DEPTH).map(&mut post).collect::<tinynccl::Result<Vec<_>>>()?;
    let (mut total, mut first, mut last, mut pause) = (0, None, Instant::now(), Duration::ZERO);
    for place in (0..DEPTH).cycle() {
        let mut sizes = [0; MAX_GROUP];
        // The end of the connection is the end of the run.
        let Some(request) = open[place] else { break };
        if until(|| request.test(&mut sizes)).is_err() {
            break;
        }
        let now = Instant::now();
        match first {
            None => first = Some(now),
            Some(_) => {
                total += sizes[0];
                pause = pause.max(now - last);
            }
        }
        last = now;
        let Ok(next) = post(place) else { break };
        open[place] = next;
    }
    let time = first.map_or(Duration::ZERO, |first| last - first).as_secs_f64();
    // Before its memory.
    drop(receiver);
    println!("{:.1} MB/s, longest pause {:.1} ms", total as f64 / 1e6 / time.max(1e-9), pause.as_secs_f64() * 1e3);
    Ok(())
}
