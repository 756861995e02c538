//! Collectives with a length per pair of ranks, send_recv and neighbour exchange.

use std::ops::Range;

use crate::common::values::datum;
use crate::common::{FABRICS, Fabric, config, run, run_ok};
use proptest::prelude::*;
use tinynccl::comm::{Exchange, packed};
use tinynccl::{Comm, Config, Error, Result};

fn short_messages() -> Config {
    let mut config = config();
    (config.shm_chunk, config.tcp_chunk, config.fifo_depth) = (64, 64, 2);
    config
}

/// `counts[from][to]` elements go from rank to rank.
type Counts = Vec<Vec<usize>>;

/// Ranges of these lengths, laid out in the order that starts with rank `first` and with gaps between.
fn spread(counts: &[usize], first: usize, gap: usize) -> (Vec<Range<usize>>, usize) {
    let n = counts.len();
    let mut ranges = vec![0..0; n];
    let mut at = gap;
    for r in (0..n).map(|k| (first + k) % n) {
        ranges[r] = at..at + counts[r];
        at += counts[r] + gap;
    }
    (ranges, at)
}

const UNTOUCHED: u32 = 999;

/// Message that rank `from` sends to rank `to`.
fn message(from: usize, to: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| (1000 * (from * 10 + to)) as u32 + datum::<u32>(from, i)).collect()
}

/// A buffer of `len` elements with these messages in these ranges.
fn laid_out(len: usize, ranges: &[Range<usize>], message: impl Fn(usize, usize) -> Vec<u32>) -> Vec<u32> {
    let mut buffer = vec![UNTOUCHED; len];
    for (rank, range) in ranges.iter().enumerate() {
        buffer[range.clone()].copy_from_slice(&message(rank, range.len()));
    }
    buffer
}

fn check_all_to_all_v(comm: &Comm, counts: &Counts, gap: usize) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.size());
    let to: Vec<usize> = counts[rank].clone();
    let from: Vec<usize> = (0..n).map(|s| counts[s][rank]).collect();
    let ((send, sent), (recv, received)) = (spread(&to, rank, gap), spread(&from, (rank + 1) % n, gap));
    let input = laid_out(sent, &send, |to, len| message(rank, to, len));
    let mut output = vec![UNTOUCHED; received];
    comm.all_to_all_v(&input, &send, &mut output, &recv)?;
    assert_eq!(output, laid_out(received, &recv, |from, len| message(from, rank, len)), "all_to_all_v");

    // Rank r contributes counts[r][0] elements to the gathers, and gets counts[0][r] from the scatter.
    let lengths: Vec<usize> = counts.iter().map(|row| row[0]).collect();
    let (recv, received) = spread(&lengths, 0, gap);
    let input = message(rank, 0, lengths[rank]);
    let gathered = laid_out(received, &recv, |from, len| message(from, 0, len));
    let mut output = vec![UNTOUCHED; received];
    comm.all_gather_v(&input, &mut output, &recv)?;
    assert_eq!(output, gathered, "all_gather_v");

    let root = gap % n;
    let is_root = rank == root;
    let mut output = vec![UNTOUCHED; if is_root { received } else { 0 }];
    comm.gather_v(&input, &mut output, if is_root { &recv } else { &[] }, root)?;
    assert_eq!(output, if is_root { gathered } else { vec![] }, "gather_v");

    let (send, sent) = spread(&counts[0], n - 1, gap);
    let input = if is_root { laid_out(sent, &send, |to, len| message(root, to, len)) } else { vec![] };
    let mut output = vec![UNTOUCHED; counts[0][rank]];
    comm.scatter_v(&input, if is_root { &send } else { &[] }, &mut output, root)?;
    assert_eq!(output, message(root, rank, counts[0][rank]), "scatter_v");
    Ok(())
}

fn counts() -> impl Strategy<Value = Counts> {
    let count = prop_oneof![Just(0usize), 1usize..5, 20usize..90];
    (1usize..7).prop_flat_map(move |n| prop::collection::vec(prop::collection::vec(count.clone(), n), n))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_lengths_arrive_where_they_belong(counts in counts(), gap in 0usize..4) {
        run_ok(Fabric::Inproc, counts.len(), &short_messages(), |comm| check_all_to_all_v(&comm, &counts, gap));
    }
}

