//! Collectives where each pair of ranks has its own length: the `v` forms of MPI.
//!
//! Ranges of elements, one per rank, give the location of the data, in any order and with gaps. Everything goes
//! straight from sender to receiver, all pairs at the same time. An empty range sends a header alone, so that two ranks
//! which disagree about the length between them get [`Error::Mismatch`] naming both ranks and both lengths, 0 included.
//!
//! Sources: MPI-4.1, sections 6.5 to 6.8; `MPI_Alltoallv` of MPICH and Open MPI ("linear", all requests at once).

use std::ops::Range;

use super::checked::buffers;
use crate::Call;
use crate::comm::engine::bound::Bound;
use crate::comm::{Comm, Inner, Work};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::executor::{Buffers, Transfers};
use crate::wire::Collective;

/// Ranges of these lengths, one after the other from 0, as most callers of the `v` collectives need them.
///
/// ```
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
    ) -> Result<Bound> {
        self.all_to_all_v_of(T::DTYPE, (input.len(), send), (output.len(), recv), buffers(input, output))
    }

    /// Checks and describes an all_to_all_v with the type as a value; `input` and `output` are the buffers' lengths.
    pub(super) fn all_to_all_v_of(
        &self,
        dtype: DType,
        (input, send): (usize, &[Range<usize>]),
        (output, recv): (usize, &[Range<usize>]),
        buffers: Buffers,
    ) -> Result<Bound> {
        let (c, me) = (Collective::AllToAll, self.state.rank);
        self.check_ranges(c, "send", send, input)?;
        self.check_ranges(c, "receive", recv, output)?;
        self.check_disjoint(c, recv)?;
        self.check_own(c, send[me].len(), recv[me].len())?;
        let sends = self.others().map(|r| (r, send[r].clone())).collect();
        let recvs = self.others_backwards().map(|r| (r, recv[r].clone())).collect();
        let own = Some((send[me].clone(), recv[me].clone()));
        Ok(uneven(c, dtype, 0, buffers, Transfers { sends, recvs, own }))
    }

    pub(super) fn all_gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        recv: &[Range<usize>],
    ) -> Result<Bound> {
        self.all_gather_v_of(T::DTYPE, input.len(), (output.len(), recv), buffers(input, output))
    }

    /// Checks and describes an all_gather_v with the type as a value; `input` and `output` are the buffers' lengths.
    pub(super) fn all_gather_v_of(
        &self,
        dtype: DType,
        input: usize,
        (output, recv): (usize, &[Range<usize>]),
        buffers: Buffers,
    ) -> Result<Bound> {
        let (c, me) = (Collective::AllGather, self.state.rank);
        self.check_ranges(c, "receive", recv, output)?;
        self.check_disjoint(c, recv)?;
        self.check_own(c, input, recv[me].len())?;
        let sends = self.others().map(|r| (r, 0..input)).collect();
        let recvs = self.others_backwards().map(|r| (r, recv[r].clone())).collect();
        let own = Some((0..input, recv[me].clone()));
        Ok(uneven(c, dtype, 0, buffers, Transfers { sends, recvs, own }))
    }

    pub(super) fn gather_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        recv: &[Range<usize>],
        root: usize,
    ) -> Result<Bound> {
        let (c, me) = (Collective::Gather, self.state.rank);
        self.peer_in_range("gather_v", "root", root)?;
        let mut transfers = Transfers::default();
        if me == root {
            self.check_ranges(c, "receive", recv, output.len())?;
            self.check_disjoint(c, recv)?;
            self.check_own(c, input.len(), recv[me].len())?;
            transfers.recvs = self.others().map(|r| (r, recv[r].clone())).collect();
            transfers.own = Some((0..input.len(), recv[me].clone()));
        } else {
            transfers.sends.push((root, 0..input.len()));
        }
        Ok(uneven(c, T::DTYPE, root, buffers(input, output), transfers))
    }

    pub(super) fn scatter_v<T: Element>(
        &self,
        input: &[T],
        send: &[Range<usize>],
        output: &mut [T],
        root: usize,
    ) -> Result<Bound> {
        let (c, me) = (Collective::Scatter, self.state.rank);
        self.peer_in_range("scatter_v", "root", root)?;
        let mut transfers = Transfers::default();
        if me == root {
            self.check_ranges(c, "send", send, input.len())?;
            self.check_own(c, send[me].len(), output.len())?;
            transfers.sends = self.others().map(|r| (r, send[r].clone())).collect();
            transfers.own = Some((send[me].clone(), 0..output.len()));
        } else {
            transfers.recvs.push((root, 0..output.len()));
        }
        Ok(uneven(c, T::DTYPE, root, buffers(input, output), transfers))
    }

    /// The other ranks from the next one on, so that ranks do not all begin with the same target.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, n) = (self.state.rank, self.size());
        (1..n).map(move |k| (me + k) % n)
    }

    /// The other ranks in the order in which their first message comes.
    fn others_backwards(&self) -> impl Iterator<Item = usize> + use<> {
        let (me, n) = (self.state.rank, self.size());
        (1..n).map(move |k| (me + n - k) % n)
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

fn uneven(collective: Collective, dtype: DType, root: usize, buffers: Buffers, transfers: Transfers) -> Bound {
    let call = Call { root, ..Call::of(collective).with_count(dtype, 0) };
    Bound { call, buffers, transfers: Some(Box::new(transfers)) }
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
