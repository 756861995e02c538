//! The command line.

use clap::{Parser, Subcommand};
use verbs_hello::choice::Choice;

/// One-sided RDMA: WRITE, WRITE_WITH_IMM and READ, what the other side sees of each, and four ways to be refused.
///
/// Without a subcommand: server and client as two processes of this machine.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) choice: Choice,
    /// Bytes that each request moves.
    #[arg(long, global = true, default_value_t = 8192, value_parser = parse_bytes)]
    pub(crate) bytes: usize,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Offer memory to one client and report what happens to it.
    Server {
        /// Where to listen for the side channel, HOST:PORT; port 0 takes a free one.
        #[arg(long, default_value = "127.0.0.1:4705")]
        listen: String,
    },
    /// Write to and read from a server's memory.
    Client {
        /// The server's side channel, HOST:PORT.
        #[arg(default_value = "127.0.0.1:4705")]
        address: String,
    },
}

fn parse_bytes(text: &str) -> Result<usize, String> {
    let bytes = text.parse().ok().filter(|n| (64..=64 << 20).contains(n));
    bytes.ok_or_else(|| "expected 64 to 67108864 bytes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
        assert_eq!(parse_bytes("64"), Ok(64));
        for bad in ["", "0", "63", "67108865", "-1", "8K"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }
}
