//! Blocking sends and receives round a ring. A send returns when its receive was called, as for a message that no
//! buffer holds.

/// One blocking call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Send(usize),
    Recv(usize),
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Call::Send(peer) => write!(f, "send {peer}"),
            Call::Recv(peer) => write!(f, "recv {peer}"),
        }
    }
}

/// Even ranks send first.
pub(super) fn ours(ranks: usize) -> Vec<String> {
    let line = |rank: usize| {
        let [send, recv] = of(rank, ranks);
        let (first, second) = if rank.is_multiple_of(2) { (send, recv) } else { (recv, send) };
        format!("{rank}: {first}, {second}")
    };
    (0..ranks).map(line).collect()
}

/// The calls of a rank.
fn of(rank: usize, ranks: usize) -> [Call; 2] {
    [Call::Send((rank + 1) % ranks), Call::Recv((rank + ranks - 1) % ranks)]
}

pub(super) fn faults(ranks: usize, lines: &[&str]) -> Vec<String> {
    let mut orders: Vec<Option<Vec<Call>>> = vec![None; ranks];
    for line in lines {
        match parse(line) {
            Some((rank, _)) if rank >= ranks => return vec![format!("'{line}': the ranks are 0 to {}", ranks - 1)],
            Some((rank, _)) if orders[rank].is_some() => return vec![format!("rank {rank} has two lines")],
            Some((rank, calls)) => orders[rank] = Some(calls),
            None => return vec![format!("'{line}': expected a line like 0: send 1, recv {}", ranks - 1)],
        }
    }
    let mut all = Vec::new();
    for (rank, calls) in orders.into_iter().enumerate() {
        let Some(calls) = calls else { return vec![format!("rank {rank} has no line")] };
        let [send, recv] = of(rank, ranks);
        if calls != [send, recv] && calls != [recv, send] {
            return vec![format!("rank {rank} must call {send} and {recv}, in either order, and nothing else")];
        }
        all.push(calls);
    }
    play(&all)
}

fn parse(line: &str) -> Option<(usize, Vec<Call>)> {
    let (rank, calls) = line.split_once(':')?;
    let call = |text: &str| match text.trim().split_once(' ')? {
        ("send", peer) => Some(Call::Send(peer.trim().parse().ok()?)),
        ("recv", peer) => Some(Call::Recv(peer.trim().parse().ok()?)),
        _ => None,
    };
    Some((rank.trim().parse().ok()?, calls.split(',').map(call).collect::<Option<_>>()?))
}

/// Lets every pair whose calls match return, until none does; returns the ranks that hang as a line.
fn play(orders: &[Vec<Call>]) -> Vec<String> {
    let mut at = vec![0; orders.len()];
    let now = |at: &[usize], rank: usize| orders[rank].get(at[rank]).copied();
    let meets = |at: &[usize], rank: usize| match now(at, rank) {
        Some(Call::Send(to)) if now(at, to) == Some(Call::Recv(rank)) => Some(to),
        _ => None,
    };
    while let Some((from, to)) = (0..orders.len()).find_map(|rank| Some((rank, meets(&at, rank)?))) {
        at[from] += 1;
        at[to] += 1;
    }
    let hangs: Vec<String> =
        (0..orders.len()).filter_map(|rank| Some(format!("rank {rank} in {}", now(&at, rank)?))).collect();
    if hangs.is_empty() { Vec::new() } else { vec![format!("it hangs: {}", hangs.join(", "))] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_that_receives_first_is_enough_and_none_is_not() {
        let all_send = ["0: send 1, recv 2", "1: send 2, recv 0", "2: send 0, recv 1"];
        assert_eq!(faults(3, &all_send), ["it hangs: rank 0 in send 1, rank 1 in send 2, rank 2 in send 0"]);
        assert_eq!(faults(3, &["2: send 0,recv 1", "0: recv 2, send 1", "1: send 2, recv 0"]), [""; 0]);
        for (lines, words) in [
            (&all_send[..2], "rank 2 has no line"),
            (&["0: send 1"], "must call send 1 and recv 2"),
            (&["0: send 1, recv 2", "0: send 1, recv 2"], "two lines"),
            (&["3: send 1, recv 2"], "0 to 2"),
            (&["zero"], "expected a line like"),
        ] {
            assert!(faults(3, lines)[0].contains(words), "{:?}", faults(3, lines));
        }
        for ranks in 2..=64 {
            let ours = ours(ranks);
            assert_eq!(faults(ranks, &ours.iter().map(String::as_str).collect::<Vec<_>>()), [""; 0]);
        }
    }

    proptest::proptest! {
        #[test]
        fn a_line_alone_is_never_right(text in "[0-9:, sendrcv]{0,24}") {
            assert!(!faults(3, &[&text]).is_empty());
        }
    }
}
