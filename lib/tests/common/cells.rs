//! One cell of the table of everything: a collective, checked in all its forms against values computed without
//! communication.

use std::fmt;

use tinynccl::wire::Collective;
use tinynccl::{Comm, DType, ReduceOp, Result};

use super::memory::Memory;
use super::values::{Number, combined, datum, operand, reduced, with_dtype};

/// The collectives that have their own methods; send/recv has its own tests.
pub const COLLECTIVES: [Collective; 10] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
    Collective::Scan,
];

/// One call of a collective, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub collective: Collective,
    pub dtype: DType,
    pub op: ReduceOp,
    pub root: usize,
    /// Elements per segment.
    pub count: usize,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { collective, dtype, op, root, count } = self;
        write!(f, "{collective} of {count} {dtype}")?;
        if collective.reduces() {
            write!(f, ", {op}")?;
        }
        if collective.has_root() { write!(f, ", root {root}") } else { Ok(()) }
    }
}

/// Calls every form of the cell's collective and panics, naming the cell, where a result differs.
pub fn check(comm: &Comm, cell: Cell, context: &dyn fmt::Display) -> Result<()> {
    with_dtype!(cell.dtype, T => check_as::<T>(comm, cell, context))
}

struct Checker<'a> {
    cell: Cell,
    rank: usize,
    ranks: usize,
    context: &'a dyn fmt::Display,
}

impl Checker<'_> {
    /// `got[i]` must be `want(i)`.
    fn same<T: Number>(&self, form: &str, got: &[T], want: impl Fn(usize) -> T) {
        if let Some(i) = (0..got.len()).find(|&i| got[i] != want(i)) {
            let Checker { cell, rank, ranks, context } = self;
            let want = want(i);
            panic!("{context}: {cell}, {form}: rank {rank} of {ranks}: element {i} is {:?}, expected {want:?}", got[i]);
        }
    }
}

fn check_as<T: Number>(comm: &Comm, cell: Cell, context: &dyn fmt::Display) -> Result<()> {
    let Cell { collective, op, root, count, .. } = cell;
    let (rank, n) = (comm.rank(), comm.size());
    let check = Checker { cell, rank, ranks: n, context };
    let is_root = rank == root;
    let mine = rank * count..(rank + 1) * count;
    let own = |i: usize| operand::<T>(op, n, rank, i);
    let sum = |i: usize| reduced::<T>(op, n, i);
    let data = |i: usize| datum(rank, i);
    let of_root = |i: usize| datum(root, i);
    // Segment s of what all ranks sent.
    let gathered = |i: usize| datum(i / count, i % count);
    let memory = Memory { comm, most: n * count };
    match collective {
        Collective::AllReduce => {
            let (input, mut output) = (memory.vector::<T>(count, own), memory.blank(count));
            comm.all_reduce(&input, &mut output, op)?;
            check.same("out of place", &output, sum);
            check.same("its input", &input, own);
            comm.all_reduce_in_place(&mut output, ReduceOp::Max)?;
            check.same("maximum of equals", &output, sum);
            let mut buffer = input;
            comm.all_reduce_in_place(&mut buffer, op)?;
            check.same("in place", &buffer, sum);
        }
        Collective::ReduceScatter => {
            let (input, mut output) = (memory.vector::<T>(n * count, own), memory.blank(count));
            comm.reduce_scatter(&input, &mut output, op)?;
            check.same("out of place", &output, |i| sum(mine.start + i));
            check.same("its input", &input, own);
            let mut buffer = input;
            comm.reduce_scatter_in_place(&mut buffer, op)?;
            check.same("in place", &buffer, |i| if mine.contains(&i) { sum(i) } else { own(i) });
        }
        Collective::Reduce => {
            let (input, mut output) = (memory.vector::<T>(count, own), memory.blank(if is_root { count } else { 0 }));
            comm.reduce(&input, &mut output, op, root)?;
            check.same("out of place", &output, sum);
            check.same("its input", &input, own);
            let mut buffer = input;
            comm.reduce_in_place(&mut buffer, op, root)?;
            check.same("in place", &buffer, |i| if is_root { sum(i) } else { own(i) });
        }
        Collective::Scan => {
            let of_first = |i: usize| combined::<T>(op, n, rank + 1, i);
            let (input, mut output) = (memory.vector::<T>(count, own), memory.blank(count));
            if op == ReduceOp::Avg {
                let refused = comm.scan(&input, &mut output, op).unwrap_err().to_string();
                assert!(refused.contains("expected another operator"), "{context}: {cell}: {refused}");
                return Ok(());
            }
            comm.scan(&input, &mut output, op)?;
            check.same("out of place", &output, of_first);
            check.same("its input", &input, own);
            let mut buffer = input;
            comm.scan_in_place(&mut buffer, op)?;
            check.same("in place", &buffer, of_first);
        }
        Collective::AllGather => {
            let (input, mut output) = (memory.vector::<T>(count, data), memory.blank(n * count));
            comm.all_gather(&input, &mut output)?;
            check.same("out of place", &output, gathered);
            let mut buffer = memory.blank::<T>(n * count);
            buffer[mine].copy_from_slice(&input);
            comm.all_gather_in_place(&mut buffer)?;
            check.same("in place", &buffer, gathered);
        }
        Collective::Broadcast => {
            let (input, mut output) = (memory.vector::<T>(if is_root { count } else { 0 }, data), memory.blank(count));
            comm.broadcast(&input, &mut output, root)?;
            check.same("out of place", &output, of_root);
            let mut buffer = memory.vector::<T>(count, data);
            comm.broadcast_in_place(&mut buffer, root)?;
            check.same("in place", &buffer, of_root);
        }
        Collective::Gather => {
            let (input, mut output) =
                (memory.vector::<T>(count, data), memory.blank(if is_root { n * count } else { 0 }));
            comm.gather(&input, &mut output, root)?;
            check.same("out of place", &output, gathered);
            let mut buffer = if is_root { memory.blank(n * count) } else { memory.vector::<T>(count, data) };
            if is_root {
                buffer[mine].copy_from_slice(&input);
            }
            comm.gather_in_place(&mut buffer, root)?;
            check.same("in place", &buffer, |i| if is_root { gathered(i) } else { data(i) });
        }
        Collective::Scatter => {
            let (input, mut output) =
                (memory.vector::<T>(if is_root { n * count } else { 0 }, data), memory.blank(count));
            comm.scatter(&input, &mut output, root)?;
            check.same("out of place", &output, |i| of_root(mine.start + i));
            // Every rank makes as many buffers.
            let other = memory.blank(count);
            let mut buffer = if is_root { input } else { other };
            comm.scatter_in_place(&mut buffer, root)?;
            check.same("in place", &buffer, |i| if is_root { data(i) } else { of_root(mine.start + i) });
        }
        Collective::AllToAll => {
            let (input, mut output) = (memory.vector::<T>(n * count, data), memory.blank(n * count));
            comm.all_to_all(&input, &mut output)?;
            check.same("out of place", &output, |i| datum(i / count, mine.start + i % count));
        }
        Collective::Barrier => comm.barrier()?,
        other => panic!("{other} is not in the table"),
    }
    Ok(())
}
