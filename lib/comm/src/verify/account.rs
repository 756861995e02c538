//! Comparison of the ranks' results: what each rank has must be what the others have, or what was sent to it.

use std::ops::Range;
use std::slice;

use super::sums::{blocks, sum};
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::error::Suspect;
use tinynccl_plan::wire::Collective;

/// Most sums of one segment that are exchanged to find the place of a difference.
const PLACES: usize = 512;

/// Sums of the segments of one rank's buffers, by block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    shape: Shape,
    /// Bytes of a segment.
    bytes: usize,
    inputs: Vec<Vec<u64>>,
    outputs: Vec<Vec<u64>>,
}

/// A segment of a rank's input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its rank.
    pub rank: usize,
    /// Segment of the output, or of the input.
    pub output: bool,
    /// Its place there.
    pub index: usize,
}

/// Two segments that should be equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The one that is right, as far as can be told.
    pub right: Segment,
    /// The one that is wrong.
    pub wrong: Segment,
    /// The suspect.
    pub suspect: Suspect,
}

impl Account {
    /// `None` for a call without data, or without other ranks. Where no two ranks have the same data, the exchange of
    /// words still shows each rank that the others have found nothing.
    pub fn new(shape: Shape, bytes: usize) -> Option<Account> {
        let has_data = bytes > 0 && shape.ranks > 1 && shape.collective != Collective::SendRecv;
        has_data.then(|| Account { shape, bytes, inputs: Vec::new(), outputs: Vec::new() })
    }

    /// Adds this rank's input, before the call.
    ///
    /// # Safety
    /// The memory must hold all segments of the rank's input.
    pub(crate) unsafe fn input(&mut self, rank: usize, at: *const u8) {
        if self.moves() {
            // SAFETY: by the caller.
            self.inputs = unsafe { segments(at, self.bytes, self.shape.input_segments(rank)) };
        }
    }

    /// Adds this rank's output, after the call.
    ///
    /// # Safety
    /// The memory must hold all segments of the rank's output.
    pub(crate) unsafe fn output(&mut self, rank: usize, at: *const u8) {
        // SAFETY: by the caller.
        self.outputs = unsafe { segments(at, self.bytes, self.shape.output_segments(rank)) };
    }

    /// The first block of the output that is not what it was in [`Account::output`]: offset, bytes, expected and got.
    ///
    /// # Safety
    /// As [`Account::output`].
    pub(crate) unsafe fn reread(&self, rank: usize, at: *const u8) -> Option<(usize, usize, [u64; 2])> {
        // SAFETY: by the caller.
        let now = unsafe { segments(at, self.bytes, self.shape.output_segments(rank)) };
        self.outputs.iter().zip(&now).enumerate().find_map(|(segment, (before, now))| {
            let (block, (before, now)) = before.iter().zip(now).enumerate().find(|(_, (before, now))| before != now)?;
            let (skip, bytes) = blocks(self.bytes).nth(block)?;
            Some((segment * self.bytes + skip, bytes, [*before, *now]))
        })
    }

    /// True if data is moved as it is, so that inputs are compared, too.
    pub(crate) fn moves(&self) -> bool {
        !self.shape.collective.reduces() && !matches!(self.shape.collective, Collective::Barrier | Collective::SendRecv)
    }

    /// Segments of input and output that have a place in [`Account::words`].
    fn widths(&self) -> (usize, usize) {
        let most = |of: &dyn Fn(usize) -> usize| (0..self.shape.ranks).map(of).max().unwrap_or(0);
        let inputs = if self.moves() { most(&|rank| self.shape.input_segments(rank)) } else { 0 };
        (inputs, most(&|rank| self.shape.output_segments(rank)).max(1))
    }

    /// One sum per segment: what a rank shares with the others. Equally many on all ranks.
    pub(crate) fn words(&self) -> Vec<u64> {
        let (inputs, outputs) = self.widths();
        let fold = |list: &[Vec<u64>], i: usize| list.get(i).map_or(0, |sums| sum(bytemuck::cast_slice(sums)));
        (0..inputs).map(|i| fold(&self.inputs, i)).chain((0..outputs).map(|i| fold(&self.outputs, i))).collect()
    }

    /// The first difference in the [`Account::words`] of all ranks, which lie one after the other. `path`: how data
    /// comes from one rank to another.
    pub fn judge(&self, words: &[u64], path: &str) -> Option<Finding> {
        let (inputs, outputs) = self.widths();
        let of = |segment: Segment| {
            let index = if segment.output { inputs + segment.index } else { segment.index };
            words.get(segment.rank * (inputs + outputs) + index).copied().unwrap_or(0)
        };
        groups(&self.shape).iter().find_map(|group| group.judge(of, path))
    }

    /// Blocks that one sum of [`Account::places`] stands for.
    fn step(&self) -> usize {
        blocks(self.bytes).count().div_ceil(PLACES).max(1)
    }

