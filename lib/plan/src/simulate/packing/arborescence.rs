//! The cheapest tree from a root to all others in a directed graph (Y. J. Chu and T. H. Liu, 1965; J. Edmonds, 1967).

/// A square table of the costs of edges, by where they begin and end.
#[derive(Debug, Clone)]
pub(super) struct Costs {
    vertices: usize,
    table: Vec<f64>,
}

impl Costs {
    pub(super) fn new(vertices: usize, cost: impl Fn(usize, usize) -> f64) -> Costs {
        let table = (0..vertices * vertices).map(|at| cost(at / vertices, at % vertices)).collect();
        Costs { vertices, table }
    }

    fn of(&self, from: usize, to: usize) -> f64 {
        self.table[from * self.vertices + to]
    }
}

/// Parent of each vertex in the cheapest tree from `root`, which is its own.
pub(super) fn cheapest(costs: &Costs, root: usize) -> Vec<usize> {
    let all = 0..costs.vertices;
    let nearest = |to: usize| {
        let from = all.clone().filter(|&from| from != to);
        from.min_by(|&a, &b| costs.of(a, to).total_cmp(&costs.of(b, to))).unwrap_or(root)
    };
    let parents: Vec<usize> = all.clone().map(|to| if to == root { root } else { nearest(to) }).collect();
    let Some(cycle) = cycle(&parents, root) else { return parents };
    // The cycle becomes one vertex, the last of a smaller graph.
    let inside = |vertex: usize| cycle.contains(&vertex);
    let outside: Vec<usize> = all.filter(|&vertex| !inside(vertex)).collect();
    let one = outside.len();
    let least = |edges: &mut dyn Iterator<Item = (usize, f64)>| edges.min_by(|a, b| a.1.total_cmp(&b.1));
    // Entering the cycle at a vertex replaces the edge that leads to it inside.
    let enter = |from: usize| {
        least(&mut cycle.iter().map(|&to| (to, costs.of(from, to) - costs.of(parents[to], to)))).unwrap_or((root, 0.0))
    };
    let leave = |to: usize| least(&mut cycle.iter().map(|&from| (from, costs.of(from, to)))).unwrap_or((root, 0.0));
    let smaller = Costs::new(one + 1, |from, to| match (outside.get(from), outside.get(to)) {
        (Some(&from), Some(&to)) => costs.of(from, to),
        (Some(&from), None) => enter(from).1,
        (None, Some(&to)) => leave(to).1,
        (None, None) => f64::INFINITY,
    });
    let root_there = outside.iter().position(|&vertex| vertex == root).unwrap_or(one);
    let found = cheapest(&smaller, root_there);
    let mut result = parents.clone();
    for (at, &vertex) in outside.iter().enumerate().filter(|(_, vertex)| **vertex != root) {
        result[vertex] = outside.get(found[at]).copied().unwrap_or_else(|| leave(vertex).0);
    }
    if let Some(&from) = outside.get(found[one]) {
        result[enter(from).0] = from;
    }
    result
}

/// Vertices of a cycle of `parents`.
fn cycle(parents: &[usize], root: usize) -> Option<Vec<usize>> {
    // Number of the walk in which a vertex was seen.
    let mut seen = vec![usize::MAX; parents.len()];
    seen[root] = parents.len();
    for start in 0..parents.len() {
        let mut at = start;
        while seen[at] == usize::MAX {
            seen[at] = start;
            at = parents[at];
        }
        if seen[at] == start {
            let rest = std::iter::successors(Some(parents[at]), |&next| Some(parents[next]));
            return Some(std::iter::once(at).chain(rest.take_while(|&next| next != at)).collect());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(costs: &Costs, parents: &[usize], root: usize) -> f64 {
        (0..parents.len()).filter(|&to| to != root).map(|to| costs.of(parents[to], to)).sum()
    }

    /// Every choice of parents that is a tree.
    fn least_of_all(costs: &Costs, root: usize) -> f64 {
        let n = costs.vertices;
        let choices = (n as u32).pow(n as u32);
        let parents = (0..choices).map(|choice| {
            let parent = |vertex: u32| (choice / (n as u32).pow(vertex)) as usize % n;
            (0..n as u32).map(parent).collect::<Vec<_>>()
        });
        let trees = parents.filter(|p| p[root] == root && (0..n).all(|v| v == root || p[v] != v));
        trees.filter(|p| cycle(p, root).is_none()).map(|p| cost(costs, &p, root)).fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn no_tree_is_cheaper(table in proptest::collection::vec(0u32..20, 25), root in 0usize..5) {
            let costs = Costs::new(5, |from, to| f64::from(table[from * 5 + to]));
            let found = cheapest(&costs, root);
            prop_assert!(found[root] == root && cycle(&found, root).is_none(), "{:?}", found);
            prop_assert_eq!(cost(&costs, &found, root), least_of_all(&costs, root));
        }
    }
}
