//! Collectives where each pair of ranks has its own length: the `v` forms of MPI.
//!
//! Ranges of elements, one per rank, give the location of the data, in any order and with gaps. Everything goes
//! straight from sender to receiver, all pairs at the same time. An empty range sends a header alone, so that two ranks
//! which disagree about the length between them get [`Error::Mismatch`] naming both ranks and both lengths, 0 included.
//!
//! Sources: MPI-4.1, sections 6.5 to 6.8; `MPI_Alltoallv` of MPICH and Open MPI ("linear", all requests at once).

use std::ops::Range;

use super::checked::buffers;
use crate::engine::raw_call::RawCall;
use crate::executor::{Buffers, Ranges};
use crate::{Comm, Inner, Work};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

/// Ranges of these lengths, one after the other from 0, as most callers of the `v` collectives need them.
///
/// ```
/// # extern crate tinynccl_comm as tinynccl;
/// assert_eq!(tinynccl::comm::packed(&[3, 0, 2]), [0..3, 3..3, 3..5]);
/// ```
pub fn packed(counts: &[usize]) -> Vec<Range<usize>> {
    counts
        .iter()
        .scan(0usize, |at, &count| {
            let start = std::mem::replace(at, at.saturating_add(count));
            Some(start..*at)
        })
        .collect()
}

impl Comm {
    /// `input[send[r]]` goes to rank `r`, and `output[recv[r]]` receives rank `r`'s elements for us. Both lists have
    /// one range per rank, our own included. `recv` ranges must not overlap; elements of `output` outside of them stay
    /// unchanged.
    ///
    /// `recv[r]` must be as long as rank `r`'s range for us. If the receivers do not know these lengths, exchange them
    /// by [`Comm::all_to_all`] first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for invalid lists and ranges; [`Error::Mismatch`] when two ranks disagree.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # fn main() -> tinynccl::Result<()> {
    /// use tinynccl::{Comm, Config, Result, comm::packed};
    ///
    /// // Rank r sends r + 1 elements to each rank.
    /// fn exchange(comm: Comm) -> Result<()> {
    ///     let (rank, n) = (comm.rank(), comm.size());
    ///     let (send, recv) = (packed(&vec![rank + 1; n]), packed(&(1..=n).collect::<Vec<_>>()));
    ///     let (input, mut output) = (vec![rank as u32; n * (rank + 1)], vec![0; n * (n + 1) / 2]);
    ///     comm.all_to_all_v(&input, &send, &mut output, &recv)?;
    ///     assert_eq!(output, [0, 1, 1, 2, 2, 2]);
    ///     Ok(())
    /// }
    ///
    /// let ranks = Comm::threads(3, Config::default())?.into_iter().map(|comm| std::thread::spawn(|| exchange(comm)));
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     rank.join().expect("no rank panics")?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        send: &[Range<usize>],
        output: &mut [T],
        recv: &[Range<usize>],
    ) -> Result<()> {
        self.inner.run(self.inner.all_to_all_v(input, send, output, recv))
    }

    /// [`Comm::all_gather`] of inputs of different lengths: `output[recv[r]]` becomes rank `r`'s `input`.
    ///
    /// # Errors
    /// As [`Comm::all_to_all_v`].
    pub fn all_gather_v<T: Element>(&self, input: &[T], output: &mut [T], recv: &[Range<usize>]) -> Result<()> {
        self.inner.run(self.inner.all_gather_v(input, output, recv))
    }

    /// [`Comm::gather`] of inputs of different lengths: the root's `output[recv[r]]` becomes rank `r`'s `input`.
    /// `output` and `recv` are ignored elsewhere.
    ///
    /// # Errors
    /// As [`Comm::all_to_all_v`].
    pub fn gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        recv: &[Range<usize>],
        root: usize,
    ) -> Result<()> {
        self.inner.run(self.inner.gather_v(input, output, recv, root))
    }

    /// [`Comm::scatter`] of segments of different lengths: rank `r`'s `output` becomes the root's `input[send[r]]`.
    /// `input` and `send` are ignored elsewhere.
    ///
    /// # Errors
    /// As [`Comm::all_to_all_v`].
    pub fn scatter_v<T: Element>(
        &self,
        input: &[T],
        send: &[Range<usize>],
        output: &mut [T],
        root: usize,
    ) -> Result<()> {
        self.inner.run(self.inner.scatter_v(input, send, output, root))
    }

    /// [`Comm::all_to_all_v`], asynchronously; gives `(input, output)` back.
    pub fn all_to_all_v_async<T: Element>(
        &self,
        input: Vec<T>,
        send: Vec<Range<usize>>,
        output: Vec<T>,
        recv: Vec<Range<usize>>,
    ) -> Result<Work<(Vec<T>, Vec<T>)>> {
        self.submit((input, output), move |inner, (input, output)| inner.all_to_all_v(input, &send, output, &recv))
    }
}

