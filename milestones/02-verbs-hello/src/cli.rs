//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use verbs_kit::choice::Choice;

/// RDMA verbs: devices and GIDs, a queue pair from RESET to RTS, SEND and RECV.
///
/// Without a subcommand: the GID table, then server and client as two processes on this machine.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) choice: Choice,
    #[command(flatten)]
    pub(crate) talk: Talk,
}

/// Subcommand of the program.
#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Print devices and GID tables.
    List,
    /// Wait for one client, receive its text, answer, end.
    Server {
        /// Address to listen on for the side channel, HOST:PORT; port 0 takes a free one.
        #[arg(long, default_value = "127.0.0.1:4702")]
        listen: String,
    },
    /// Send a text to a server and wait for its answer.
    Client {
        /// The server's side channel, HOST:PORT.
        #[arg(default_value = "127.0.0.1:4702")]
        address: String,
    },
}

/// Settings of the conversation.
#[derive(Debug, Clone, Args)]
pub(crate) struct Talk {
    /// Text to send [default: a greeting].
    #[arg(long, global = true)]
    pub(crate) text: Option<String>,
    /// Size in bytes of the buffer posted for the peer's text.
    #[arg(long, global = true, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) recv_bytes: u32,
    /// Interface that connects the QP: `steps` shows each step, `safe` is the crate's handshake in one call.
    #[arg(long, global = true, value_enum, default_value_t = Api::Steps)]
    pub(crate) api: Api,
    /// Leave out the attributes of each step.
    #[arg(long, global = true, overrides_with = "brief")]
    pub(crate) brief: bool,
}

/// Interface to libibverbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Api {
    /// RESET, INIT, RTR, RTS one by one.
    Steps,
    /// One call of the crate `ibverbs`; needs the feature `verbs`.
    Safe,
}