#[test]
fn lengths_per_pair_over_every_transport() {
    let counts: Counts = vec![vec![3, 0, 100], vec![0, 0, 1], vec![7000, 64, 0]];
    for fabric in FABRICS {
        run_ok(fabric, 3, &short_messages(), |comm| {
            check_all_to_all_v(&comm, &counts, 1)?;
            // Nothing at all.
            comm.all_to_all_v::<u8>(&[], &packed(&[0; 3]), &mut [], &packed(&[0; 3]))?;
            let (input, output) = (vec![comm.rank() as u8; 6], vec![9; 6]);
            let work = comm.all_to_all_v_async(input, packed(&[2; 3]), output, packed(&[2; 3]))?;
            assert_eq!(work.wait()?.1, [0, 0, 1, 1, 2, 2]);
            comm.barrier()
        });
    }
}

#[test]
fn two_ranks_that_disagree_about_their_pair_are_named_with_both_lengths() {
    for fabric in FABRICS {
        for (ours, theirs) in [(5, 6), (0, 4), (4, 0)] {
            let errors = run(fabric, 3, &config(), |comm| {
                // Rank 0 sends `ours` elements to rank 2, which expects `theirs`.
                let mut send = vec![1; 3];
                let mut recv = vec![1; 3];
                if comm.rank() == 0 {
                    send[2] = ours;
                }
                if comm.rank() == 2 {
                    recv[0] = theirs;
                }
                let (send, recv) = (packed(&send), packed(&recv));
                let mut output = vec![0f32; recv[2].end];
                let call = comm.all_to_all_v(&vec![1f32; send[2].end], &send, &mut output, &recv);
                call.and_then(|()| comm.barrier()).expect_err("ranks 0 and 2 disagree").to_string()
            });
            for error in &errors {
                let (a, b) = (format!("count {ours}"), format!("count {theirs}"));
                let all = ["all_to_all_v", "rank 0", "rank 2", &a, &b].iter().all(|word| error.contains(*word));
                assert!(all, "{fabric:?}: {error}");
            }
        }
    }
}

#[test]
fn another_collective_is_a_mismatch_even_with_equal_lengths() {
    let errors = run(Fabric::Inproc, 2, &config(), |comm| {
        let mut output = [0u8; 2];
        let call = match comm.rank() {
            0 => comm.all_to_all(&[1u8; 2], &mut output),
            _ => comm.all_to_all_v(&[1u8; 2], &packed(&[1; 2]), &mut output, &packed(&[1; 2])),
        };
        call.and_then(|()| comm.barrier()).expect_err("different calls").to_string()
    });
    for error in errors {
        assert!(error.contains("all_to_all #") && error.contains("all_to_all_v #"), "{error}");
    }
}

type Ranges<'a> = &'a [Range<usize>];

#[test]
fn ranges_that_cannot_be_right_are_refused_before_anything_is_sent() {
    run_ok(Fabric::Inproc, 2, &config(), |comm| {
        let rank = comm.rank();
        let (good, input) = (packed(&[2; 2]), [1u8; 4]);
        let mut out = [0u8; 4];
        #[allow(clippy::reversed_empty_ranges, reason = "what is refused")]
        let bad: [(Ranges<'_>, Ranges<'_>, &str); 5] = [
            (&good[..1], &good, "1 send ranges, expected one for each of 2 ranks"),
            (&[0..2, 3..5], &good, "send range of rank 1 is 3..5, expected it in 0..4"),
            (&good, &[2..0, 2..4], "receive range of rank 0 is 2..0"),
            (&good, &[1..3, 2..4], "receive ranges of ranks 0 and 1 overlap: 1..3 and 2..4"),
            (&[0..1, 1..2], &good, "sends 1 elements to itself but receives 2"),
        ];
        for (send, recv, words) in bad {
            let error = comm.all_to_all_v(&input, send, &mut out, recv).expect_err("refused");
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(
                error.to_string().contains(words) && error.to_string().contains(&format!("rank {rank}")),
                "{error}"
            );
        }
        assert!(comm.all_gather_v(&input, &mut out, &good).is_err(), "4 elements into a range of 2");
        assert!(comm.gather_v(&input, &mut out, &good, 2).is_err(), "no rank 2");
        comm.all_to_all_v(&input, &good, &mut out, &good)
    });
}