    /// Sums of the parts of the right and of the wrong segment, zeros where another rank has it. Equally many on all
    /// ranks.
    pub(crate) fn places(&self, finding: &Finding, rank: usize) -> Vec<u64> {
        let part = |segment: Segment, i: usize| {
            let list = if segment.output { &self.outputs } else { &self.inputs };
            let sums = list.get(segment.index).filter(|_| segment.rank == rank)?.chunks(self.step()).nth(i)?;
            Some(sum(bytemuck::cast_slice(sums)))
        };
        let both = [finding.right, finding.wrong].into_iter();
        both.flat_map(|segment| (0..self.parts()).map(move |i| (segment, i)))
            .map(|(s, i)| part(s, i).unwrap_or(0))
            .collect()
    }

    /// Sums in the [`Account::places`] of a segment.
    fn parts(&self) -> usize {
        blocks(self.bytes).count().div_ceil(self.step())
    }

    /// Position of the first difference in the output of the wrong segment's rank, from the [`Account::places`] of all
    /// ranks: byte range, expected and got.
    pub(crate) fn place(&self, finding: &Finding, places: &[u64]) -> (Range<u64>, [u64; 2]) {
        let parts = self.parts();
        let of = |i: usize| {
            let list = |list: usize, rank: usize| places.get((2 * rank + list) * parts + i).copied().unwrap_or(0);
            [list(0, finding.right.rank), list(1, finding.wrong.rank)]
        };
        let first = (0..parts).find(|&i| of(i)[0] != of(i)[1]).unwrap_or(0);
        let step = (self.step() * super::BLOCK) as u64;
        let (start, bytes) = (first as u64 * step, self.bytes as u64);
        let base = finding.wrong.index as u64 * bytes;
        let range = base + start..base + (start + step).min(bytes);
        (range, of(first))
    }
}

/// # Safety
/// The memory must hold `count` segments of `bytes` bytes.
unsafe fn segments(at: *const u8, bytes: usize, count: usize) -> Vec<Vec<u64>> {
    let block = |segment: usize, (skip, len): (usize, usize)| {
        // SAFETY: by the caller.
        sum(unsafe { slice::from_raw_parts(at.add(segment * bytes + skip), len) })
    };
    (0..count).map(|segment| blocks(bytes).map(|b| block(segment, b)).collect()).collect()
}

/// Outputs that should be equal, and the input that they should be equal to, if it is one.
struct Group {
    source: Option<Segment>,
    outputs: Vec<Segment>,
}

fn groups(shape: &Shape) -> Vec<Group> {
    let outputs = (0..shape.ranks).flat_map(|rank| (0..shape.output_segments(rank)).map(move |index| (rank, index)));
    let mut outputs: Vec<_> = outputs
        .filter_map(|(rank, index)| {
            let (segment, sources) = shape.result(rank, index)?;
            Some(((segment, sources.start, sources.end), Segment { rank, output: true, index }))
        })
        .collect();
    outputs.sort_by_key(|(result, segment)| (*result, segment.rank, segment.index));
    let equal = outputs.chunk_by(|(one, _), (other, _)| one == other);
    equal
        .filter_map(|group| {
            let (index, rank, end) = group.first()?.0;
            let source = (end == rank + 1).then_some(Segment { rank, output: false, index });
            Some(Group { source, outputs: group.iter().map(|(_, output)| *output).collect() })
        })
        .collect()
}

impl Group {
    fn all(&self) -> impl Iterator<Item = Segment> {
        self.source.into_iter().chain(self.outputs.iter().copied())
    }

    fn judge(&self, of: impl Fn(Segment) -> u64, path: &str) -> Option<Finding> {
        let first = self.all().next()?;
        if self.all().all(|segment| of(segment) == of(first)) {
            return None;
        }
        if let Some(source) = self.source {
            let wrong = *self.outputs.iter().find(|output| of(**output) != of(source))?;
            let others = || self.outputs.iter().filter(|output| output.rank != source.rank);
            // Several ranks have the same wrong data: it was wrong when it left.
            let left_wrong = others().count() > 1 && others().all(|output| of(*output) == of(wrong));
            let suspect = match left_wrong || wrong.rank == source.rank {
                true => Suspect::Memory { rank: source.rank },
                false => Suspect::Link { from: source.rank, to: wrong.rank, path: path.to_owned() },
            };
            return Some(Finding { right: source, wrong, suspect });
        }
        let votes = |segment: Segment| self.outputs.iter().filter(|other| of(**other) == of(segment)).count();
        let right = *self.outputs.iter().max_by_key(|output| votes(**output))?;
        let wrong = *self.outputs.iter().find(|output| of(**output) != of(right))?;
        let is_majority = self.outputs.iter().all(|o| of(*o) == of(right) || votes(*o) < votes(right));
        let suspect = match is_majority {
            true => Suspect::Memory { rank: wrong.rank },
            false => Suspect::Ranks(self.outputs.iter().map(|output| output.rank).collect()),
        };
        Some(Finding { right, wrong, suspect })
    }
}

