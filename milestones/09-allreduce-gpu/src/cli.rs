//! The command line.

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use program_kit::size;
use replay::Replay;
use tinynccl::wire::Algorithm;

/// All-reduce between GPUs, checked element by element, and timed beside the path through the CPU's memory.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    /// Ranks to start, as processes; 0: one per GPU, but at least two. Rank r takes GPU r modulo the number of GPUs.
    #[arg(short = 'n', long, default_value_t = 0, value_parser = RangedU64ValueParser::<usize>::new().range(0..=8))]
    pub(crate) ranks: usize,
    /// Sizes in bytes; K, M and G are powers of 1024.
    #[arg(short, long, value_delimiter = ',', value_parser = size::of_f32(4..=4 << 30), default_value = "8,1K,32K,256K,1M,8M,64M,256M")]
    pub(crate) bytes: Vec<usize>,
    /// Run the schedule that the CPU would execute: ring, tree, double-tree, direct, all-pairs, halving-doubling or
    /// recursive-doubling. Without it, the library chooses the fastest.
    #[arg(long)]
    pub(crate) algorithm: Option<Algorithm>,
    /// Calls between two events.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) iters: u32,
    /// Also run the kernel of src/one_shot.cu, up to 256 KiB. Needs a GPU for each rank.
    #[arg(long)]
    pub(crate) own_kernel: bool,
    #[command(flatten)]
    pub(crate) replay: Replay,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        <Options as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn sizes_are_whole_elements() {
        let parsed = |sizes: &str| Options::try_parse_from(["x", "--bytes", sizes]).map(|options| options.bytes).ok();
        assert_eq!(parsed("64,32K,4G"), Some(vec![64, 32 << 10, 4 << 30]));
        for bad in ["0", "6", "5G"] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }
}
