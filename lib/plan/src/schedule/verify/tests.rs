//! The verifier must reject wrong programs. (`algorithm/tests.rs` checks that it accepts right ones.)

use super::*;
use crate::algorithm::program;
use crate::schedule::Lane;
use crate::wire::Algorithm;
use crate::wire::Collective;

fn shape(collective: Collective, ranks: usize, channels: usize) -> Shape {
    Shape { collective, ranks, root: ranks - 1, channels }
}

fn all_reduce(ranks: usize) -> Shape {
    Shape { root: 0, ..shape(Collective::AllReduce, ranks, 1) }
}

/// Programs of one lane each, on channel 0, with one part.
fn one_lane(scratch_segments: usize, steps: Vec<Vec<Step>>) -> Vec<Program> {
    let lane = |steps| vec![Lane { channel: 0, steps }];
    steps.into_iter().map(|s| Program { parts: 1, span: 1, scratch_segments, lanes: lane(s) }).collect()
}

fn input() -> Loc {
    Loc::input(0, 0)
}

fn output() -> Loc {
    Loc::output(0, 0)
}

fn error(programs: &[Program], shape: &Shape) -> VerifyError {
    verify(programs, shape, 2, 2, false).expect_err("must be rejected")
}

/// Applies `change` to each step of each program in turn, and expects the verifier to reject every result.
fn mutate(name: &str, ranks: usize, change: impl Fn(&mut Vec<Step>, usize) -> bool) {
    let mut rejected = 0;
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            let shape = Shape { root: ranks - 1, ..shape(collective, ranks, 2) };
            let Some(good) = (0..ranks).map(|r| program(algorithm, &shape, r)).collect::<Option<Vec<_>>>() else {
                continue;
            };
            for rank in 0..ranks {
                for lane in 0..good[rank].lanes.len() {
                    for step in 0..good[rank].lanes[lane].steps.len() {
                        let mut bad = good.clone();
                        if !change(&mut bad[rank].lanes[lane].steps, step) {
                            continue;
                        }
                        let result = verify(&bad, &shape, 2, 2, false);
                        assert!(
                            result.is_err(),
                            "{name}: {algorithm} {collective}, rank {rank}, lane {lane}, step {step} was {}",
                            good[rank].lanes[lane].steps[step]
                        );
                        rejected += 1;
                    }
                }
            }
        }
    }
    assert!(rejected > 50, "{name}: only {rejected} mutants");
}

/// The locations of a step, to change.
fn locations(step: &mut Step) -> Vec<&mut Loc> {
    match step {
        Step::Send { src, .. } | Step::RecvReduceSend { src, .. } => vec![src],
        Step::Recv { dst, .. } | Step::RecvCopySend { dst, .. } => vec![dst],
        Step::Copy { src, dst }
        | Step::Reduce { src, dst, .. }
        | Step::RecvReduceCopy { src, dst, .. }
        | Step::RecvReduceCopySend { src, dst, .. } => vec![src, dst],
    }
}

#[test]
fn a_missing_step_is_rejected() {
    for ranks in [2, 3, 4] {
        mutate("missing", ranks, |steps, i| {
            steps.remove(i);
            true
        });
    }
}

#[test]
fn a_repeated_step_is_rejected() {
    for ranks in [2, 3, 4] {
        mutate("repeated", ranks, |steps, i| {
            let step = steps[i];
            steps.insert(i, step);
            !matches!(step, Step::Copy { .. }) // copying twice does no harm
        });
    }
}

#[test]
fn a_wrong_peer_is_rejected() {
    for ranks in [3, 4, 5] {
        mutate("wrong source", ranks, |steps, i| match &mut steps[i] {
            Step::Recv { from, .. }
            | Step::RecvReduceCopy { from, .. }
            | Step::RecvCopySend { from, .. }
            | Step::RecvReduceSend { from, .. }
            | Step::RecvReduceCopySend { from, .. } => {
                *from = (*from + 1) % ranks as u32;
                true
            }
            _ => false,
        });
        mutate("wrong target", ranks, |steps, i| match &mut steps[i] {
            Step::Send { to, .. }
            | Step::RecvCopySend { to, .. }
            | Step::RecvReduceSend { to, .. }
            | Step::RecvReduceCopySend { to, .. } => {
                *to = (*to + 1) % ranks as u32;
                true
            }
            _ => false,
        });
    }
}

#[test]
fn a_wrong_part_is_rejected() {
    for ranks in [2, 3, 4] {
        mutate("wrong part", ranks, |steps, i| {
            locations(&mut steps[i]).into_iter().for_each(|loc| loc.part ^= 1);
            true
        });
    }
}

#[test]
fn a_wrong_segment_is_rejected() {
    for ranks in [2, 3, 4] {
        mutate("wrong segment", ranks, |steps, i| {
            locations(&mut steps[i]).into_iter().for_each(|loc| loc.segment += 1);
            true
        });
    }
}

