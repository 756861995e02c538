//! The graph as text: a tree for what hangs from one thing, a list of the other links, and a table from node to node.

use std::fmt::Write as _;

use tinynccl_plan::simulate::machine::description::{Description, Duplex, Link, Node};
use tinynccl_plan::simulate::machine::{Graph, Machine as _};

use super::{digits, gb_s};

/// Nodes with ranks that a table has at most.
const WIDEST: usize = 16;
/// Kinds of nodes that hang from others.
const HANGING: [&str; 3] = ["pcie", "gpu", "port"];

pub(super) fn drawing(description: &Description, graph: &Graph, remark: Option<&str>) -> String {
    let tree = Tree::new(description);
    let mut out = String::new();
    let plural = |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    let name = graph.name();
    let sizes =
        [plural(graph.ranks(), "rank"), plural(description.node.len(), "node"), plural(description.link.len(), "link")];
    let _ = writeln!(out, "{name}: {}\n", sizes.join(", "));
    for root in 0..description.node.len() {
        if tree.parent[root].is_none() {
            tree.write(&mut out, root, "");
        }
    }
    let others: Vec<&Link> =
        description.link.iter().enumerate().filter(|(at, _)| !tree.used[*at]).map(|(_, l)| l).collect();
    if !others.is_empty() {
        out.push_str("\nlinks\n");
        let width = others.iter().map(|link| ends(link).chars().count()).max().unwrap_or(0);
        for link in others {
            let _ = writeln!(out, "  {:<width$}  {}", ends(link), words(link));
        }
    }
    for shared in &description.shared {
        let _ = writeln!(out, "  shared {}: {}", shared.name, gb_s(shared.bandwidth_gb_s));
    }
    table(&mut out, description, graph);
    if let Some(remark) = remark {
        let _ = writeln!(out, "\n{remark}");
    }
    out
}

fn ends(link: &Link) -> String {
    link.between.join(" - ")
}

fn words(link: &Link) -> String {
    let mut words = vec![gb_s(link.bandwidth_gb_s)];
    if link.latency_us > 0.0 {
        words.push(format!("{} us", digits(link.latency_us)));
    }
    words.extend(link.kind.clone());
    if link.duplex == Duplex::Half {
        words.push("half duplex".to_owned());
    }
    words.extend(link.shared.as_ref().map(|shared| format!("shares {shared}")));
    words.join(", ")
}

/// Tree of the nodes.
struct Tree<'a> {
    description: &'a Description,
    /// Per node: the node that it hangs from, and the link.
    parent: Vec<Option<(usize, usize)>>,
    /// Links that are part of the tree.
    used: Vec<bool>,
}