#[test]
fn send_recv_in_a_circle_cannot_deadlock() {
    for fabric in FABRICS {
        run_ok(fabric, 4, &short_messages(), |comm| {
            let (rank, n) = (comm.rank(), comm.size());
            let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
            for len in [0, 1, 10_000] {
                let mut recv = vec![9u32; len];
                comm.send_recv(&vec![rank as u32; len], right, &mut recv, left)?;
                assert_eq!(recv, vec![left as u32; len]);
                let mut own = [0u32];
                comm.send_recv(&[7], rank, &mut own, rank)?;
                assert_eq!(own, [7]);
                let error = comm.send_recv(&[7, 8], rank, &mut own, rank).expect_err("other lengths");
                assert!(error.to_string().contains("sends 8 bytes of u32 to itself but receives 4"), "{error}");
                let (sent, got) = comm.send_recv_async(vec![rank as u8; len], left, vec![0; len], right)?.wait()?;
                assert_eq!((sent.len(), got), (len, vec![right as u8; len]));
            }
            assert!(comm.send_recv(&[1u8], n, &mut [0], left).is_err(), "no such rank");
            comm.barrier()
        });
    }
}

/// Borders on a grid of `rows` x `columns` ranks, periodic in columns only.
fn check_grid(comm: &Comm, rows: usize, columns: usize) -> Result<()> {
    let rank = comm.rank();
    let (row, column) = (rank / columns, rank % columns);
    let east = row * columns + (column + 1) % columns;
    let west = row * columns + (column + columns - 1) % columns;
    let south = (row + 1 < rows).then_some(rank + columns);
    let north = (row > 0).then(|| rank - columns);
    // What a rank sends in direction d.
    let border = |rank: usize, d: u32| vec![100 * rank as u32 + d; 33];
    let out: Vec<_> = (0..4).map(|d| border(rank, d)).collect();
    let mut into = vec![vec![UNTOUCHED; 33]; 4];
    let [from_west, from_east, from_north, from_south] = into.each_mut_array();
    comm.neighbour_exchange([
        Exchange { to: Some(east), send: &out[0], from: Some(west), recv: from_west },
        Exchange { to: Some(west), send: &out[1], from: Some(east), recv: from_east },
        Exchange { to: south, send: &out[2], from: north, recv: from_north },
        Exchange { to: north, send: &out[3], from: south, recv: from_south },
    ])?;
    let expected = [Some(west), Some(east), north, south];
    for (d, (from, got)) in expected.into_iter().zip(&into).enumerate() {
        let want = from.map_or(vec![UNTOUCHED; 33], |from| border(from, d as u32));
        assert_eq!(*got, want, "{rows} x {columns}, rank {rank}, direction {d}");
    }
    Ok(())
}

/// The four buffers of a grid at once.
trait EachMut<T> {
    fn each_mut_array(&mut self) -> [&mut T; 4];
}
impl<T> EachMut<T> for Vec<T> {
    fn each_mut_array(&mut self) -> [&mut T; 4] {
        let (a, b) = self.split_at_mut(2);
        let ((a, b), (c, d)) = (a.split_at_mut(1), b.split_at_mut(1));
        [&mut a[0], &mut b[0], &mut c[0], &mut d[0]]
    }
}

#[test]
fn borders_of_grids_of_every_size() {
    for fabric in FABRICS {
        for (rows, columns) in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 2)] {
            run_ok(fabric, rows * columns, &short_messages(), |comm| {
                check_grid(&comm, rows, columns)?;
                check_grid(&comm, rows, columns)
            });
        }
    }
}
