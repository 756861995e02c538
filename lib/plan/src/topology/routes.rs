//! Pairs of ranks that reach each other, and the relays between the others.

use std::collections::VecDeque;
use std::fmt;

/// The route between two ranks that do not reach each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// The two ends, the lower rank first.
    pub ends: [usize; 2],
    /// The ranks between, from the lower end on.
    pub through: Vec<usize>,
}

impl Path {
    /// The ranks before and after `rank` on the route, seen from the lower end; `None` for a rank that does not relay.
    pub fn around(&self, rank: usize) -> Option<(usize, usize)> {
        let at = self.through.iter().position(|&r| r == rank)?;
        let [low, high] = self.ends;
        let before = at.checked_sub(1).and_then(|i| self.through.get(i)).copied().unwrap_or(low);
        Some((before, self.through.get(at + 1).copied().unwrap_or(high)))
    }

    /// The first rank on the route from `end`.
    pub fn first(&self, end: usize) -> Option<usize> {
        if end == self.ends[0] { self.through.first().copied() } else { self.through.last().copied() }
    }

    /// The relays in words: `rank 1`, `ranks 1 and 2`.
    pub fn relays(&self) -> String {
        match &self.through[..] {
            [one] => format!("rank {one}"),
            many => {
                let names: Vec<String> = many.iter().map(usize::to_string).collect();
                format!("ranks {}", names.join(" and "))
            }
        }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [low, high] = self.ends;
        write!(f, "rank {low} ↔ rank {high}: no common subnet, through {}", self.relays())
    }
}

/// The graph of ranks that reach each other, and the routes between those that do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routes {
    /// By rank, in order; `None` if all reach each other.
    neighbours: Option<Vec<Vec<usize>>>,
}

impl Routes {
    /// Every rank reaches every other.
    pub fn direct() -> Routes {
        Routes { neighbours: None }
    }

    /// The routes of `ranks` ranks, of which `a` and `b` reach each other when `reach(a, b)` (called with `a < b`).
    pub fn new(ranks: usize, reach: impl Fn(usize, usize) -> bool) -> Routes {
        if (0..ranks).all(|a| (a + 1..ranks).all(|b| reach(a, b))) {
            return Routes::direct();
        }
        let mut neighbours = vec![Vec::new(); ranks];
        for a in 0..ranks {
            for b in (a + 1..ranks).filter(|&b| reach(a, b)) {
                for (of, other) in [(a, b), (b, a)] {
                    if let Some(list) = neighbours.get_mut(of) {
                        list.push(other);
                    }
                }
            }
        }
        Routes { neighbours: Some(neighbours) }
    }

    fn of(&self, rank: usize) -> &[usize] {
        self.neighbours.as_ref().and_then(|all| all.get(rank)).map_or(&[], |list| list)
    }

    /// Returns true if `a` and `b` reach each other.
    pub fn is_direct(&self, a: usize, b: usize) -> bool {
        self.neighbours.is_none() || self.of(a).binary_search(&b).is_ok()
    }

    /// The route between two ranks that do not reach each other: the shortest one, of equals the one with the lowest
    /// ranks, compared from the lower end on. `None` when they reach each other, and when no route exists.
    pub fn path(&self, a: usize, b: usize) -> Option<Path> {
        let (low, high) = (a.min(b), a.max(b));
        if low == high || self.is_direct(low, high) {
            return None;
        }
        self.walk(low, high, &self.distances(high))
    }

    /// All of [`Routes::path`].
    pub fn paths(&self) -> Vec<Path> {
        let ranks = self.neighbours.as_ref().map_or(0, Vec::len);
        let to = |high: usize| {
            let distances = self.distances(high);
            let far = (0..high).filter(|&low| !self.is_direct(low, high));
            far.filter_map(|low| self.walk(low, high, &distances)).collect::<Vec<_>>()
        };
        let mut all: Vec<Path> = (0..ranks).flat_map(to).collect();
        all.sort_unstable_by_key(|path| path.ends);
        all
    }