impl Inner {
    pub(super) fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        send: &[Range<usize>],
        output: &mut [T],
        recv: &[Range<usize>],
    ) -> Result<RawCall> {
        self.uneven(Call::of(Collective::AllToAll), (input, Some(send)), (output, Some(recv)))
    }

    pub(super) fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        recv: &[Range<usize>],
    ) -> Result<RawCall> {
        self.uneven(Call::of(Collective::AllGather), (input, None), (output, Some(recv)))
    }

    pub(super) fn gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        recv: &[Range<usize>],
        root: usize,
    ) -> Result<RawCall> {
        self.peer_in_range("gather_v", "root", root)?;
        self.uneven(Call { root, ..Call::of(Collective::Gather) }, (input, None), (output, Some(recv)))
    }

    pub(super) fn scatter_v<T: Element>(
        &self,
        input: &[T],
        send: &[Range<usize>],
        output: &mut [T],
        root: usize,
    ) -> Result<RawCall> {
        self.peer_in_range("scatter_v", "root", root)?;
        self.uneven(Call { root, ..Call::of(Collective::Scatter) }, (input, Some(send)), (output, None))
    }

    /// A call of slices and the ranges in them, of which `None` stands for the whole slice.
    fn uneven<T: Element>(
        &self,
        call: Call,
        (input, send): (&[T], Option<&[Range<usize>]>),
        (output, recv): (&mut [T], Option<&[Range<usize>]>),
    ) -> Result<RawCall> {
        let list = |ranges: Option<&[_]>, len| ranges.map_or_else(|| std::iter::once(0..len).collect(), <[_]>::to_vec);
        let ranges = Ranges { send: list(send, input.len()), recv: list(recv, output.len()) };
        let lengths = (input.len(), output.len());
        self.uneven_call(call.with_count(T::DTYPE, 0), ranges, lengths, buffers(input, output))
    }

    /// A call with checked ranges over buffers of `input` and `output` elements.
    pub(super) fn uneven_call(
        &self,
        call: Call,
        ranges: Ranges,
        (input, output): (usize, usize),
        buffers: Buffers,
    ) -> Result<RawCall> {
        let (c, me) = (call.collective, self.state.rank);
        let at_root = me == call.root;
        if c == Collective::AllToAll || c == Collective::Scatter && at_root {
            self.check_ranges(c, "send", &ranges.send, input)?;
        }
        if matches!(c, Collective::AllToAll | Collective::AllGather) || c == Collective::Gather && at_root {
            self.check_ranges(c, "receive", &ranges.recv, output)?;
            self.check_disjoint(c, &ranges.recv)?;
        }
        if let Some((from, to)) = ranges.own(&call, me) {
            self.check_own(c, from.len(), to.len())?;
        }
        Ok(RawCall { call, buffers, ranges: Some(Box::new(ranges)) })
    }

    fn check_ranges(&self, c: Collective, which: &str, ranges: &[Range<usize>], len: usize) -> Result<()> {
        let (rank, size) = (self.state.rank, self.size());
        if ranges.len() != size {
            let detail = format!("rank {rank}: {} {which} ranges, expected one for each of {size} ranks", ranges.len());
            return Err(Error::invalid(format!("{c}_v"), detail));
        }
        match ranges.iter().enumerate().find(|(_, r)| r.start > r.end || r.end > len) {
            Some((peer, range)) => {
                let detail =
                    format!("rank {rank}: the {which} range of rank {peer} is {range:?}, expected it in 0..{len}");
                Err(Error::invalid(format!("{c}_v"), detail))
            }
            None => Ok(()),
        }
    }

    fn check_disjoint(&self, c: Collective, ranges: &[Range<usize>]) -> Result<()> {
        let mut filled: Vec<usize> = (0..ranges.len()).filter(|&r| !ranges[r].is_empty()).collect();
        filled.sort_unstable_by_key(|&r| ranges[r].start);
        match filled.windows(2).find(|pair| ranges[pair[0]].end > ranges[pair[1]].start) {
            Some(pair) => {
                let detail = format!(
                    "rank {}: the receive ranges of ranks {} and {} overlap: {:?} and {:?}",
                    self.state.rank, pair[0], pair[1], ranges[pair[0]], ranges[pair[1]]
                );
                Err(Error::invalid(format!("{c}_v"), detail))
            }
            None => Ok(()),
        }
    }

    fn check_own(&self, c: Collective, sent: usize, received: usize) -> Result<()> {
        if sent == received {
            return Ok(());
        }
        let rank = self.state.rank;
        let detail = format!("rank {rank} sends {sent} elements to itself but receives {received}");
        Err(Error::invalid(format!("{c}_v"), detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_ranges_follow_each_other() {
        assert!(packed(&[]).is_empty());
        assert_eq!(packed(&[2, 0, 3]), [0..2, 2..2, 2..5]);
        // Lengths that do not fit give ranges that the calls refuse.
        assert_eq!(packed(&[usize::MAX, 1]), [0..usize::MAX, usize::MAX..usize::MAX]);
    }
}
