//! The command line.

use clap::builder::RangedU64ValueParser;
use clap::{Parser, Subcommand};
use verbs_kit::choice::Choice;

/// One-sided RDMA: WRITE, WRITE_WITH_IMM and READ, what the peer sees of each, and four requests that it refuses.
///
/// Without a subcommand: server and client as two processes on this machine.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) choice: Choice,
    /// Bytes that each request moves.
    #[arg(long, global = true, default_value_t = 8192, value_parser = RangedU64ValueParser::<usize>::new().range(64..=64 << 20))]
    pub(crate) bytes: usize,
}

/// Subcommand of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Offer memory to one client and report what happens to it.
    Server {
        /// Address to listen on for the side channel, HOST:PORT; port 0 takes a free one.
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