    /// Hops from each rank to `to`; `usize::MAX` without a route.
    fn distances(&self, to: usize) -> Vec<usize> {
        let mut distances = vec![usize::MAX; self.neighbours.as_ref().map_or(0, Vec::len)];
        let mut queue = VecDeque::from([(to, 0)]);
        while let Some((rank, hops)) = queue.pop_front() {
            match distances.get_mut(rank) {
                Some(known) if hops < *known => *known = hops,
                _ => continue,
            }
            queue.extend(self.of(rank).iter().map(|&next| (next, hops + 1)));
        }
        distances
    }

    /// Along falling distances to `high`, where they reach it at all.
    fn walk(&self, low: usize, high: usize, distances: &[usize]) -> Option<Path> {
        let far = |rank: usize| distances.get(rank).copied().filter(|&d| d != usize::MAX);
        let mut through = Vec::new();
        let mut left = far(low)?;
        let mut at = low;
        while left > 1 {
            left -= 1;
            at = self.of(at).iter().copied().find(|&next| far(next) == Some(left))?;
            through.push(at);
        }
        Some(Path { ends: [low, high], through })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(ranks: usize) -> Routes {
        Routes::new(ranks, |a, b| b == a + 1)
    }

    #[test]
    fn the_ends_of_a_line_go_through_the_middle() {
        let path = line(3).path(2, 0).unwrap();
        assert_eq!((path.ends, &path.through[..], path.around(1)), ([0, 2], &[1][..], Some((0, 2))));
        assert_eq!(path.to_string(), "rank 0 ↔ rank 2: no common subnet, through rank 1");
        assert_eq!((line(3).path(0, 1), line(3).path(1, 1), line(3).path(0, 7)), (None, None, None));

        let path = line(5).path(0, 4).unwrap();
        assert_eq!((path.around(1), path.around(3), path.around(0)), (Some((0, 2)), Some((2, 4)), None));
        assert_eq!((path.first(0), path.first(4)), (Some(1), Some(3)));
        assert_eq!(path.relays(), "ranks 1 and 2 and 3");
        assert_eq!(line(5).paths().len(), 6);
    }

    #[test]
    fn the_lowest_of_equals_relays() {
        // A ring of four subnets: two ways between opposite ranks.
        let ring = Routes::new(4, |a, b| b == a + 1 || (a, b) == (0, 3));
        assert_eq!(ring.path(0, 2).unwrap().through, [1]);
        assert_eq!(ring.path(1, 3).unwrap().through, [0]);
        // Two islands.
        let islands = Routes::new(4, |a, b| (a, b) == (0, 1) || (a, b) == (2, 3));
        assert_eq!((islands.path(0, 2), islands.paths()), (None, Vec::new()));
        assert_eq!(Routes::new(8, |_, _| true), Routes::direct());
        assert_eq!((Routes::direct().paths(), Routes::direct().path(0, 5)), (Vec::new(), None));
    }

    proptest! {
        #[test]
        fn ways_are_made_of_neighbours_and_none_is_shorter(ranks in 1usize..8, edges in any::<u64>()) {
            let reach = |a: usize, b: usize| edges >> (a * 8 + b) & 1 == 1;
            let routes = Routes::new(ranks, reach);
            let mut found = Vec::new();
            for a in 0..ranks {
                for b in a + 1..ranks {
                    let path = routes.path(b, a);
                    prop_assert_eq!(&path, &routes.path(a, b));
                    // Hops by brute force: all walks of that length.
                    let mut near = vec![a];
                    let mut hops = 0;
                    while !near.contains(&b) && hops < ranks {
                        near = (0..ranks).filter(|&r| near.iter().any(|&n| routes.is_direct(n, r))).collect();
                        hops += 1;
                    }
                    match &path {
                        None => prop_assert!(hops == 1 || !near.contains(&b)),
                        Some(path) => {
                            prop_assert_eq!(path.through.len() + 1, hops);
                            let all: Vec<usize> = [&[a][..], &path.through, &[b]].concat();
                            prop_assert!(all.windows(2).all(|w| reach(w[0].min(w[1]), w[0].max(w[1]))));
                        }
                    }
                    found.extend(path);
                }
            }
            prop_assert_eq!(found, routes.paths());
        }
    }
}
