//! Ring and naive all-reduce with a network card of limited speed for each rank, as hosts have: on one machine nothing
//! else shows that all bytes of the naive one pass through rank 0's card.

use anyhow::{Context as _, Result, anyhow};
use course_kit::measure;
use tinynccl::transport::paced::{self, Cards};
use tinynccl::wire::Algorithm;
use tinynccl::{Comm, Config, ReduceOp};

use crate::naive;

/// Bytes per second in each direction: slower than this process copies, so that the cards decide.
const SPEED: f64 = 200e6;
/// Timed calls per size at most.
const ITERS: usize = 3;

/// Prints a row for each of `counts`. The ranks are threads, whose links wait as the cards would.
pub(crate) fn table(ranks: usize, counts: &[usize], iters: usize) -> Result<()> {
    println!("\nWith a network card of {:.0} MB/s for each rank (threads, whose links wait as long):\n", SPEED / 1e6);
    println!("{:>11} | {:>9} | {:>9} | {:>5}", "bytes", "ring: us", "naive: us", "ratio");
    let mut config = Config::default();
    // Over links, and not through the memory that threads share.
    (config.algorithm, config.one_shot, config.stage) = (Some(Algorithm::Ring), 0, 0);
    let cards = Cards::new(ranks, SPEED);
    let comms = Comm::threads_with_links(ranks, config, move |rank, peer, pair| paced::wrap(pair, &cards, rank, peer))?;
    let work = |comm: &Comm| counts.iter().try_for_each(|&count| row(comm, count, iters.min(ITERS)));
    std::thread::scope(|scope| {
        // A rank that fails takes its communicator with it, so the others fail instead of waiting.
        let rank = |comm: Comm| work(&comm).and_then(|()| Ok(comm.close()?));
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a rank panicked"))))
    })
    .context("over links of limited speed")
}

fn row(comm: &Comm, count: usize, iters: usize) -> Result<()> {
    let input = measure::input(comm, count)?;
    let mut output = measure::buffer(count, |_| 0.0)?;
    let mut scratch = measure::buffer(if comm.rank() == 0 { count } else { 0 }, |_| 0.0)?;
    let ring =
        measure::time(comm, iters, "ring", &mut output, None, |output| comm.all_reduce(&input, output, ReduceOp::Sum))?;
    let naive = measure::time(comm, iters, "naive", &mut output, None, |output| {
        naive::all_reduce(comm, &input, output, &mut scratch)
    })?;
    if comm.rank() == 0 {
        let (bytes, us) = (count * size_of::<f32>(), |seconds: f64| seconds * 1e6);
        let ratio = naive.seconds / ring.seconds;
        println!("{bytes:>11} | {:>9.1} | {:>9.1} | {ratio:>5.2}", us(ring.seconds), us(naive.seconds));
    }
    Ok(())
}
