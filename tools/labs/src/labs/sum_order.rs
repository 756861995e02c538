//! One sum in several orders: bf16 has 8 significant bits, and the last depends on the order of the additions.

use anyhow::{Context as _, Result, bail};
use half::bf16;
use program_kit::Usage;
use tinynccl::config::Sums;
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

use crate::ranks::{Announced, in_threads};

const RANKS: usize = 4;
const COUNT: usize = 10_000;
const ALGORITHMS: [Algorithm; 4] = [Algorithm::Ring, Algorithm::Tree, Algorithm::RecursiveDoubling, Algorithm::Direct];

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Run the mended version.
    #[arg(long)]
    fixed: bool,
    /// Sums these numbers instead, one per rank (3 to 16), and shows the sum rounded once beside them.
    #[arg(allow_negative_numbers = true)]
    numbers: Vec<f32>,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    let mut config = Config::from_env()?;
    if !options.numbers.is_empty() {
        return own_numbers(&options.numbers, &config);
    }
    config.fixed_order |= options.fixed;
    let results = in_threads(Comm::threads(RANKS, config)?, sums)?;
    if results.iter().any(|rank| *rank != results[0]) {
        bail!("the ranks have different results of one call");
    }
    report(results.first().context("no ranks")?)
}

/// The gradients' sum by each algorithm.
fn sums(comm: &Comm) -> Result<Vec<Vec<bf16>>> {
    let mine: Vec<bf16> = (0..COUNT).map(|element| gradient(comm.rank(), element)).collect();
    let sum = |algorithm| {
        comm.set_algorithm(Some(algorithm));
        let mut sum = vec![bf16::ZERO; COUNT];
        comm.all_reduce(&mine, &mut sum, ReduceOp::Sum)?;
        Ok(sum)
    };
    ALGORITHMS.into_iter().map(sum).collect()
}

/// One number of each rank, in f32: rounded after every addition, in the order of each algorithm, and once.
fn own_numbers(numbers: &[f32], config: &Config) -> Result<u8> {
    if !(3..=16).contains(&numbers.len()) {
        bail!(Usage(format!("{} numbers, expected 3 to 16: fewer have one order", numbers.len())));
    }
    let sum = |sums, algorithm| {
        let config = config.clone().with(|c| (c.sum, c.algorithm) = (sums, algorithm));
        let results = in_threads(Comm::threads(numbers.len(), config)?, |comm| {
            let mut sum = [numbers[comm.rank()]];
            comm.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
            Ok(sum[0])
        })?;
        results.first().copied().context("no ranks")
    };
    for algorithm in ALGORITHMS {
        println!("{:<20} {:?}", algorithm.name(), sum(Sums::Pairwise, Some(algorithm))?);
    }
    println!("TINYNCCL_SUM=exact   {:?}", sum(Sums::Exact, None)?);
    Ok(0)
}

/// Numbers as different in size as gradients are: a SplitMix64 of rank and element, in -1 to 1, cubed.
fn gradient(rank: usize, element: usize) -> bf16 {
    let mut z = ((rank * COUNT + element) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let unit = ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(unit.powi(3))
}

fn report(sums: &[Vec<bf16>]) -> Result<u8> {
    let exact = |element: usize| (0..RANKS).map(|rank| f64::from(gradient(rank, element).to_f32())).sum::<f64>();
    let first = sums.first().context("no algorithms")?;
    let shown = (0..COUNT).find(|&e| sums.iter().any(|sum| sum[e] != first[e])).unwrap_or(0);
    let mut different = 0;
    println!("asked for            differ from the first   element {shown}");
    for (algorithm, sum) in ALGORITHMS.iter().zip(sums) {
        let differ = sum.iter().zip(first).filter(|(a, b)| a != b).count();
        different += differ;
        println!("{:<20} {differ:>5} of {COUNT}          {}", algorithm.name(), sum[shown]);
    }
    let terms: Vec<String> = (0..RANKS).map(|rank| gradient(rank, shown).to_string()).collect();
    println!("element {shown} is {} = {}", terms.join(" + "), exact(shown));
    match different {
        0 => Ok(0),
        _ => {
            Err(Announced("the same gradients have different sums: this training cannot be repeated".to_owned()).into())
        }
    }
}
