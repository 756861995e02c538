//! Growth of an agreement with the number of its members: messages, steps one after another, and the longest message.

use std::collections::{BTreeSet, VecDeque};

use tinynccl_transport::Endpoint;

use super::super::Letter;
use super::{Agreement, Message, Out, Vote};

/// Cost of an agreement.
#[derive(Debug, PartialEq)]
struct Cost {
    messages: usize,
    /// Longest chain of messages of which each was the answer to the one before.
    steps: usize,
    longest: usize,
}

/// Lets all members call, but for `dead`, whose deaths only member `knows` has proven. Messages come in the order of
/// sending.
fn run(size: usize, dead: &[usize], knows: usize) -> Cost {
    let mut members: Vec<_> = (0..size).map(|rank| Agreement::new(rank, size, BTreeSet::new())).collect();
    let mut network: VecDeque<(usize, usize, Message, usize)> = VecDeque::new();
    let mut cost = Cost { messages: 0, steps: 0, longest: 0 };
    let mut act = |rank: usize, step, network: &mut VecDeque<_>, input: &mut dyn FnMut(&mut Agreement, &mut Out)| {
        let mut out = Out::new();
        input(&mut members[rank], &mut out);
        // The address of a store, and more of them than a host has as a rule.
        if members[rank].wants_offer() {
            members[rank].offer(vec![b'0'; 500], &mut out);
        }
        network.extend(out.into_iter().map(|(to, message)| (rank, to, message, step + 1)));
    };
    let lives = |rank: &usize| !dead.contains(rank);
    act(knows, 0, &mut network, &mut |one, out| dead.iter().for_each(|&rank| one.dead(rank, out)));
    for rank in (0..size).filter(lives) {
        let vote = Vote { value: 1, newcomers: Vec::new() };
        act(rank, 0, &mut network, &mut |one, out| one.call(vote.clone(), false, out));
    }
    while let Some((from, to, message, step)) = network.pop_front() {
        if dead.contains(&to) {
            continue;
        }
        let letter = Letter::Agreement { comm: 1, round: 9, message: message.clone() };
        let bytes = serde_json::to_vec(&letter).expect("a message");
        (cost.messages, cost.steps) = (cost.messages + 1, cost.steps.max(step));
        cost.longest = cost.longest.max(bytes.len());
        act(to, step, &mut network, &mut |one, out| one.receive(from, message.clone(), out));
    }
    let outcome = members.iter().find_map(|member| member.decided().cloned()).expect("decided");
    assert_eq!(outcome.alive, Vec::from_iter((0..size).filter(lives)));
    assert!((0..size).filter(lives).all(|rank| members[rank].decided() == Some(&outcome)));
    cost
}

#[test]
fn messages_grow_with_the_members_and_steps_do_not() {
    for size in [2, 8, 64, 1024] {
        let (whole, lost) = (run(size, &[], 0), run(size, &[size / 2], 0));
        // Each of the others: waiting, prepare, promise, accept, accepted, decided.
        assert_eq!((whole.messages, whole.steps), (6 * (size - 1), 5), "{size}: {whole:?}");
        assert_eq!((lost.messages, lost.steps), (6 * (size - 2), if size > 2 { 5 } else { 0 }), "{size}: {lost:?}");
    }
}

#[test]
fn messages_of_a_thousand_members_fit() {
    let many: Vec<usize> = (0..300).map(|i| 1 + 3 * i).collect();
    for dead in [&[][..], &[500], &many] {
        let cost = run(1024, dead, 0);
        assert!(cost.longest <= Endpoint::LONGEST_MESSAGE, "{cost:?}");
    }
}
