//! The ring as a program: what [`crate::by_hand`] does by calls, as data, which the library's verifier proves and its
//! executor runs.

use tinynccl::schedule::verify::VerifyError;
use tinynccl::schedule::{Lane, Loc, Program, Schedule, Shape, Step};
use tinynccl::wire::Collective;

use crate::by_hand::sent;

/// The programs of all ranks, proved.
pub(crate) fn ring(ranks: usize) -> Result<Schedule, VerifyError> {
    let shape = Shape { collective: Collective::AllReduce, ranks, root: 0, channels: 1 };
    let program = |rank| {
        let alone = || vec![Step::Copy { src: Loc::input(0, 0), dst: Loc::output(0, 0) }];
        let steps = if ranks == 1 { alone() } else { steps(rank, ranks) };
        Program { parts: ranks, span: 1, scratch_segments: 0, lanes: vec![Lane { channel: 0, steps }] }
    };
    Schedule::new(shape, (0..ranks).map(program).collect())
}

/// The steps of `rank`, of at least two. The buffers are cut into `ranks` parts.
// EXERCISE 4 (How it works): two loops of ranks - 1 hops, as in exercises 2 and 3. A hop of the first is `Step::send`
// and `Step::recv_reduce_copy(from, ours, to, last)`, one of the second `Step::send` and `Step::recv`. Our part leaves
// `Loc::input`; what came is in `Loc::output`. `last`: the sum is complete.
fn steps(rank: usize, ranks: usize) -> Vec<Step> {
    let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut steps = Vec::new();
    for hop in 0..ranks - 1 {
        let (ours, theirs) = (sent(rank, hop, ranks), sent(previous, hop, ranks));
        steps.push(Step::send(next, if hop == 0 { Loc::input(0, ours) } else { Loc::output(0, ours) }));
        let (input, output) = (Loc::input(0, theirs), Loc::output(0, theirs));
        steps.push(Step::recv_reduce_copy(previous, input, output, hop == ranks - 2));
    }
    for hop in 0..ranks - 1 {
        steps.push(Step::send(next, Loc::output(0, sent(next, hop, ranks))));
        steps.push(Step::recv(previous, Loc::output(0, sent(rank, hop, ranks))));
    }
    steps
}

#[cfg(test)]
mod tests {
    use course_kit::on_threads::{config, on_threads};
    use tinynccl::ReduceOp;
    use tinynccl::schedule::rounds::play;
    use tinynccl::wire::Algorithm;

    use super::*;

    #[test]
    fn the_verifier_accepts_the_ring_program() {
        for ranks in 1..=7 {
            let schedule = ring(ranks).unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
            if let Err(error) = schedule.in_place() {
                panic!("{ranks} ranks, in place: {error}");
            }
        }
    }

    #[test]
    fn the_ring_program_sends_to_the_next_rank_alone() {
        for ranks in 2..=5 {
            let schedule = ring(ranks).unwrap();
            let rounds = play(schedule.programs(), schedule.shape()).unwrap();
            let sent: Vec<_> = rounds.iter().flat_map(|round| &round.sent).collect();
            assert_eq!(sent.len(), ranks * 2 * (ranks - 1), "messages on {ranks} ranks");
            assert!(sent.iter().all(|message| message.to == (message.from + 1) % ranks), "{schedule}");
        }
    }

    #[test]
    fn the_ring_program_gives_the_bits_of_the_librarys_ring() {
        for ranks in 1..=5 {
            let schedule = &ring(ranks).unwrap();
            let mut config = config();
            config.algorithm = Some(Algorithm::Ring);
            on_threads(ranks, config, |comm| {
                // Sums of these values need rounding, so another order of additions changes the bits.
                let value = |i: usize| 1.0 / (1 + i + 7 * comm.rank()) as f32;
                let input: Vec<f32> = (0..1001).map(value).collect();
                let (mut ours, mut theirs) = (vec![f32::NAN; 1001], vec![0.0; 1001]);
                comm.run_program(schedule, &input, &mut ours, ReduceOp::Sum).unwrap();
                comm.all_reduce(&input, &mut theirs, ReduceOp::Sum).unwrap();
                assert!(ours == theirs, "{ranks} ranks");
            });
        }
    }
}
