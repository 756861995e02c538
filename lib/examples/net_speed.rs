//! Speed of a connection of `tinynccl::transport::rails`, the one under NVIDIA's NCCL. `scripts/net-rails.sh` runs it between
//! network namespaces.
//!
//! ```text
//! cargo run --release -p tinynccl --example net_speed                         # prints a handle
//! cargo run --release -p tinynccl --example net_speed HANDLE [SECONDS [BYTES]]   # sends to it
//! cargo run --release -p tinynccl --example net_speed ping [BYTES]            # prints a handle, reads the other one
//! cargo run --release -p tinynccl --example net_speed socket [BYTES]          # what TCP itself takes over loopback
//! cargo run --release -p tinynccl --example net_speed relay                   # relays until its input ends
//! ```
//! The receiver prints, at the end, megabytes per second from the first message to the last, and the longest time
//! between two messages. Several handles, with commas between, are sent to at once. Of two that ping, one sends BYTES
//! bytes (8 if not given) and the other one sends them back; both print the median of half a round trip. `socket`
//! prints the same of one TCP connection between two threads that spin.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tinynccl::Config;
use tinynccl::transport::rails::{Handle, MAX_GROUP, Net, Receiver, Request, Sender};

/// Messages in flight.
const DEPTH: usize = 8;
const LARGEST: usize = 16 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let bytes = |place: usize, default| arguments.get(place).map_or(Ok(default), |s| s.parse::<usize>());
    if arguments.first().is_some_and(|first| first == "socket") {
        return socket(bytes(1, 8)?);
    }
    let net = Net::new(&Config::from_env()?)?;
    match arguments.first() {
        None => receive(&net),
        Some(ping) if ping == "ping" => ping_pong(&net, bytes(1, 8)?),
        Some(relay) if relay == "relay" => {
            println!("relays");
            std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
            Ok(())
        }
        Some(handles) => {
            let seconds = arguments.get(1).map_or(Ok(3.0), |s| s.parse())?;
            let bytes = bytes(2, 1 << 20)?;
            if bytes > LARGEST {
                return Err(format!("expected at most {LARGEST} bytes, got {bytes}").into());
            }
            let senders = handles.split(',').map(|h| connect(&net, h)).collect::<Result<Vec<Sender>>>()?;
            send(&net, &senders, bytes, Duration::from_secs_f64(seconds))
        }
    }
}

fn connect(net: &Net, text: &str) -> Result<Sender> {
    let digit = |byte: &u8| (*byte as char).to_digit(16).map(|digit| digit as u8);
    let byte = |pair: &[u8]| Some(digit(pair.first()?)? << 4 | digit(pair.get(1)?)?);
    let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
    let handle = bytes.and_then(|bytes| bytes.try_into().ok()).ok_or("expected a handle as the receiver prints it")?;
    let connecting = net.connect(&Handle::parse(&handle)?)?;
    loop {
        match connecting.poll()? {
            Some(sender) => return Ok(sender),
            None => std::thread::yield_now(),
        }
    }
}

/// Round trips of a ping, all of them timed.
const TURNS: usize = 10_000;

fn ping_pong(net: &Net, bytes: usize) -> Result<()> {
    let (handle, listener) = net.listen()?;
    let ours: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("{ours}");
    let mut theirs = String::new();
    std::io::stdin().read_line(&mut theirs)?;
    let first = ours.as_str() < theirs.trim();
    let sender = connect(net, theirs.trim())?;
    let receiver = loop {
        match listener.accept()? {
            Some(receiver) => break receiver,
            None => std::thread::yield_now(),
        }
    };
    let done = |request: Option<&Request>| -> Result<()> {
        let request = request.ok_or("expected a free request")?;
        while request.test(&mut [0; MAX_GROUP])?.is_none() {
            std::thread::yield_now();
        }
        Ok(())
    };
    let (data, mut got) = (vec![7u8; bytes], vec![0u8; bytes]);
    // SAFETY: both outlive the requests, of which one at a time is open.
    let send = || unsafe { sender.send(data.as_ptr(), data.len(), 0) };
    // SAFETY: as above.
    let mut receive = || unsafe { receiver.receive(&[(got.as_mut_ptr(), got.len(), 0)]) };
    print_half(|| {
        if first {
            done(send()?)?;
        }
        done(receive()?)?;
        if !first {
            done(send()?)?;
        }
        Ok(())
    })
}