#[test]
fn a_wrong_last_is_rejected() {
    for ranks in [2, 3, 4] {
        mutate("wrong last", ranks, |steps, i| match &mut steps[i] {
            Step::Reduce { last, .. } | Step::RecvReduceCopy { last, .. } | Step::RecvReduceCopySend { last, .. } => {
                *last = !*last;
                true
            }
            _ => false,
        });
    }
}

#[test]
fn waiting_in_a_circle_names_everybody() {
    let programs = one_lane(
        0,
        (0..3)
            .map(|r| {
                let (from, to) = ((r + 2) % 3, (r + 1) % 3);
                vec![Step::recv(from, output()), Step::send(to, input())]
            })
            .collect(),
    );
    let VerifyError::Deadlock { blocked } = error(&programs, &all_reduce(3)) else { panic!("no deadlock") };
    let waits: Vec<_> = blocked.iter().map(|b| (b.at.rank, b.at.index, b.waits_for)).collect();
    assert_eq!(waits, [(0, 0, Wait::Message(2)), (1, 0, Wait::Message(0)), (2, 0, Wait::Message(1))]);
    let text = error(&programs, &all_reduce(3)).to_string();
    assert!(
        text.contains("rank 1, lane 0, step 0 (recv 0 → out[0.0]), window 0 waits for a message from rank 0"),
        "{text}"
    );
}

#[test]
fn more_messages_than_a_link_holds_is_a_deadlock() {
    let part = |p| (Loc::input(0, p), Loc::output(0, p));
    let steps = |peer| {
        let sends = (0..3).map(|p| Step::send(peer, part(p).0));
        let recvs = (0..3).map(|p| Step::recv_reduce_copy(peer, part(p).0, part(p).1, true));
        vec![Lane { channel: 0, steps: sends.chain(recvs).collect() }]
    };
    let programs: Vec<_> =
        [1, 0].into_iter().map(|peer| Program { parts: 3, span: 1, scratch_segments: 0, lanes: steps(peer) }).collect();
    let shape = all_reduce(2);
    assert!(verify(&programs, &shape, 3, 2, false).is_ok());
    let VerifyError::Deadlock { blocked } = error(&programs, &shape) else { panic!("no deadlock") };
    assert_eq!(blocked[0].waits_for, Wait::Credit(1));
}

#[test]
fn each_rank_adding_its_own_input_first_gives_different_bits() {
    let steps = |r: usize| {
        let (a, b) = ((r + 1) % 3, (r + 2) % 3);
        vec![
            Step::send(a, input()),
            Step::send(b, input()),
            Step::recv_reduce_copy(a, input(), output(), false),
            Step::recv_reduce_copy(b, output(), output(), true),
        ]
    };
    let e = error(&one_lane(0, (0..3).map(steps).collect()), &all_reduce(3));
    let VerifyError::Order { first, second, .. } = e else { panic!("{e}") };
    assert_eq!(first, (0, "(rank 2 + (rank 0 + rank 1))".to_owned()));
    assert_eq!(second, (1, "(rank 0 + (rank 1 + rank 2))".to_owned()));
}

#[test]
fn adding_somebody_twice_is_named() {
    let steps = |peer| {
        vec![
            Step::send(peer, input()),
            Step::recv_reduce_copy(peer, input(), output(), false),
            Step::Reduce { src: input(), dst: output(), last: true },
        ]
    };
    let text = error(&one_lane(0, vec![steps(1), steps(0)]), &all_reduce(2)).to_string();
    assert!(text.contains("rank 1, lane 0, step 2") && text.contains("adds rank 1 twice"), "{text}");
}

#[test]
fn overwriting_the_input_too_early_shows_in_place_only() {
    // Receives into the output, and only then sends the input.
    let steps = |first, second| vec![first, second, Step::Reduce { src: input(), dst: output(), last: true }];
    let programs = one_lane(
        0,
        vec![
            steps(Step::send(1, input()), Step::recv(1, output())),
            steps(Step::recv(0, output()), Step::send(0, input())),
        ],
    );
    assert!(verify(&programs, &all_reduce(2), 2, 2, false).is_ok());
    assert!(verify(&programs, &all_reduce(2), 2, 2, true).is_err());
}

/// An average scales as it copies, in place too: what is there then would be scaled again.
#[test]
fn an_input_that_is_read_behind_its_copy_shows_in_place_only() {
    let steps = |peer, copy_first: bool| {
        let (copy, send) = (Step::Copy { src: input(), dst: output() }, Step::send(peer, input()));
        let [first, second] = if copy_first { [copy, send] } else { [send, copy] };
        vec![first, second, Step::recv_reduce_copy(peer, output(), output(), true)]
    };
    let verified = |copy_first, in_place| {
        let programs = one_lane(0, vec![steps(1, copy_first), steps(0, copy_first)]);
        verify(&programs, &all_reduce(2), 2, 2, in_place)
    };
    assert!(verified(false, false).is_ok() && verified(false, true).is_ok() && verified(true, false).is_ok());
    let text = verified(true, true).unwrap_err().to_string();
    assert!(text.contains("step 1") && text.contains("reads in[0.0], where a result is already"), "{text}");
}