#[cfg(test)]
mod tests {
    use super::super::BLOCK;
    use super::*;

    const BYTES: usize = 2 * BLOCK + 8;

    /// Every rank's input and output after a call of `shape` that went right: segments of one byte's value.
    fn buffers(shape: &Shape) -> Vec<(Vec<u8>, Vec<u8>)> {
        let value = |rank: usize, segment: usize| (1 + 16 * rank + segment) as u8;
        let all = |segments: Vec<u8>| segments.iter().flat_map(|v| vec![*v; BYTES]).collect();
        (0..shape.ranks)
            .map(|rank| {
                let input = (0..shape.input_segments(rank)).map(|s| value(rank, s)).collect();
                let output = (0..shape.output_segments(rank)).map(|s| {
                    let (segment, sources) = shape.result(rank, s).unwrap();
                    sources.map(|r| value(r, segment)).fold(0, u8::wrapping_add)
                });
                (all(input), all(output.collect()))
            })
            .collect()
    }

    fn judge(shape: &Shape, buffers: &[(Vec<u8>, Vec<u8>)]) -> Option<(Finding, Range<u64>)> {
        let accounts: Vec<Account> = (0..shape.ranks)
            .map(|rank| {
                let mut account = Account::new(*shape, BYTES).unwrap();
                // SAFETY: as long as the shape says.
                unsafe {
                    account.input(rank, buffers[rank].0.as_ptr());
                    account.output(rank, buffers[rank].1.as_ptr());
                }
                account
            })
            .collect();
        let words: Vec<u64> = accounts.iter().flat_map(Account::words).collect();
        let finding = accounts[0].judge(&words, "shm")?;
        let places: Vec<u64> = accounts.iter().enumerate().flat_map(|(r, a)| a.places(&finding, r)).collect();
        let (range, [expected, got]) = accounts[0].place(&finding, &places);
        assert_ne!(expected, got);
        Some((finding, range))
    }

    #[test]
    fn one_flipped_bit_of_any_output_is_found_and_placed() {
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Scatter};
        for collective in [AllReduce, AllGather, Broadcast, Gather, Scatter, AllToAll] {
            for ranks in 2..=5 {
                let shape = Shape { collective, ranks, root: 1, channels: 1 };
                let right = buffers(&shape);
                assert_eq!(judge(&shape, &right), None, "{collective} of {ranks}");
                for rank in 0..ranks {
                    for segment in 0..shape.output_segments(rank) {
                        let mut wrong = right.clone();
                        wrong[rank].1[segment * BYTES + BLOCK + 9] ^= 32;
                        let (finding, range) = judge(&shape, &wrong).expect("found");
                        let at = (segment * BYTES + BLOCK) as u64;
                        let place = Segment { rank, output: true, index: segment };
                        let tie = collective == AllReduce && ranks == 2;
                        assert!(tie || finding.wrong == place, "{collective} of {ranks}: {finding:?}");
                        assert_eq!(range, at..at + BLOCK as u64, "{collective} of {ranks}: {finding:?}");
                        let source = shape.result(rank, segment).map(|(_, sources)| sources).unwrap();
                        let named = match &finding.suspect {
                            Suspect::Memory { rank: suspect } => *suspect == rank,
                            Suspect::Link { from, to, .. } => *to == rank && *from == source.start,
                            Suspect::Ranks(some) => tie && some.contains(&rank),
                        };
                        assert!(named, "{collective} of {ranks}, rank {rank}: {finding:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_source_whose_data_is_wrong_everywhere_is_named() {
        let shape = Shape { collective: Collective::AllGather, ranks: 4, root: 0, channels: 1 };
        let mut wrong = buffers(&shape);
        wrong.iter_mut().for_each(|(_, output)| output[2 * BYTES] ^= 1);
        let (finding, range) = judge(&shape, &wrong).unwrap();
        assert_eq!((finding.suspect, range.start), (Suspect::Memory { rank: 2 }, 2 * BYTES as u64));
    }

    #[test]
    fn calls_without_data_in_common_have_nothing_to_compare() {
        let of = |collective, ranks| Shape { collective, ranks, root: 0, channels: 1 };
        for collective in [Collective::Reduce, Collective::ReduceScatter, Collective::Scan] {
            let account = Account::new(of(collective, 4), 8).unwrap();
            let words: Vec<u64> = (0..4 * account.words().len() as u64).collect();
            assert_eq!((words.len(), account.judge(&words, "")), (4, None), "{collective}");
        }
        assert_eq!(Account::new(of(Collective::SendRecv, 2), 8), None);
        assert_eq!(Account::new(of(Collective::AllReduce, 1), 8), None);
        assert_eq!(Account::new(of(Collective::Barrier, 4), 0), None);
    }
}