/// Prints half of the median time of `turn`, a round trip.
fn print_half(mut turn: impl FnMut() -> Result<()>) -> Result<()> {
    let mut times = Vec::with_capacity(TURNS);
    for _ in 0..TURNS {
        let start = Instant::now();
        turn()?;
        times.push(start.elapsed() / 2);
    }
    times.sort();
    println!("{:.1} us", times.get(TURNS / 2).map_or(0.0, |time| time.as_secs_f64() * 1e6));
    Ok(())
}

fn socket(bytes: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut ours = TcpStream::connect(listener.local_addr()?)?;
    let (mut theirs, _) = listener.accept()?;
    for end in [&ours, &theirs] {
        end.set_nodelay(true)?;
        end.set_nonblocking(true)?;
    }
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut data = vec![0; bytes];
            // The end of this one ends with the other.
            while pass(&mut data, |data| theirs.read(data)).is_ok()
                && pass(&mut data, |data| theirs.write(data)).is_ok()
            {}
        });
        let mut data = vec![7; bytes];
        let done = print_half(|| {
            pass(&mut data, |data| ours.write(data))?;
            pass(&mut data, |data| ours.read(data))
        });
        drop(ours);
        done
    })
}

/// Has `call` read or write all of `data`.
fn pass(data: &mut [u8], mut call: impl FnMut(&mut [u8]) -> std::io::Result<usize>) -> Result<()> {
    let mut at = 0;
    while at < data.len() {
        match call(data.get_mut(at..).unwrap_or_default()) {
            Ok(0) => return Err("the other end has closed it".into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(e) => return Err(e.into()),
        }
    }
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
    let (handle, listener) = net.listen()?;
    println!("{}", handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let receiver: Receiver = loop {
        match listener.accept()? {
            Some(receiver) => break receiver,
            None => std::thread::yield_now(),
        }
    };
    let mut memory = vec![vec![0u8; LARGEST]; DEPTH];
    // SAFETY: `memory` is there for longer.
    let register = |memory: &mut Vec<u8>| unsafe { net.register(memory.as_mut_ptr(), LARGEST) };
    let _registered: Vec<_> = memory.iter_mut().map(register).collect();
    // SAFETY: `memory` outlives the requests, each of which has a separate vector.
    let mut post = |place: usize| unsafe { receiver.receive(&[(memory[place].as_mut_ptr(), LARGEST, 0)]) };
    let mut open = (0..DEPTH).map(&mut post).collect::<tinynccl::Result<Vec<_>>>()?;
    let (mut total, mut first, mut last, mut pause) = (0, None, Instant::now(), Duration::ZERO);
    // The end of the connection is the end of the run.
    'run: loop {
        for (place, open) in open.iter_mut().enumerate() {
            let Some(request) = *open else { break 'run };
            let mut sizes = [0; MAX_GROUP];
            loop {
                match request.test(&mut sizes) {
                    Ok(Some(_)) => break,
                    Ok(None) => std::thread::yield_now(),
                    Err(_) => break 'run,
                }
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
            let Ok(next) = post(place) else { break 'run };
            *open = next;
        }
    }
    let time = first.map_or(Duration::ZERO, |first| last - first).as_secs_f64();
    // Before its memory.
    drop(receiver);
    println!("{:.1} MB/s, longest pause {:.1} ms", total as f64 / 1e6 / time.max(1e-9), pause.as_secs_f64() * 1e3);
    Ok(())
}
