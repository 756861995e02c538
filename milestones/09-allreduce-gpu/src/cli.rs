//! What can be asked for.

use clap::Parser;
use tinynccl::wire::Algorithm;

/// All-reduce between GPUs, checked element by element, and timed beside the way through the CPU's memory.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Options {
    /// Ranks to start, as processes; 0: one per GPU, but at least two. Rank r takes GPU r modulo their number.
    #[arg(short = 'n', long, default_value_t = 0, value_parser = ranks)]
    pub(crate) ranks: usize,
    /// Sizes in bytes; K, M and G count 1024.
    #[arg(short, long, value_delimiter = ',', value_parser = bytes, default_value = "8,1K,32K,256K,1M,8M,64M,256M")]
    pub(crate) bytes: Vec<usize>,
    /// Carries it out by the schedule that the CPU would execute: ring, tree, double-tree, direct, all-pairs, halving-doubling or
    /// recursive-doubling. Left out: what is fastest.
    #[arg(long)]
    pub(crate) algorithm: Option<Algorithm>,
    /// Calls between two events.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) iters: u32,
}

fn ranks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 0..=8) => Ok(n),
        _ => Err(format!("expected 0 to 8, got {text:?}")),
    }
}

/// `4M` to 4,194,304: a multiple of an f32's size.
fn bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| format!("expected a number like 64, 32K or 4M, got {text:?}"))?;
    match number.checked_mul(1 << shift) {
        Some(n) if (4..=4 << 30).contains(&n) && n % 4 == 0 => Ok(n),
        _ => Err(format!("expected a multiple of 4 between 4 and 4G, got {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        <Options as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn sizes_with_and_without_suffix() {
        assert_eq!(bytes("64"), Ok(64));
        assert_eq!(bytes("32K"), Ok(32 << 10));
        assert_eq!(bytes("4G"), Ok(4 << 30));
        for bad in ["", "K", "0", "-4", "6", "5G", "1.5M", "99999999999999999999", "1é"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }
}
