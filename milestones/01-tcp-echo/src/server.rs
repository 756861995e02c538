//! The server: one thread per connection echoes every frame unchanged.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::framing::{read_frame, write_frame};

/// Connections served at the same time. The server closes further ones at once.
const MAX_CONNECTIONS: usize = 64;

/// Limits for each connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Longest payload accepted, in bytes.
    pub(crate) frame: usize,
    /// Longest time a connection may be silent.
    pub(crate) timeout: Duration,
}

/// Binds `address` (`HOST:PORT`; port 0 lets the kernel choose) and returns the listener with its actual address.
pub(crate) fn bind(address: &str) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
    let local = listener.local_addr().context("cannot ask for the listening address")?;
    Ok((listener, local))
}

/// Serves connections until `accept` fails. With `once`, serves the first connection and returns its result.
///
/// A client that breaks the protocol costs one line of the log and its own connection, nothing else.
pub(crate) fn serve(listener: &TcpListener, limits: Limits, once: bool) -> Result<()> {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, peer) = listener.accept().context("cannot accept a connection")?;
        if once {
            return echo(stream, limits).map(drop).with_context(|| format!("client {peer}"));
        }
        if open.load(Ordering::Relaxed) >= MAX_CONNECTIONS {
            log::warn!("client {peer}: refused, {MAX_CONNECTIONS} connections are open");
            continue;
        }
        let others = open.fetch_add(1, Ordering::Relaxed);
        log::info!("client {peer}: connected, beside {others} others");
        let counter = Arc::clone(&open);
        let serve = move || {
            match echo(stream, limits) {
                Ok(frames) => log::info!("client {peer}: closed after {frames} frames"),
                Err(error) => log::warn!("client {peer}: {error:#}"),
            }
            counter.fetch_sub(1, Ordering::Relaxed);
        };
        if let Err(error) = thread::Builder::new().name(format!("echo {peer}")).spawn(serve) {
            open.fetch_sub(1, Ordering::Relaxed);
            log::warn!("client {peer}: no thread for it: {error}");
        }
    }
}

/// Sends every frame back until the client closes. Returns the number of frames.
fn echo(mut stream: TcpStream, limits: Limits) -> Result<u64> {
    stream.set_nodelay(true).context("cannot set TCP_NODELAY")?;
    stream.set_read_timeout(Some(limits.timeout)).context("cannot set the read timeout")?;
    stream.set_write_timeout(Some(limits.timeout)).context("cannot set the write timeout")?;
    let mut payload = Vec::new();
    let mut frames = 0;
    while read_frame(&mut stream, &mut payload, limits.frame)? {
        write_frame(&mut stream, &payload, false)?;
        frames += 1;
    }
    Ok(frames)
}
