//! The methods of [`DeviceComm`]: every collective with two buffers, and in place.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use tinynccl::cuda::DeviceComm;
use tinynccl::{Error, ReduceOp, Result};

use super::{PATIENCE, ranks};

const UNTOUCHED: i32 = -7;

/// Element `i` of a rank's input.
fn value(rank: usize, i: usize) -> i32 {
    (1000 * rank + i) as i32
}

struct Forms<'a> {
    device: &'a DeviceComm,
    stream: &'a Arc<CudaStream>,
    rank: usize,
    ranks: usize,
    count: usize,
    root: usize,
}

impl Forms<'_> {
    /// Memory of `segments` segments with these elements; `call` uses it as its only buffer. Compares what is there then.
    fn in_place(
        &self,
        form: &str,
        segments: usize,
        before: impl Fn(usize) -> i32,
        call: impl FnOnce(&mut CudaSlice<i32>) -> Result<()>,
        after: impl Fn(usize) -> i32,
    ) {
        let elements: Vec<_> = (0..segments * self.count).map(before).collect();
        let mut buffer = self.stream.clone_htod(&elements).unwrap();
        call(&mut buffer).unwrap();
        self.same(form, &self.stream.clone_dtoh(&buffer).unwrap(), after);
    }

    /// As [`Forms::in_place`], of two buffers with a number of segments each.
    fn apart(
        &self,
        form: &str,
        (from, to): (usize, usize),
        call: impl FnOnce(&CudaSlice<i32>, &mut CudaSlice<i32>) -> Result<()>,
        after: impl Fn(usize) -> i32,
    ) {
        let elements: Vec<_> = (0..from * self.count).map(|i| value(self.rank, i)).collect();
        let input = self.stream.clone_htod(&elements).unwrap();
        let mut output = self.stream.clone_htod(&vec![UNTOUCHED; to * self.count]).unwrap();
        call(&input, &mut output).unwrap();
        self.same(form, &self.stream.clone_dtoh(&output).unwrap(), after);
        self.same(&format!("the input of {form}"), &self.stream.clone_dtoh(&input).unwrap(), |i| value(self.rank, i));
    }

    fn same(&self, form: &str, got: &[i32], want: impl Fn(usize) -> i32) {
        let Forms { rank, ranks, count, root, .. } = self;
        if let Some(i) = (0..got.len()).find(|&i| got[i] != want(i)) {
            panic!(
                "{form} of {count}, root {root}, rank {rank} of {ranks}: element {i} is {}, not {}",
                got[i],
                want(i)
            );
        }
    }

    fn all(&self) {
        let Forms { device, stream, rank, ranks: n, count, root } = *self;
        let (op, at_root, mine) = (ReduceOp::Sum, rank == root, rank * count..(rank + 1) * count);
        let own = |i: usize| value(rank, i);
        let sum = |i: usize| (0..n).map(|rank| value(rank, i)).sum();
        let gathered = |i: usize| value(i / count, i % count);
        // Ours alone is there yet.
        let placed = |i: usize| if mine.contains(&i) { own(i - mine.start) } else { UNTOUCHED };

        self.apart("all_reduce", (1, 1), |from, to| device.all_reduce(stream, from, to, op), sum);
        self.in_place("all_reduce_in_place", 1, own, |buffer| device.all_reduce_in_place(stream, buffer, op), sum);
        self.apart("all_gather", (1, n), |from, to| device.all_gather(stream, from, to), gathered);
        self.in_place("all_gather_in_place", n, placed, |at| device.all_gather_in_place(stream, at), gathered);
        let part = |i: usize| sum(mine.start + i);
        self.apart("reduce_scatter", (n, 1), |from, to| device.reduce_scatter(stream, from, to, op), part);
        let buffer = |i: usize| if mine.contains(&i) { sum(i) } else { own(i) };
        self.in_place("reduce_scatter_in_place", n, own, |at| device.reduce_scatter_in_place(stream, at, op), buffer);
        let of_root = |i: usize| value(root, i);
        self.apart("broadcast", (1, 1), |from, to| device.broadcast(stream, from, to, root), of_root);
        self.in_place("broadcast_in_place", 1, own, |at| device.broadcast_in_place(stream, at, root), of_root);
        let reduced = |i: usize| if at_root { sum(i) } else { UNTOUCHED };
        self.apart("reduce", (1, 1), |from, to| device.reduce(stream, from, to, op, root), reduced);
        let reduced = |i: usize| if at_root { sum(i) } else { own(i) };
        self.in_place("reduce_in_place", 1, own, |at| device.reduce_in_place(stream, at, op, root), reduced);
        let all = |i: usize| if at_root { gathered(i) } else { UNTOUCHED };
        // A rank that has no output gives any buffer.
        let to = if at_root { n } else { 1 };
        self.apart("gather", (1, to), |from, to| device.gather(stream, from, to, root), all);
        let before = |i: usize| if at_root { placed(i) } else { own(i) };
        let after = |i: usize| if at_root { gathered(i) } else { own(i) };
        self.in_place("gather_in_place", to, before, |at| device.gather_in_place(stream, at, root), after);
        let mine_of_root = |i: usize| value(root, mine.start + i);
        let from = if at_root { n } else { 1 };
        self.apart("scatter", (from, 1), |from, to| device.scatter(stream, from, to, root), mine_of_root);
        let after = |i: usize| if at_root { own(i) } else { mine_of_root(i) };
        self.in_place("scatter_in_place", from, own, |at| device.scatter_in_place(stream, at, root), after);
        let turned = |i: usize| value(i / count, mine.start + i % count);
        self.apart("all_to_all", (n, n), |from, to| device.all_to_all(stream, from, to), turned);
    }
}

#[test]
fn every_collective_has_every_form() {
    let Some(ranks) = ranks(PATIENCE) else { return };
    std::thread::scope(|scope| {
        for rank in &ranks {
            scope.spawn(|| {
                let (device, stream) = (&rank.comm, &rank.stream);
                for count in [1, 5, 1000, 70_001] {
                    for root in 0..device.size() {
                        let (rank, ranks) = (device.rank(), device.size());
                        Forms { device, stream, rank, ranks, count, root }.all();
                    }
                }
                // Refused before anything is enqueued.
                let mut odd = stream.clone_htod(&vec![1i32; 2 * device.size() + 1]).unwrap();
                for refused in [
                    device.all_gather_in_place(stream, &mut odd),
                    device.broadcast_in_place(stream, &mut odd, device.size()),
                ] {
                    assert!(matches!(&refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
                }
            });
        }
    });
}