impl Tree<'_> {
    fn new(description: &Description) -> Tree<'_> {
        let nodes = &description.node;
        let hangs = |at: usize| nodes[at].kind.as_deref().is_some_and(|kind| HANGING.contains(&kind));
        let place = |name: &String| nodes.iter().position(|node| node.name == *name);
        let ends: Vec<Option<[usize; 2]>> =
            description.link.iter().map(|link| Some([place(&link.between[0])?, place(&link.between[1])?])).collect();
        let mut tree = Tree { description, parent: vec![None; nodes.len()], used: vec![false; ends.len()] };
        // From the hosts on, level by level; a network is no host.
        let is_root = |at: &usize| !hangs(*at) && matches!(nodes[*at].kind.as_deref(), Some("host" | "numa"));
        let mut reached: Vec<usize> = (0..nodes.len()).filter(is_root).collect();
        let mut next = 0;
        while let Some(&from) = reached.get(next) {
            next += 1;
            for (link, ends) in ends.iter().enumerate() {
                let Some(&to) =
                    ends.as_ref().filter(|ends| ends.contains(&from)).and_then(|e| e.iter().find(|&&e| e != from))
                else {
                    continue;
                };
                // By the links of its own machine: the peers of a GPU's NVLinks do not hang from it.
                let own = description.link[link].kind.as_deref() != Some("nvlink");
                if own && hangs(to) && !reached.contains(&to) {
                    reached.push(to);
                    tree.parent[to] = Some((from, link));
                    tree.used[link] = true;
                }
            }
        }
        tree
    }

    /// A node, and what hangs from it, behind `indent`.
    fn write(&self, out: &mut String, at: usize, indent: &str) {
        let _ = writeln!(out, "{}", self.node(at));
        let below: Vec<usize> =
            (0..self.parent.len()).filter(|&node| self.parent[node].is_some_and(|(from, _)| from == at)).collect();
        for (number, &node) in below.iter().enumerate() {
            let last = number + 1 == below.len();
            let (branch, more) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            let _ = write!(out, "{indent}{branch}");
            self.write(out, node, &format!("{indent}{more}"));
        }
    }

    fn node(&self, at: usize) -> String {
        let node = &self.description.node[at];
        let mut name = node.name.as_str();
        let mut words: Vec<String> = node.kind.iter().chain(&node.note).cloned().collect();
        if let Some((from, link)) = self.parent[at] {
            // Its own name, without that of what it hangs from, or of the host of that.
            let above = &self.description.node[from].name;
            let host = above.split_once('/').map_or(above.as_str(), |(host, _)| host);
            name = name.strip_prefix(host).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name);
            words.push(gb_s(self.description.link[link].bandwidth_gb_s));
        }
        words.extend(ranks(node, self.first(at)));
        if let Some(inside) = node.inside {
            words.push(format!("inside {}, {} us", gb_s(inside.bandwidth_gb_s), digits(inside.latency_us)));
        }
        if words.is_empty() { name.to_owned() } else { format!("{name}: {}", words.join(", ")) }
    }

    /// The number of the first rank of a node, where these go by the nodes' order.
    fn first(&self, at: usize) -> usize {
        self.description.node[..at].iter().map(|node| node.ranks).sum()
    }
}

/// `rank 3`, `ranks 0-2, 7`.
pub(super) fn ranks(node: &Node, first: usize) -> Option<String> {
    let mut numbers: Vec<usize> = match node.numbers.is_empty() {
        true => (first..first + node.ranks).collect(),
        false => node.numbers.clone(),
    };
    numbers.sort_unstable();
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        many => format!("{}-{}", many[0], many[many.len() - 1]),
    });
    let text = runs.collect::<Vec<_>>().join(", ");
    match numbers.len() {
        0 => None,
        1 => Some(format!("rank {text}")),
        _ => Some(format!("ranks {text}")),
    }
}

/// From each node with ranks to each: bandwidth of the narrowest link of the way, and latency.
fn table(out: &mut String, description: &Description, graph: &Graph) {
    let mut rows: Vec<(&str, usize, bool)> = Vec::new();
    let mut next = 0;
    for node in description.node.iter().filter(|node| node.ranks > 0) {
        let rank = node.numbers.iter().copied().min().unwrap_or(next);
        rows.push((&node.name, rank, node.inside.is_some()));
        next += node.ranks;
    }
    if rows.len() < 2 || rows.len() > WIDEST {
        return;
    }
    let cell = |a: usize, b: usize| {
        let mut way = Vec::new();
        let latency = graph.route(a, b, &mut way);
        let narrowest = way.iter().map(|&link| graph.bandwidth(link)).fold(f64::INFINITY, f64::min);
        format!("{} / {}", digits(narrowest / 1e9), digits(latency * 1e6))
    };
    let text: Vec<Vec<String>> = (rows.iter())
        .map(|&(from, a, inside)| {
            let cells = rows.iter().map(|&(to, b, _)| match from == to {
                true if inside => cell(a, a),
                true => "-".to_owned(),
                false => cell(a, b),
            });
            cells.collect()
        })
        .collect();
    let first = rows.iter().map(|(name, ..)| name.chars().count()).max().unwrap_or(0);
    let width = text.iter().flatten().map(String::len).chain(rows.iter().map(|(name, ..)| name.chars().count())).max();
    let width = width.unwrap_or(0);
    let _ = write!(out, "\nGB/s of the narrowest link / us on the way\n  {:first$}", "");
    for (name, ..) in &rows {
        let _ = write!(out, "  {name:>width$}");
    }
    for ((name, ..), cells) in rows.iter().zip(text) {
        let _ = write!(out, "\n  {name:<first$}");
        for cell in cells {
            let _ = write!(out, "  {cell:>width$}");
        }
    }
    out.push('\n');
}
