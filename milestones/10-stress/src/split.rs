//! Groups of ranks that run at the same time.

use std::str::FromStr;

/// Division of ranks into groups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Split {
    /// By their number modulo this.
    Modulo(u32),
    /// One group of the ranks that are named, and one of the others.
    Apart(Vec<u32>),
}

impl FromStr for Split {
    type Err = String;

    fn from_str(text: &str) -> Result<Split, String> {
        let number = |word: &str| {
            word.parse()
                .map_err(|_| format!("expected a number of groups, or ranks with commas between them, got {word:?}"))
        };
        match text.split(',').map(number).collect::<Result<Vec<u32>, String>>()?.as_slice() {
            [0] => Err("expected one group or more, got 0".to_owned()),
            [parts] => Ok(Split::Modulo(*parts)),
            ranks => Ok(Split::Apart(ranks.to_vec())),
        }
    }
}

impl Split {
    /// The group of a rank.
    pub(crate) fn colour(&self, rank: u32) -> u32 {
        match self {
            Split::Modulo(parts) => rank % parts,
            Split::Apart(ranks) => u32::from(ranks.contains(&rank)),
        }
    }

    /// Ranks of the largest group of `ranks`.
    pub(crate) fn largest(&self, ranks: usize) -> usize {
        let mut sizes = vec![0; ranks.max(2)];
        for rank in 0..ranks {
            sizes[self.colour(rank as u32) as usize] += 1;
        }
        sizes.into_iter().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_divided_by_number_or_by_name() {
        let split = |text: &str| text.parse::<Split>();
        let colours = |text: &str| (0..5).map(|rank| split(text).unwrap().colour(rank)).collect::<Vec<_>>();
        assert_eq!(colours("2"), [0, 1, 0, 1, 0]);
        assert_eq!(colours("1,3"), [0, 1, 0, 1, 0]);
        assert_eq!(colours("4,0"), [1, 0, 0, 0, 1]);
        assert_eq!(["2", "9", "1,3", "0,1,2,3"].map(|text| split(text).unwrap().largest(5)), [3, 1, 3, 4]);
        for (text, word) in [("0", "got 0"), ("", "\"\""), ("1,b", "\"b\""), ("-1", "\"-1\"")] {
            assert!(split(text).unwrap_err().contains(word), "{text}");
        }
    }
}
