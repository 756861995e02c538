//! Measurements beside other programs, and of what has none beside it.
//!
//! ```text
//! gpu       collectives on GPUs beside NCCL's
//! verbs     messages between two ranks over RDMA, in perftest's manner, and over the kernel's sockets
//! net       connections of `tinynccl::transport::rails`: scripts/net-rails.sh runs their ends in namespaces
//! peers     collectives of MPI libraries, of Gloo and ours, in turn: scripts/compare-peers
//! chart     the pictures of docs/speed, from the raw values of records
//! wakeups   lost wake-ups for each way to order a waker and a sleeper
//! ```

mod chart;
#[cfg(feature = "cuda")]
mod gpu;
mod messages;
mod net;
mod peers;
mod table;
mod verbs;
mod wakeups;

use std::process::ExitCode;

use clap::Parser;
use tinynccl::Error;

/// Measurements beside other programs.
///
/// Exit status 77: the machine or the build lacks what the measurement needs.
#[derive(Debug, Parser)]
#[command(version)]
enum Perf {
    #[cfg(feature = "cuda")]
    Gpu(gpu::Options),
    Verbs(verbs::Options),
    #[command(subcommand)]
    Net(net::End),
    Peers(Box<peers::args::Args>),
    Chart(chart::Options),
    Wakeups(wakeups::Args),
}

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let outcome = match Perf::parse() {
        #[cfg(feature = "cuda")]
        Perf::Gpu(options) => gpu::run(&options),
        Perf::Verbs(options) => verbs::run(&options),
        Perf::Net(end) => net::run(&end),
        Perf::Peers(args) => peers::run(&args.settled()),
        Perf::Chart(options) => chart::run(&options),
        Perf::Wakeups(args) => wakeups::run(&args),
    };
    program_kit::exit_code(outcome, |error| matches!(error.downcast_ref(), Some(Error::Unsupported { .. })))
}
