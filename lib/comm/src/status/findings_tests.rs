use super::super::report::{Call, Place, Standing};
use super::super::view::Source;
use super::*;

fn call(name: &str, number: u32, count: usize) -> Option<Call> {
    Some(Call { name: name.to_owned(), number, arguments: format!("f32, sum, count {count}"), bytes: 4 * count as u64 })
}

/// A rank of process `100 + rank` with this call, which has lasted, or ended, 12 seconds ago.
fn rank(rank: usize, state: State, last: Option<Call>) -> Rank {
    let begun = last.as_ref().map_or(0, |call| call.number);
    let done = if state == State::InCall { begun - 1 } else { begun };
    let standing = Standing { begun, done, call: last, quiet_ms: 12_000, ..Standing::default() };
    Rank {
        rank,
        world: rank,
        place: Place { host: "h".to_owned(), pid: 100 + rank as u32, address: None },
        state,
        source: Source::Process,
        standing: Some(standing),
        detail: None,
        device: None,
        recent: Vec::new(),
        messages: Vec::new(),
        meets: None,
    }
}

fn comm(comm: u32, ranks: Vec<Rank>) -> Comm {
    Comm { job: "ab".to_owned(), comm, name: None, ranks }
}

fn found(comms: Vec<Comm>) -> Vec<(Vec<usize>, String)> {
    let view = View { comms, ..View::default() };
    findings(&view, Duration::from_secs(5)).into_iter().map(|one| (one.missing, one.text)).collect()
}

#[test]
fn the_missing_rank_is_named_with_its_last_call() {
    let waits = |r| rank(r, State::InCall, call("all_reduce", 17, 8));
    let found =
        found(vec![comm(0, vec![waits(0), waits(1), rank(2, State::Idle, call("broadcast", 16, 1)), waits(3)])]);
    let text = "communicator 0 of job ab: ranks 0, 1, 3 wait in all_reduce #17 (f32, sum, count 8) for 12 s, and rank 2 \
                has not made it: rank 2 (process 102 on h): its last call was broadcast #16, which ended 12 s ago";
    assert_eq!(found, [(vec![2], text.to_owned())]);
}

#[test]
fn a_call_that_has_just_begun_is_nothing_odd() {
    let mut ranks = vec![rank(0, State::InCall, call("barrier", 1, 0)), rank(1, State::Idle, None)];
    ranks[0].standing.as_mut().unwrap().quiet_ms = 4_999;
    assert_eq!(found(vec![comm(0, ranks.clone())]), []);
    // A rank in the call of one that has waited for long waits, too.
    ranks.push(rank(2, State::InCall, call("barrier", 1, 0)));
    let text = &found(vec![comm(0, ranks)])[0].1;
    assert!(text.contains("ranks 0, 2 wait in barrier #1"), "{text}");
    assert_eq!(found(vec![comm(0, (0..9).map(|r| rank(r, State::Idle, call("barrier", 3, 0))).collect())]), []);
}

#[test]
fn two_communicators_in_different_orders() {
    let in_call = |r| rank(r, State::InCall, call("all_reduce", 1, 8));
    let found = found(vec![
        comm(2, vec![in_call(0), rank(1, State::Idle, None)]),
        comm(3, vec![rank(0, State::Idle, None), in_call(1)]),
    ]);
    assert_eq!((found[0].0.as_slice(), found[1].0.as_slice()), (&[1][..], &[0][..]));
    assert!(found[0].1.ends_with("it has made no call here, and it is in all_reduce #1 of communicator 3 of job ab"));
    assert!(found[1].1.ends_with("it has made no call here, and it is in all_reduce #1 of communicator 2 of job ab"));
}

#[test]
fn ranks_with_different_calls_at_one_number() {
    let waits = |r, count| rank(r, State::InCall, call("all_reduce", 5, count));
    let text = &found(vec![comm(0, vec![waits(0, 8), waits(1, 8), waits(2, 9)])])[0].1;
    assert!(text.contains("ranks 0, 1 made all_reduce #5 (f32, sum, count 8), rank 2 made all_reduce #5"), "{text}");
}

#[test]
fn a_stopped_process_is_the_cause_wherever_it_stands() {
    let waits = |r| rank(r, State::InCall, call("all_reduce", 5, 8));
    for last in [4, 5] {
        let stopped = rank(1, State::Stopped, call("all_reduce", last, 8));
        let found = found(vec![comm(0, vec![waits(0), stopped])]);
        assert_eq!(found[0].0, [1]);
        let ends =
            format!("rank 1 (process 101 on h) is stopped: its last call was all_reduce #{last}, which ended 12 s ago");
        assert!(found[0].1.ends_with(&ends), "{found:?}");
    }
    let idle = vec![rank(0, State::Idle, None), rank(1, State::Lost, None)];
    assert_eq!(found(vec![comm(0, idle)])[0].0, [1], "also where no rank waits");
}

#[test]
fn numbers_that_begin_again_are_in_order() {
    let waits = rank(0, State::InCall, call("barrier", 2, 0));
    let behind = rank(1, State::Idle, call("barrier", u32::MAX, 0));
    assert_eq!(found(vec![comm(0, vec![waits, behind])])[0].0, [1]);
}

#[test]
fn a_start_names_the_ranks_that_have_not_come() {
    let meeting = |here| Meeting { store: "127.0.0.1:29500".to_owned(), size: 4, here, waits_ms: 8_000 };
    let view = |here| View { starts: vec![meeting(here)], ..View::default() };
    let found = findings(&view(vec![(0, 7), (3, 8)]), Duration::from_secs(5));
    assert_eq!(found[0].missing, [1, 2]);
    assert_eq!(
        found[0].text,
        "start of 4 ranks at 127.0.0.1:29500: ranks 0, 3 wait for 8.0 s, and on this host no process has come as ranks 1, 2"
    );
    assert_eq!(findings(&view(vec![(0, 7)]), Duration::from_secs(9)), []);
}

#[test]
fn many_ranks_are_named_as_ranges() {
    assert_eq!(names([2].into_iter()), "rank 2");
    assert_eq!(names([0, 1, 3, 4, 5, 6, 9].into_iter()), "ranks 0, 1, 3 to 6, 9");
}
