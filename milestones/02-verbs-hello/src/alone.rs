//! Runs server and client of a program as two processes of this machine and shows what both print, line by line.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail};

/// What a server prints first, before its address.
pub const LISTENING: &str = "listening on ";

/// Starts this program as `server SERVER…` and, as soon as that listens, as `client ADDRESS CLIENT…`.
pub fn both_sides(server: &[String], client: &[String]) -> Result<()> {
    let mut first = start("server", server)?;
    let mut lines = BufReader::new(first.stdout.take().context("the server's output")?);
    let mut line = String::new();
    let errors = forward("server", first.stderr.take());
    let listening = lines.read_line(&mut line).context("the server's output");
    let address = listening.map(|_| line.trim_end().strip_prefix(LISTENING).map(str::to_owned));
    let Ok(Some(address)) = address else {
        return finish("server", first, vec![errors])
            .and_then(|()| bail!("the server said '{line}', not where it listens"));
    };
    let output = forward("server", Some(lines));
    let arguments: Vec<String> = std::iter::once(address).chain(client.iter().cloned()).collect();
    let second = start("client", &arguments).and_then(|mut child| {
        let threads = vec![forward("client", child.stdout.take()), forward("client", child.stderr.take())];
        finish("client", child, threads)
    });
    if second.is_err() {
        // It may still wait for its client, for as long as its timeout says.
        let _ = first.kill();
    }
    let first = finish("server", first, vec![output, errors]);
    second.and(first)
}

fn start(role: &str, arguments: &[String]) -> Result<Child> {
    let program = std::env::current_exe().context("the path of this program")?;
    Command::new(program)
        .arg(role)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start the {role}"))
}

/// Copies lines to our own output, each with the side that it comes from.
fn forward(role: &'static str, from: Option<impl Read + Send + 'static>) -> JoinHandle<()> {
    thread::spawn(move || {
        let Some(from) = from else { return };
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            // Nobody may be reading any more: that must not end the copying, or the child would block.
            let _ = writeln!(std::io::stdout(), "{role} | {line}");
        }
    })
}

fn finish(role: &str, mut child: Child, threads: Vec<JoinHandle<()>>) -> Result<()> {
    let status = child.wait().with_context(|| format!("the {role} process"))?;
    for thread in threads {
        let _ = thread.join();
    }
    if !status.success() {
        bail!("the {role} ended with {status}; it says why above");
    }
    Ok(())
}
