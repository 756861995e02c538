//! Milestone 01: a TCP echo server and client.
//!
//! Without a subcommand the program is both, over the loopback interface. See README.md beside Cargo.toml.

mod client;
mod framing;
mod measure;
mod server;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use client::{Client, SocketOptions};
use measure::micros;
use server::Limits;

/// TCP echo: framing, short reads, latency and bandwidth.
///
/// Without a subcommand: a server thread and a client in one process, over the loopback interface.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    mode: Option<Mode>,
    #[command(flatten)]
    client: ClientArgs,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// Send every frame back to its sender, until stopped.
    Server {
        /// Address to listen on, HOST:PORT; port 0 takes a free one.
        #[arg(long, default_value = "127.0.0.1:4701")]
        listen: String,
        /// Longest payload accepted: bytes, K, M or G may follow.
        #[arg(long, default_value = "16M", value_parser = parse_size)]
        max_frame: usize,
        /// Close a connection that is silent for this many seconds.
        #[arg(long, default_value = "60", value_parser = parse_seconds)]
        timeout: Duration,
        /// Serve one connection, then end; exit code 1 when it broke the protocol.
        #[arg(long)]
        once: bool,
    },
    /// Measure latency and bandwidth against a server.
    Client {
        /// Address of the server, HOST:PORT.
        #[arg(long, default_value = "127.0.0.1:4701")]
        connect: String,
        #[command(flatten)]
        client: ClientArgs,
    },
}

#[derive(Debug, Args)]
struct ClientArgs {
    /// Leave Nagle's algorithm on (do not set TCP_NODELAY).
    #[arg(long)]
    nagle: bool,
    /// Send header and payload in two write calls instead of one.
    #[arg(long)]
    split: bool,
    /// Number of 8-byte round trips that measure the latency. A measurement ends early after three seconds.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..))]
    round_trips: u32,
    /// Largest frame of the table: bytes, K, M or G may follow.
    #[arg(long, default_value = "16M", value_parser = parse_size)]
    max_size: usize,
    /// Fail when connecting, or any single wait, takes longer than this many seconds.
    #[arg(long, default_value = "10", value_parser = parse_seconds)]
    timeout: Duration,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let result = match cli.mode {
        None => alone(&cli.client),
        Some(Mode::Server { listen, max_frame, timeout, once }) => {
            serve(&listen, Limits { frame: max_frame, timeout }, once)
        }
        Some(Mode::Client { connect, client }) => measure(&connect, &client),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs a server thread and a client over loopback, then shows how Nagle's algorithm delays a careless sender.
fn alone(args: &ClientArgs) -> Result<()> {
    let (listener, address) = server::bind("127.0.0.1:0")?;
    let limits = Limits { frame: args.max_size.max(64), timeout: args.timeout };
    std::thread::Builder::new()
        .name("server".to_owned())
        .spawn(move || {
            // The thread ends with the process. The client's error says more than the server's would.
            let _ = server::serve(&listener, limits, false);
        })
        .context("cannot start the server's thread")?;
    let address = address.to_string();
    measure(&address, args)?;
    nagle_lesson(&address, args)
}

fn serve(listen: &str, limits: Limits, once: bool) -> Result<()> {
    let (listener, address) = server::bind(listen)?;
    println!("listening on {address}");
    server::serve(&listener, limits, once)
}

fn measure(address: &str, args: &ClientArgs) -> Result<()> {
    let options = SocketOptions { nagle: args.nagle, split: args.split, timeout: args.timeout };
    let in_words = || format!("echo with {address}");
    let mut client = Client::connect(address, options)?;
    println!("connected to {address}, {}", describe(options));
    let summary = measure::round_trips(&mut client, 8, args.round_trips as usize).with_context(in_words)?;
    if let Some(s) = summary {
        println!(
            "8-byte round trip: min {:.1} us, median {:.1} us, p99 {:.1} us ({} round trips)\n",
            micros(s.min),
            micros(s.median),
            micros(s.p99),
            s.trips
        );
    }
    measure::table(&mut client, args.max_size).with_context(in_words)?;
    println!("\nevery byte came back as it was sent");
    Ok(())
}

/// Measures the 8-byte round trip for the four ways to send: one call or two, with and without TCP_NODELAY.
fn nagle_lesson(address: &str, args: &ClientArgs) -> Result<()> {
    println!("\n8-byte round trip, 50 times:");
    for (nagle, split) in [(false, false), (false, true), (true, false), (true, true)] {
        let options = SocketOptions { nagle, split, timeout: args.timeout };
        let mut client = Client::connect(address, options)?;
        if let Some(s) = measure::round_trips(&mut client, 8, 50).with_context(|| format!("echo with {address}"))? {
            println!("  {:<46} median {:>9.1} us", describe(options), micros(s.median));
        }
    }
    Ok(())
}

fn describe(options: SocketOptions) -> String {
    let nagle = if options.nagle { "Nagle's algorithm on" } else { "TCP_NODELAY" };
    let calls = if options.split { "header and payload apart" } else { "one write per frame" };
    format!("{nagle}, {calls}")
}

/// Bytes of a frame's payload: at least 1, at most what the header's length field holds.
fn parse_size(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1usize),
    };
    digits
        .parse::<usize>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .filter(|n| (1..=u32::MAX as usize).contains(n))
        .ok_or_else(|| "expected 1 to 4294967295 bytes, K, M or G may follow".to_owned())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected seconds, like 2.5".to_owned())?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|d| (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(d))
        .ok_or_else(|| "expected 0.001 to 86400 seconds".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_and_seconds_have_bounds() {
        assert_eq!(parse_size("16M"), Ok(16 << 20));
        assert_eq!(parse_size("8"), Ok(8));
        for bad in ["", "M", "0", "-1", "4G", "99999999999999999999", "1.5M", "é"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_seconds("2.5"), Ok(Duration::from_millis(2500)));
        for bad in ["", "soon", "0", "-1", "inf", "NaN", "1e99"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }
}
