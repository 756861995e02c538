//! `--check`: pings over every port pair, from both ends.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use program_kit::stats::median;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

use super::node::Node;
use super::plan::Cable;

/// Longest time that a port may take to answer.
const LIMIT: Duration = Duration::from_secs(2);
/// Round trips of a ping.
const ROUNDS: usize = 21;

/// A ping over a port pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Ping {
    /// The node that pings and the one that should reply.
    pub(super) nodes: [usize; 2],
    /// Their ports.
    pub(super) ports: [usize; 2],
    /// The median round trip in microseconds, or why there was none.
    pub(super) outcome: Result<f64, String>,
}

/// Answers pings on every port of the node, as long as the process lives, from callers that know the node's token.
///
/// # Errors
/// A port's address cannot be bound.
pub(super) fn answer(node: &mut Node) -> Result<()> {
    for port in &mut node.ports {
        let listener = TcpListener::bind((port.ip, 0)).with_context(|| format!("listening at {}", port.ip))?;
        port.echo = Some(listener.local_addr().with_context(|| format!("listening at {}", port.ip))?);
        let token = node.token;
        std::thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                std::thread::spawn(move || echo(caller, token));
            }
        });
    }
    Ok(())
}

/// Sends eight bytes back at a time. An error ends it: the caller sees that its connection closes.
fn echo(mut caller: TcpStream, token: u64) -> std::io::Result<()> {
    caller.set_nodelay(true)?;
    caller.set_read_timeout(Some(LIMIT))?;
    let mut word = [0; 8];
    caller.read_exact(&mut word)?;
    if word != token.to_le_bytes() {
        return Ok(());
    }
    loop {
        caller.write_all(&word)?;
        caller.read_exact(&mut word)?;
    }
}

/// Pings over every port pair of node `us`, the next higher nodes first, so that not all nodes ping one node at once.
pub(super) fn all(nodes: &[Node], cables: &[Cable], us: usize) -> Vec<Ping> {
    let peer = |cable: &Cable| cable.nodes[usize::from(cable.nodes[0] == us)];
    let mut ours: Vec<&Cable> = cables.iter().filter(|cable| cable.nodes.contains(&us)).collect();
    ours.sort_by_key(|cable| (peer(cable) + nodes.len() - us) % nodes.len());
    let one = |cable: &Cable| {
        let mut cable = *cable;
        if cable.nodes[0] != us {
            cable.nodes.reverse();
            cable.ports.reverse();
        }
        let outcome = ping(nodes, &cable).map_err(|e| format!("{e:#}"));
        Ping { nodes: cable.nodes, ports: cable.ports, outcome }
    };
    ours.into_iter().map(one).collect()
}

/// Pings from the first end to the second; returns the median round trip in microseconds.
fn ping(nodes: &[Node], cable: &Cable) -> Result<f64> {
    let [from, to] = cable.ends(nodes).context("no such port")?;
    let (at, token) = (to.echo.context("the node does not answer pings")?, nodes[cable.nodes[1]].token);
    let mut stream = connect(from.ip, at)?;
    let mut trip = |word: [u8; 8]| -> Result<Duration> {
        let start = Instant::now();
        let mut back = [0; 8];
        stream.write_all(&word).and_then(|()| stream.read_exact(&mut back)).map_err(said)?;
        ensure!(back == word, "expected {word:?}, got {back:?}");
        Ok(start.elapsed())
    };
    trip(token.to_le_bytes())?;
    let trips: Result<Vec<f64>> = (0..ROUNDS).map(|i| Ok(trip(i.to_le_bytes())?.as_secs_f64() * 1e6)).collect();
    median(&trips?).context("no round trip")
}

/// Connects from this port and no other, whatever the routes are.
fn connect(from: IpAddr, to: SocketAddr) -> Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind(&SocketAddr::new(from, 0).into()).with_context(|| format!("binding {from}"))?;
    socket.connect_timeout(&to.into(), LIMIT).map_err(said)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_read_timeout(Some(LIMIT))?;
    socket.set_write_timeout(Some(LIMIT))?;
    Ok(socket.into())
}

/// Describes an I/O error; a timeout has two names, and neither has its length.
fn said(error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => {
            anyhow!("no answer within {} s", LIMIT.as_secs())
        }
        _ => error.into(),
    }
}
