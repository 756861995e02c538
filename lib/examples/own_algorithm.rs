//! An algorithm of your own: a ring all-reduce built step by step, proved, drawn, simulated, run on four ranks,
//! checked, and timed beside the library's ring: `cargo run --release -p tinynccl --example own_algorithm`.
//!
//! Change `program` and run it again: what is wrong is refused with the rank, the step and what was expected.

use std::time::Instant;

use tinynccl::schedule::draw::draw;
use tinynccl::schedule::{Lane, Loc, Program, Schedule, Shape, Step};
use tinynccl::simulate::machine::{Costs, Switch};
use tinynccl::simulate::{Cut, Limits, simulate_schedule};
use tinynccl::wire::{Algorithm, Collective};
use tinynccl::{Comm, Config, ReduceOp, Result};

const RANKS: usize = 4;
const COUNT: usize = 1 << 18;
const ROUNDS: usize = 30;

/// Rank `rank` of a ring. The buffer is cut into a part for each rank. Each part goes round twice: as a sum that grows,
/// and then as the finished one.
fn program(rank: usize, ranks: usize) -> Program {
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    // The part that is `k` ranks behind.
    let part = |k: usize| (rank + ranks - k) % ranks;
    let (input, output) = (|k| Loc::input(0, part(k)), |k| Loc::output(0, part(k)));

    let mut steps = vec![Step::send(next, input(0))];
    for k in 1..ranks - 1 {
        steps.push(Step::recv_reduce_send(before, next, input(k)));
    }
    // The sum that comes now has all ranks in it but us.
    steps.push(Step::recv_reduce_copy_send(before, next, input(ranks - 1), output(ranks - 1), true));
    for k in 0..ranks - 2 {
        steps.push(Step::recv_copy_send(before, next, output(k)));
    }
    steps.push(Step::recv(before, output(ranks - 2)));
    Program { parts: ranks, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] }
}

fn main() -> Result<()> {
    let shape = Shape { collective: Collective::AllReduce, ranks: RANKS, root: 0, channels: 1 };
    let schedule = Schedule::new(shape, (0..RANKS).map(|rank| program(rank, RANKS)).collect())?;
    println!("proved: program {:014x}; rank 0:\n{}", schedule.fingerprint(), draw(&schedule.programs()[0], 0));

    let machine = Switch { ranks: RANKS, latency: 2e-6, bandwidth: 10e9, costs: Costs::default() };
    let cut = Cut { count: COUNT, elem_size: 4, max_message: 1 << 20 };
    let report = simulate_schedule(&schedule, cut, &machine, &Limits::default())?;
    println!("simulated: {:.1} us for {} KiB, ports of 10 GB/s and 2 us apart", report.time * 1e6, COUNT * 4 / 1024);

    let mut config = Config::from_env()?;
    // Both over the same links, and the library by its ring.
    config.algorithm = Some(Algorithm::Ring);
    let comms = Comm::threads(RANKS, config)?;
    let schedule = &schedule;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || rank(&comm, schedule))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank panicked"))
    })?;
    println!("as text, for tinynccl-cli schedule --program FILE: {} lines", schedule.to_string().lines().count());
    Ok(())
}

fn rank(comm: &Comm, schedule: &Schedule) -> Result<()> {
    let input: Vec<f32> = (0..COUNT).map(|i| ((i + comm.rank()) % 1000) as f32 * 0.001).collect();
    let [mut ours, mut theirs] = [(); 2].map(|()| vec![0.0f32; COUNT]);
    comm.run_program(schedule, &input, &mut ours, ReduceOp::Sum)?;
    comm.all_reduce(&input, &mut theirs, ReduceOp::Sum)?;
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(bits(&ours) == bits(&theirs), "rank {}: other bits than the library's ring", comm.rank());

    // Alternately, so that whatever else the machine does affects both.
    let mut times = [vec![], vec![]];
    for _ in 0..ROUNDS {
        let begin = Instant::now();
        comm.run_program(schedule, &input, &mut ours, ReduceOp::Sum)?;
        let middle = Instant::now();
        comm.all_reduce(&input, &mut theirs, ReduceOp::Sum)?;
        times[0].push(middle - begin);
        times[1].push(middle.elapsed());
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    if comm.rank() == 0 {
        let [ours, theirs] = times.map(|times| times[ROUNDS / 2].as_secs_f64() * 1e6);
        println!("ran: the library's bits; median {ours:.0} us, the library's ring {theirs:.0} us");
    }
    Ok(())
}
