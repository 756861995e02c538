//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Adds two vectors on a GPU with kernels compiled at run time, checks every element, and compares the speed with a
/// copy.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) options: Options,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Make four mistakes, each in a separate process, and print CUDA's reports.
    Faults,
    /// Make one of the mistakes, in this process.
    Fault {
        /// The mistake to make.
        kind: Fault,
    },
}

/// The mistakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// A kernel that is not CUDA C.
    Source,
    /// More threads in a block than the device takes.
    Launch,
    /// A null pointer given to a kernel.
    Address,
    /// A pointer that 16-byte accesses cannot use.
    Alignment,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// The device to use, by CUDA's number, from 0.
    #[arg(long, global = true, default_value_t = 0)]
    pub(crate) device: usize,
    /// Lengths of the vectors, in elements of f32; K, M and G count 1024.
    #[arg(short = 'n', long, value_delimiter = ',', value_parser = elements, default_value = "1K,64K,1M,4M,64M")]
    pub(crate) elements: Vec<usize>,
    /// Threads in a block.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) block: u32,
    /// Repetitions of each measurement; the result is their median.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) repetitions: u32,
}

/// `4M` to 4,194,304.
fn elements(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| format!("expected a number like 1000, 64K or 4M, got {text:?}"))?;
    // One thread per element, and a grid has less than 2^31 blocks.
    let most = 1usize << 34;
    match number.checked_mul(1 << shift) {
        Some(n) if (1..=most).contains(&n) => Ok(n),
        _ => Err(format!("expected 1 to {most} elements, got {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn lengths_with_and_without_suffix() {
        assert_eq!(elements("1000"), Ok(1000));
        assert_eq!(elements("64K"), Ok(65_536));
        assert_eq!(elements("16G"), Ok(1 << 34));
        for bad in ["", "K", "0", "-1", "1.5M", "17G", "99999999999999999999", "1é", "4MM"] {
            assert!(elements(bad).is_err(), "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_gives_a_length_or_a_reason(text in ".*") {
            if let Ok(n) = elements(&text) {
                proptest::prop_assert!((1..=1 << 34).contains(&n));
            }
        }
    }
}
