//! Settings that the sockets of links get before they connect or listen.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::bootstrap::interface::source_for;
use tinynccl_sys::config::Config;

/// Congestion control of links within a host, in place of one that paces. Every kernel has it, and lets every user
/// choose it.
const UNPACED: &str = "reno";

/// Settings of the sockets of an endpoint.
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    /// `Config::socket_buffer`.
    buffer: usize,
    /// `Config::congestion`.
    congestion: Option<String>,
    /// Congestion control that the kernel gives to a new socket.
    default: String,
    /// `Config::encrypt`.
    pub(super) encrypt: bool,
}

impl SocketOptions {
    pub(crate) fn new(config: &Config) -> SocketOptions {
        SocketOptions {
            buffer: config.socket_buffer,
            congestion: config.congestion.clone(),
            ..SocketOptions::for_messages(config.encrypt)
        }
    }

    /// Settings of connections that carry a message or two.
    pub(crate) fn for_messages(encrypt: bool) -> SocketOptions {
        SocketOptions { buffer: 0, congestion: None, default: default_congestion().unwrap_or_default(), encrypt }
    }

    /// For a socket that will dial `to`.
    pub(crate) fn dialing(&self, socket: &SockRef<'_>, to: SocketAddr) {
        self.common(socket);
        let local = || source_for(to).is_ok_and(|source| source == to.ip());
        if let Some(name) = &self.congestion {
            set_congestion(socket, name);
        } else if self.is_paced() && local() {
            set_congestion(socket, UNPACED);
        }
    }

    /// For a socket that will listen. Accepted ones inherit its settings; they then go through
    /// [`SocketOptions::accepted`].
    pub(super) fn listening(&self, socket: &SockRef<'_>) {
        self.common(socket);
        if let Some(name) = &self.congestion {
            set_congestion(socket, name);
        } else if self.is_paced() {
            // A connection that has begun with a pacing one keeps its timer when it is given another.
            set_congestion(socket, UNPACED);
        }
    }

    /// For a socket that was accepted.
    pub(super) fn accepted(&self, socket: &TcpStream) {
        let local = match (socket.local_addr(), socket.peer_addr()) {
            (Ok(ours), Ok(theirs)) => ours.ip() == theirs.ip(),
            _ => false,
        };
        if self.congestion.is_none() && self.is_paced() && !local {
            set_congestion(&SockRef::from(socket), &self.default);
        }
    }

    /// BBR sends at the rate that it has measured, on a timer. Between processes of a host there is no path to measure,
    /// and the timer halves the speed: 2.9 GB/s instead of 6 with one stream of iperf3.
    fn is_paced(&self) -> bool {
        self.default.starts_with("bbr")
    }

    fn common(&self, socket: &SockRef<'_>) {
        log("TCP_NODELAY", socket.set_tcp_nodelay(true));
        let alive = TcpKeepalive::new()
            .with_time(Duration::from_secs(10))
            .with_interval(Duration::from_secs(5))
            .with_retries(4);
        log("keep-alive", socket.set_tcp_keepalive(&alive));
        if self.buffer > 0 {
            log("SO_SNDBUF", socket.set_send_buffer_size(self.buffer));
            log("SO_RCVBUF", socket.set_recv_buffer_size(self.buffer));
        }
    }
}

/// Failures are logged: a link works without.
fn log(what: &str, result: std::io::Result<()>) {
    if let Err(e) = result {
        log::warn!("tcp: setting {what} failed: {e}");
    }
}

fn set_congestion(socket: &SockRef<'_>, name: &str) {
    log(&format!("TCP_CONGESTION to {name}"), socket.set_tcp_congestion(name.as_bytes()));
}

fn default_congestion() -> Option<String> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
    let name = socket.tcp_congestion().ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accept::conn::Conn;
    use crate::tcp::listen::{Port, incoming};

    /// Congestion control of a connection within the host: as dialed, as accepted.
    fn within_the_host(options: &SocketOptions) -> [String; 2] {
        let port = Port::bind("127.0.0.1".parse().unwrap(), None, options).unwrap();
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        options.dialing(&SockRef::from(&socket), port.addr);
        socket.connect(&port.addr.into()).unwrap();
        let pending = loop {
            if let Some(pending) = incoming(&port).unwrap() {
                break pending;
            }
        };
        let name =
            |s: SockRef<'_>| String::from_utf8(s.tcp_congestion().unwrap()).unwrap().trim_end_matches('\0').to_owned();
        [name(SockRef::from(&socket)), name(SockRef::from(&pending.fd()))]
    }

    #[test]
    fn only_bbr_is_replaced_within_a_host_and_a_name_always_counts() {
        let kernels = default_congestion().unwrap();
        let with = |default: &str, congestion: Option<&str>| {
            let congestion = congestion.map(str::to_owned);
            within_the_host(&SocketOptions {
                congestion,
                default: default.to_owned(),
                ..SocketOptions::for_messages(false)
            })
        };
        assert_eq!(with("bbr", None), [UNPACED, UNPACED]);
        assert_eq!(with("cubic", None), [kernels.as_str(), kernels.as_str()], "left alone");
        assert_eq!(with("cubic", Some(UNPACED)), [UNPACED, UNPACED]);
        assert_eq!(
            with("cubic", Some("no such thing")),
            [kernels.as_str(), kernels.as_str()],
            "logged, and left alone"
        );
    }
}
