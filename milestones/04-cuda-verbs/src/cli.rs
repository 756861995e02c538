//! The command line.

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, Subcommand};
use program_kit::size;
use verbs_kit::choice;

use crate::buffer;
use crate::plan::Plan;
use crate::probe::Stage;
use crate::terms::WireChoice;

/// Maximum number of chunks in flight.
pub const MOST_SLOTS: usize = 64;

/// A GPU's memory over RDMA: dmabuf, peer memory or pinned staging, with the reason; then every byte checked.
///
/// Without a subcommand: the report of the chosen path, then server and client as two processes on this machine.
/// Without a GPU the buffer is host memory, without RDMA the wire is TCP, and the program says so.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// Subcommand, if there is one.
    #[command(subcommand)]
    pub mode: Option<Mode>,
    /// The RDMA device.
    #[command(flatten)]
    pub choice: choice::Choice,
    /// The data.
    #[command(flatten)]
    pub data: Data,
}

/// Subcommand of the program.
#[derive(Debug, Subcommand)]
pub enum Mode {
    /// Report the hardware and the path that a run would use; move nothing.
    Probe,
    /// Receive a buffer from one client and check every byte.
    Server {
        /// Address to listen on for the side channel, HOST:PORT; port 0 takes a free one.
        #[arg(long, default_value = "127.0.0.1:4704")]
        listen: String,
    },
    /// Fill a buffer and send it to a server.
    Client {
        /// The server's side channel, HOST:PORT.
        #[arg(default_value = "127.0.0.1:4704")]
        address: String,
    },
}

/// Options of the transfer.
#[derive(Debug, Clone, Args)]
pub struct Data {
    /// Memory to use for the buffer.
    #[arg(long, global = true, value_enum, default_value = "auto")]
    pub buffer: buffer::Choice,
    /// Number of the GPU, among those that the driver shows (CUDA_VISIBLE_DEVICES).
    #[arg(long, global = true, default_value_t = 0)]
    pub gpu: usize,
    /// Wire that carries the bytes.
    #[arg(long, global = true, value_enum, default_value = "auto")]
    pub wire: WireChoice,
    /// Try only this path, and exit with status 77 if it does not work here [default: all, in order].
    #[arg(long, global = true, value_enum)]
    pub path: Option<Stage>,
    /// Size of the buffer: 1 byte to 64G; K, M and G are powers of 1024.
    #[arg(long, global = true, default_value = "16M", value_parser = size::within(1..=64 << 30))]
    pub bytes: usize,
    /// Size of a chunk, at most 1G.
    #[arg(long, global = true, default_value = "256K", value_parser = size::within(1..=1 << 30))]
    pub chunk: usize,
    /// Chunks in flight at a time: staging slots or posted requests, 2 to 64.
    #[arg(
        long,
        global = true,
        default_value = "2",
        value_parser = RangedU64ValueParser::<usize>::new().range(2..=MOST_SLOTS as u64)
    )]
    pub slots: usize,
    /// Number of times to fill, send and check the buffer.
    #[arg(long, global = true, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub rounds: u64,
    /// Print the chosen path in one line, without the reasons.
    #[arg(long, global = true, overrides_with = "brief")]
    pub brief: bool,
}

impl Data {
    /// The buffer's split into chunks.
    pub fn plan(&self) -> Plan {
        Plan { bytes: self.bytes, chunk: self.chunk.min(self.bytes), slots: self.slots }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
        let parses = |option: &str| Cli::try_parse_from(["x", option]).is_ok();
        for good in ["--bytes=1", "--bytes=64G", "--chunk=1G", "--slots=64"] {
            assert!(parses(good), "{good}");
        }
        for bad in ["--bytes=0", "--bytes=65G", "--chunk=2G", "--slots=1", "--slots=65"] {
            assert!(!parses(bad), "{bad}");
        }
    }

    #[test]
    fn a_side_takes_the_options_of_the_whole() {
        let given =
            ["x", "--buffer=host", "--gpu=3", "--wire=tcp", "--path=peer-memory", "--bytes=3K", "--chunk=5", "--brief"];
        let whole = Cli::try_parse_from(given).expect("valid").data;
        let side = [&["x", "server"], &given[1..], &["--side=server", "--listen=-", "--brief"]].concat();
        let side = Cli::try_parse_from(side).expect("valid").data;
        assert_eq!(format!("{whole:?}"), format!("{side:?}"));
        assert_eq!((side.path, side.bytes, side.brief), (Some(Stage::PeerMemory), 3072, true));
        assert_eq!(Data { bytes: 3, ..side }.plan().chunk, 3);
    }
}
