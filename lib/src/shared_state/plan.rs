//! Assignment of the chunks that ranks lack to the ranks that send them.
//!
//! Each chunk flows along a chain: a rank that has it, then the ranks that lack it, one after the other. So no rank
//! sends a chunk more than once, and newcomers help each other. Of the ranks that have a chunk the one that has sent
//! least so far begins its chain; of those that lack it the one that has sent most is the last, which sends nothing.
//!
//! The messages are put into *waves*, each of which a rank runs as one group. A rank passes on what has come in an
//! earlier wave. Waves bound the calls of a group, and they cannot deadlock: the messages of a wave wait for those of
//! earlier waves alone.

use super::CHUNK;

/// Most bytes that a rank sends in a wave, and most that it receives. Longer waves cost fewer waits, shorter ones let a
/// chunk begin the next hop of its chain earlier.
const WAVE: usize = 8 * CHUNK;
/// Least price of a chunk, in bytes: it bounds the messages of a wave.
const LEAST: usize = CHUNK / 16;

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) chunk: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Bytes of a rank in one direction, by wave.
#[derive(Debug, Clone, Default)]
struct Tally {
    waves: Vec<usize>,
    /// Waves before this one have no room.
    open: usize,
}

impl Tally {
    fn has_room(&self, wave: usize, price: usize) -> bool {
        self.waves.get(wave).is_none_or(|used| used + price <= WAVE)
    }

    fn add(&mut self, wave: usize, price: usize) {
        if self.waves.len() <= wave {
            self.waves.resize(wave + 1, 0);
        }
        self.waves[wave] += price;
        while self.waves.get(self.open).is_some_and(|used| used + LEAST > WAVE) {
            self.open += 1;
        }
    }
}

/// The messages that bring every chunk to all of `ranks` ranks, by wave, those of a wave in the order of their chunks.
/// `bytes` has the length of each chunk, `lacks` says if a rank lacks one; at least one rank has it.
///
/// Depends on its arguments alone, so every rank computes the same.
pub(super) fn waves(ranks: usize, bytes: &[usize], lacks: impl Fn(usize, usize) -> bool) -> Vec<Vec<Transfer>> {
    let mut waves: Vec<Vec<Transfer>> = Vec::new();
    let mut load = vec![0; ranks];
    let (mut sent, mut received) = (vec![Tally::default(); ranks], vec![Tally::default(); ranks]);
    for (chunk, bytes) in bytes.iter().enumerate() {
        let price = LEAST.max(*bytes);
        let (mut chain, holders): (Vec<usize>, Vec<usize>) = (0..ranks).partition(|&rank| lacks(rank, chunk));
        chain.sort_by_key(|&rank| load[rank]);
        chain.splice(..0, holders.into_iter().min_by_key(|&rank| load[rank]));
        let mut earliest = 0;
        for pair in chain.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let mut wave = earliest.max(sent[from].open).max(received[to].open);
            while !sent[from].has_room(wave, price) || !received[to].has_room(wave, price) {
                wave += 1;
            }
            if waves.len() <= wave {
                waves.resize(wave + 1, Vec::new());
            }
            waves[wave].push(Transfer { chunk, from, to });
            sent[from].add(wave, price);
            received[to].add(wave, price);
            load[from] += price;
            earliest = wave + 1;
        }
    }
    waves
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs the plan, and checks all that a rank relies on. Gives the bytes that each rank sends, at their price.
    fn check(ranks: usize, bytes: &[usize], lacks: impl Fn(usize, usize) -> bool) -> Vec<usize> {
        let mut has: Vec<Vec<bool>> =
            (0..ranks).map(|rank| (0..bytes.len()).map(|chunk| !lacks(rank, chunk)).collect()).collect();
        let mut load = vec![0; ranks];
        for wave in waves(ranks, bytes, lacks) {
            assert!(!wave.is_empty());
            assert!(wave.is_sorted_by_key(|one| one.chunk));
            let before = has.clone();
            let mut used = vec![[0; 2]; ranks];
            for Transfer { chunk, from, to } in wave {
                assert!(before[from][chunk], "rank {from} does not have chunk {chunk} yet");
                assert!(!std::mem::replace(&mut has[to][chunk], true), "chunk {chunk} comes to rank {to} again");
                let price = bytes[chunk].max(LEAST);
                used[from][0] += price;
                used[to][1] += price;
                load[from] += price;
            }
            assert!(used.as_flattened().iter().all(|&used| used <= WAVE), "{used:?}");
        }
        assert!(has.iter().flatten().all(|&has| has), "a chunk does not come");
        load
    }

    fn spread(load: &[usize]) -> usize {
        load.iter().max().unwrap_or(&0) - load.iter().min().unwrap_or(&0)
    }

    proptest! {
        #[test]
        fn every_chunk_comes_once_from_a_rank_that_has_it(
            ranks in 1..10usize,
            chunks in prop::collection::vec((1..=CHUNK, any::<u16>(), any::<prop::sample::Index>()), 0..150),
        ) {
            let bytes: Vec<usize> = chunks.iter().map(|(bytes, ..)| *bytes).collect();
            let lacks = |rank: usize, chunk: usize| {
                let (_, ranks_that_lack_it, holder) = chunks[chunk];
                ranks_that_lack_it >> rank & 1 == 1 && holder.index(ranks) != rank
            };
            check(ranks, &bytes, lacks);
        }

        #[test]
        fn holders_and_newcomers_share_the_load_within_one_chunk(
            holders in 1..6usize,
            newcomers in 0..6usize,
            bytes in prop::collection::vec(prop_oneof![1..=CHUNK, Just(CHUNK)], 0..150),
        ) {
            let load = check(holders + newcomers, &bytes, |rank, _| rank >= holders);
            prop_assert!(spread(&load[..holders]) <= CHUNK, "{:?}", load);
            prop_assert!(spread(&load[holders..]) <= CHUNK, "{:?}", load);
        }

        #[test]
        fn waves_are_full(holders in 1..6usize, newcomers in 1..6usize, chunks in 1..500usize) {
            let waves = waves(holders + newcomers, &vec![CHUNK; chunks], |rank, _| rank >= holders);
            prop_assert!(waves.len() < (chunks * CHUNK).div_ceil(WAVE) + 2 * newcomers, "{}", waves.len());
        }
    }

    #[test]
    fn nothing_is_sent_where_nothing_is_lacking() {
        assert_eq!(waves(3, &[CHUNK; 5], |_, _| false), [[]; 0]);
        assert_eq!(waves(0, &[], |_, _| true), [[]; 0]);
    }

    #[test]
    fn a_chunk_passes_through_the_ranks_that_lack_it() {
        let hop = |chunk, from, to| Transfer { chunk, from, to };
        let expected =
            [vec![hop(0, 0, 1), hop(1, 0, 3)], vec![hop(0, 1, 2), hop(1, 3, 1)], vec![hop(0, 2, 3), hop(1, 1, 2)]];
        assert_eq!(waves(4, &[CHUNK; 2], |rank, _| rank > 0), expected);
    }
}
