//! Runs server and client of a program as two processes on this machine that print to one terminal.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};

use crate::unavailable::{EXIT_UNAVAILABLE, Unavailable};

/// `--listen` value of a server that gets its listening socket as standard input, as under inetd.
pub const STDIN: &str = "-";

/// The listening socket for `--listen`: HOST:PORT, or [`STDIN`]. For HOST:PORT it prints the actual address.
pub fn listener(listen: &str) -> Result<TcpListener> {
    if listen == STDIN {
        let socket = io::stdin().as_fd().try_clone_to_owned().context("standard input as a listening socket")?;
        return Ok(TcpListener::from(socket));
    }
    let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    crate::say!("listening on {}", listener.local_addr().context("side channel")?);
    Ok(listener)
}

/// Starts this program as `server` and as `client ADDRESS`, both with our own options and each with more, and waits for
/// both. We have no subcommand, so our arguments are options that go with any.
///
/// Both write to our standard output themselves, so the order of the lines is the order of events.
pub fn both_sides(server: &[&str], client: &[&str]) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").context("side channel")?;
    let address = listener.local_addr().context("side channel")?.to_string();
    let listen = format!("--listen={STDIN}");
    let mut server = start("server", Stdio::from(OwnedFd::from(listener)), &[&[&*listen], server].concat())?;
    let ended = start("client", Stdio::null(), &[&[&*address], client].concat())
        .and_then(|mut child| child.wait().context("the client process"));
    // The server ends whatever the client did: its connection closes, or no client connects within its timeout.
    let server = server.wait().context("the server process")?;
    check("client", ended?)?;
    check("server", server)
}

fn start(side: &str, stdin: Stdio, arguments: &[&str]) -> Result<Child> {
    let program = std::env::current_exe().context("the path of this program")?;
    Command::new(program)
        .arg(side)
        .args(std::env::args_os().skip(1))
        .arg(format!("--side={side}"))
        .args(arguments)
        .stdin(stdin)
        .spawn()
        .with_context(|| format!("cannot start the {side}"))
}

fn check(side: &str, status: ExitStatus) -> Result<()> {
    if status.code() == Some(EXIT_UNAVAILABLE.into()) {
        return Err(Unavailable::of_side(side).into());
    }
    ensure!(status.success(), "the {side} ended with {status}; it says why above");
    Ok(())
}
