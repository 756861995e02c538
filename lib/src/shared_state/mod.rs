//! Equal state on all ranks, after ranks were lost and gained ([`Comm::shrink`], [`Comm::grow`]).
//!
//! ```text
//!   hash all chunks ──▶ vote: which state wins ──▶ its hashes to all ──▶ who lacks what ──▶ waves of chunks ──▶ proof
//!                                └─ all are equal: done
//! ```
//! The idea is that of the shared state of Prime Intellect's PCCL ("Prime Collective Communications Library: technical
//! report", arXiv 2505.14065).
//! Everything here is made of a communicator's calls.
//!
//! | file | idea |
//! | --- | --- |
//! | `vote.rs` | the state that wins |
//! | `plan.rs` | who sends which chunk to whom, and when |
//! | `buffer.rs` | a buffer in chunks |

mod buffer;
mod plan;
mod vote;

use buffer::{Buffer, CHUNK, hash};
use bytemuck::Pod;
use plan::Transfer;
use vote::{Ballot, elect};

use crate::declared;
use tinynccl_comm::Comm;
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::{Error, Result};

const OP: &str = "synchronize";

/// Buffers that are to hold the same bits on all ranks: weights, an optimizer's moments, counters.
///
/// Every rank declares the same buffers in the same order, and the *revision* of what is in them: a number that grows
/// with it, such as the steps done. [`SharedState::synchronize`] then makes them equal. A rank with a revision has a
/// vote; `None` is a newcomer. The state with the newest revision wins, and among different contents of that revision
/// the one that most ranks have. Ranks fetch only the chunks (256 KiB) that differ, from all ranks that have them, and
/// from each other; no rank sends a chunk more than once.
///
/// ```
/// # use tinynccl::SharedState;
/// # tinynccl::comm::on_threads(3, |comm| {
/// // On each of three ranks, of which rank 1 is new:
/// let mut steps = (comm.rank() != 1).then_some(7);
/// let mut weights = vec![if steps.is_some() { 0.5 } else { 0.0f32 }; 1000];
/// let outcome = SharedState::new(&mut steps).buffer("weights", &mut weights).synchronize(comm)?;
/// assert_eq!((steps, weights), (Some(7), vec![0.5; 1000]));
/// assert_eq!(outcome.taken.is_empty(), comm.rank() != 1);
/// # Ok(())
/// # }).unwrap();
/// ```
///
/// # After an error
/// The revision is the caller's variable, because it says what the buffers hold, also after an error: unchanged, or
/// `None` from the first byte written until all is proven. A rank with parts of two states is thus a newcomer when it
/// tries again, on the communicator that [`Comm::shrink`] or [`Comm::grow`] made; the chunks that it has already got
/// are not sent again. If the last rank with a whole state dies meanwhile, the state is lost. A program with memory to
/// spare synchronizes a copy, and keeps its own state until the copy is whole.
///
/// ```no_run
/// # use tinynccl::{Comm, Result, SharedState};
/// # fn align(mut comm: Comm, steps: &mut Option<u64>, weights: &mut [f32]) -> Result<Comm> {
/// let mut state = SharedState::new(steps).buffer("weights", weights);
/// while let Err(error) = state.synchronize(&comm) {
///     if comm.failure().is_none() {
///         return Err(error);
///     }
///     comm.revoke()?;
///     comm = comm.grow(8)?;
/// }
/// # Ok(comm)
/// # }
/// ```
///
/// The hash is XXH3 with 128 bits: it finds damage and differences. It is no defence against a rank that forges
/// contents, which needs none: members have proven that they know the job's secret, and could send any gradient.
#[derive(Debug)]
pub struct SharedState<'a> {
    revision: &'a mut Option<u64>,
    buffers: Vec<Buffer<'a>>,
}

/// Result of [`SharedState::synchronize`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Synchronized {
    /// Revision of the state that all ranks hold now.
    pub revision: u64,
    /// Hash of the names, types, lengths and bytes of all buffers, the same on all ranks. Each rank has computed it
    /// from its own memory.
    pub digest: u128,
    /// The buffers that changed on this rank, and the bytes of each that it took from others.
    pub taken: Vec<(String, usize)>,
    /// Bytes of buffers that this rank sent.
    pub sent: usize,
    /// Ranks that came with the same revision and another content: their memory or their arithmetic is wrong. They have
    /// the right content now.
    pub differing: Vec<usize>,
}