#[test]
fn inputs_and_outputs_of_others_are_not_written() {
    let shape = Shape { root: 0, ..shape(Collective::Broadcast, 2, 1) };
    let send = vec![Step::send(1, input()), Step::Copy { src: input(), dst: output() }];
    let good = one_lane(0, vec![send.clone(), vec![Step::recv(0, output())]]);
    assert!(verify(&good, &shape, 2, 2, false).is_ok());
    let mut onto_input = send;
    onto_input.push(Step::Copy { src: output(), dst: input() });
    let text = error(&one_lane(0, vec![onto_input, vec![Step::recv(0, output())]]), &shape).to_string();
    assert!(text.contains("writes in[0.0], an input"), "{text}");

    let shape = Shape { collective: Collective::Reduce, ..shape };
    let root = vec![Step::recv_reduce_copy(1, input(), output(), true)];
    let other = vec![Step::send(0, input()), Step::Copy { src: input(), dst: output() }];
    let text = error(&one_lane(0, vec![root, other]), &shape).to_string();
    assert!(text.contains("out[0.0] is not there"), "{text}");
}

#[test]
fn two_lanes_on_one_link_are_rejected() {
    let mut programs = one_lane(0, vec![vec![Step::send(1, input())], vec![]]);
    let again = programs[0].lanes[0].clone();
    programs[0].lanes.push(again);
    let e = error(&programs, &all_reduce(2));
    let expected = VerifyError::LaneRule { rank: 0, channel: 0, peer: 1, verb: "send to", lanes: (0, 1) };
    assert_eq!(e, expected);
    assert_eq!(e.to_string(), "rank 0: lanes 0 and 1 both send to rank 1 on channel 0");
}

#[test]
fn lanes_that_nothing_orders_race() {
    // Rank 1's second lane overwrites its output while the first still sends it.
    let lane = |channel, steps| Lane { channel, steps };
    let program = |lanes| Program { parts: 1, span: 1, scratch_segments: 0, lanes };
    let shape = Shape { root: 0, ..shape(Collective::Broadcast, 3, 1) };
    let programs = [
        program(vec![
            lane(0, vec![Step::send(1, input()), Step::Copy { src: input(), dst: output() }]),
            lane(1, vec![Step::send(1, input())]),
        ]),
        program(vec![lane(0, vec![Step::recv_copy_send(0, 2, output())]), lane(1, vec![Step::recv(0, output())])]),
        program(vec![lane(0, vec![Step::recv(1, output())])]),
    ];
    let e = error(&programs, &shape);
    assert!(matches!(&e, VerifyError::Race { at, .. } if at.rank == 1), "{e}");
    assert!(e.to_string().contains("races with lane"), "{e}");
}

#[test]
fn back_pressure_is_not_an_order() {
    // In place, the tree's down lane overwrites data that the up lane reads; only the parent's answer orders the two.
    // Without that answer (the parent sends its own input at once) it is a race, even if the message arrives late.
    let lane = |steps| Lane { channel: 0, steps };
    let program = |lanes| Program { parts: 1, span: 1, scratch_segments: 0, lanes };
    let up_down = [lane(vec![Step::send(0, input())]), lane(vec![Step::recv(0, output())])];
    let root = vec![Step::send(1, input()), Step::recv_reduce_copy(1, input(), output(), true)];
    let programs = [program(vec![lane(root)]), program(up_down.to_vec())];
    let e = verify(&programs, &all_reduce(2), 1, 2, true).expect_err("a race");
    assert!(matches!(e, VerifyError::Race { .. }), "{e}");
}

#[test]
fn programs_must_fit_together() {
    let shape = all_reduce(2);
    let good: Vec<_> = (0..2).filter_map(|r| program(Algorithm::Ring, &shape, r)).collect();
    assert!(verify(&good, &shape, 2, 1, false).is_ok());
    assert!(matches!(verify(&good[..1], &shape, 2, 1, false), Err(VerifyError::Programs(_))));
    assert!(matches!(verify(&[], &Shape { ranks: 0, ..shape }, 2, 1, false), Err(VerifyError::Programs(_))));
    let mut other = good.clone();
    other[1].parts += 1;
    assert!(matches!(verify(&other, &shape, 2, 1, false), Err(VerifyError::Programs(_))));
    let mut other = good.clone();
    other[1].lanes[0].steps[0] = Step::send(1, input());
    assert!(error(&other, &shape).to_string().contains("rank 1 is not a peer of rank 1"));
    // Windows without limit are refused, not counted.
    assert!(matches!(verify(&good, &shape, 2, usize::MAX, false), Err(VerifyError::Programs(_))));
}

#[test]
fn an_empty_lane_ends() {
    let shape = Shape { root: 0, ..shape(Collective::Broadcast, 1, 1) };
    let mut programs = one_lane(0, vec![vec![Step::Copy { src: input(), dst: output() }]]);
    programs[0].lanes.push(Lane { channel: 1, steps: vec![] });
    assert!(verify(&programs, &shape, 2, 3, false).is_ok());
}