impl<'a> SharedState<'a> {
    /// A state without buffers. `revision` is that of this rank's buffers; `None` on a newcomer, and where they are not
    /// whole.
    pub fn new(revision: &'a mut Option<u64>) -> SharedState<'a> {
        SharedState { revision, buffers: Vec::new() }
    }

    /// Adds a buffer, which has the same type and length on all ranks. Its bits are compared and moved as they are.
    #[must_use]
    pub fn buffer<T: Element>(mut self, name: &str, data: &'a mut [T]) -> SharedState<'a> {
        self.buffers.push(Buffer::slice(name, T::DTYPE, bytemuck::cast_slice_mut(data)));
        self
    }

    /// Adds bytes whose number may differ between ranks: it becomes that of the state that wins. For what has no fixed
    /// size, in any encoding.
    #[must_use]
    pub fn vec(mut self, name: &str, bytes: &'a mut Vec<u8>) -> SharedState<'a> {
        self.buffers.push(Buffer::vec(name, bytes));
        self
    }

    /// Makes the buffers equal on all ranks, to the bit, and the revision. All ranks of `comm` must call it.
    ///
    /// Each rank reads its buffers once to hash them, and hashes what it takes as it comes. Where all are equal
    /// already, nothing moves. Needs 32 bytes of memory per chunk, one bit per chunk and rank, and some tens of bytes
    /// per message that will be sent, by any rank.
    ///
    /// # Errors
    /// - [`Error::InvalidArgument`], the same on all ranks; no buffer is changed, and the communicator stays usable.
    ///   Ranks have declared different buffers: the first difference is named with both ranks. No rank has a revision.
    ///   As many ranks have one content of the newest revision as another.
    /// - [`Error::Protocol`] names a rank that has another content after the transfer: memory or a link is damaged.
    /// - Those of the communicator's calls when a rank is lost: see [above](SharedState#after-an-error).
    pub fn synchronize(&mut self, comm: &Comm) -> Result<Synchronized> {
        declared::compare(comm, OP, "buffer", self.buffers.iter().map(Buffer::declaration))?;
        let hashes: Vec<Vec<u128>> = self.buffers.iter_mut().map(hashes).collect();
        let content = self.digest(&hashes.concat());
        let ballot = Ballot { content, revision: self.revision.unwrap_or(0), votes: self.revision.is_some().into() };
        let ballots = gather(comm, ballot)?;
        let elected = elect(&ballots).map_err(|why| Error::invalid(OP, why))?;
        let digest = ballots[elected.rank].content;
        let mut outcome = Synchronized {
            revision: elected.revision,
            digest,
            taken: Vec::new(),
            sent: 0,
            differing: elected.differing,
        };
        if ballots.iter().any(|one| one.content != digest) {
            if content != digest {
                *self.revision = None;
            }
            let table = self.transfer(comm, elected.rank, hashes, &mut outcome)?;
            self.prove(comm, elected.rank, self.digest(&table), digest)?;
        }
        *self.revision = Some(outcome.revision);
        Ok(outcome)
    }

    /// Brings the content of rank `root` to this rank, and passes it on. Returns the hashes of all chunks in this
    /// rank's memory.
    fn transfer(
        &mut self,
        comm: &Comm,
        root: usize,
        mut hashes: Vec<Vec<u128>>,
        outcome: &mut Synchronized,
    ) -> Result<Vec<u128>> {
        let mut lengths: Vec<u64> = self.buffers.iter().map(|buffer| buffer.len() as u64).collect();
        comm.broadcast_in_place(&mut lengths, root)?;
        let mut changed = vec![false; self.buffers.len()];
        for (index, (buffer, &length)) in self.buffers.iter_mut().zip(&lengths).enumerate() {
            changed[index] = buffer.resize(length as usize);
            if changed[index] {
                hashes[index] = self::hashes(buffer);
            }
        }
        let mut table = hashes.concat();
        let mut right = table.clone();
        comm.broadcast_in_place::<u64>(bytemuck::cast_slice_mut(&mut right), root)?;

        let (rank, words) = (comm.rank(), table.len().div_ceil(64));
        let mut lacking = vec![0u64; words * comm.size()];
        for chunk in (0..table.len()).filter(|&chunk| table[chunk] != right[chunk]) {
            lacking[rank * words + chunk / 64] |= 1 << (chunk % 64);
        }
        comm.all_gather_in_place(&mut lacking)?;
        let lacks = |rank: usize, chunk: usize| lacking[rank * words + chunk / 64] >> (chunk % 64) & 1 == 1;

        let mut chunks: Vec<&mut [u8]> = self.buffers.iter_mut().flat_map(Buffer::chunks).collect();
        let bytes: Vec<usize> = chunks.iter().map(|chunk| chunk.len()).collect();
        let waves = plan::waves(comm.size(), &bytes, lacks);
        for (number, wave) in waves.iter().enumerate() {
            let ours: Vec<&Transfer> = wave.iter().filter(|one| one.from == rank || one.to == rank).collect();
            if ours.is_empty() {
                continue;
            }
            log::trace!("rank {rank}: {OP}: wave {number} of {}: {} messages", waves.len(), ours.len());
            run(comm, &ours, &mut chunks)?;
            // While they are in the cache.
            for one in ours {
                if one.to == rank {
                    table[one.chunk] = hash(chunks[one.chunk]);
                } else {
                    outcome.sent += bytes[one.chunk];
                }
            }
        }
        let mut first = 0;
        for (index, buffer) in self.buffers.iter().enumerate() {
            let ours = first..first + hashes[index].len();
            first = ours.end;
            let taken = ours.filter(|&chunk| lacks(rank, chunk)).map(|chunk| bytes[chunk]).sum();
            if taken > 0 || changed[index] {
                outcome.taken.push((buffer.name.clone(), taken));
            }
        }
        Ok(table)
    }

    /// Compares what is in the memory of all ranks.
    fn prove(&self, comm: &Comm, root: usize, ours: u128, right: u128) -> Result<()> {
        let all = gather(comm, ours)?;
        match all.iter().position(|&digest| digest != right) {
            None => Ok(()),
            Some(peer) => Err(Error::Protocol {
                op: OP.to_owned(),
                rank: comm.rank(),
                peer,
                address: "its own memory".to_owned(),
                detail: format!(
                    "after the transfer its state has digest {:032x}, expected {right:032x} as on rank {root}: its \
                     memory, that of a rank that sent to it, or a link is damaged; TINYNCCL_VERIFY=all finds which",
                    all[peer]
                ),
            }),
        }
    }

    fn digest(&self, hashes: &[u128]) -> u128 {
        let mut all = Vec::new();
        for buffer in &self.buffers {
            all.extend(buffer.declaration().into_bytes());
            all.extend(buffer.len().to_le_bytes());
        }
        all.extend_from_slice(bytemuck::cast_slice(hashes));
        hash(&all)
    }
}

fn hashes(buffer: &mut Buffer<'_>) -> Vec<u128> {
    buffer.chunks().map(|chunk| hash(chunk)).collect()
}

/// Runs this rank's messages of a wave, which are in the order of their chunks, each of a chunk of its own.
fn run(comm: &Comm, ours: &[&Transfer], chunks: &mut [&mut [u8]]) -> Result<()> {
    comm.group(|group| {
        let (mut rest, mut next) = (chunks, 0);
        for &&Transfer { chunk, from, to } in ours {
            let Some((data, behind)) = rest.split_at_mut(chunk - next).1.split_first_mut() else { break };
            (rest, next) = (behind, chunk + 1);
            match from == comm.rank() {
                true => group.send(data, to)?,
                false => group.recv(data, from)?,
            }
        }
        Ok(())
    })
}

/// One value of each rank.
fn gather<T: Pod>(comm: &Comm, ours: T) -> Result<Vec<T>> {
    let mut all = vec![ours; comm.size()];
    comm.all_gather(bytemuck::bytes_of(&ours), bytemuck::cast_slice_mut(&mut all))?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_comm::on_threads;

    #[test]
    fn a_rank_with_another_content_in_the_end_is_named_by_all() {
        on_threads(3, |comm| {
            let mut revision = None;
            let state = SharedState::new(&mut revision);
            state.prove(comm, 1, 7, 7)?;
            let error = state.prove(comm, 1, if comm.rank() == 2 { 8 } else { 7 }, 7).expect_err("one differs");
            assert!(matches!(&error, Error::Protocol { peer: 2, .. }), "{error}");
            assert!(error.to_string().contains("digest 00000000000000000000000000000008, expected"), "{error}");
            Ok(())
        })
        .expect("no rank panics");
    }
}
