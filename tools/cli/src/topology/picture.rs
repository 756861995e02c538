//! The graph as a picture: networks above, below them ports, hosts, switches, GPUs; a line for each link.

use std::fmt::Write as _;

use tinynccl_plan::simulate::machine::description::{Description, Node};

use super::gb_s;
use crate::picture::{FONT, colour};

/// Rows from the top, by the kinds of their nodes.
const ROWS: [&[&str]; 6] = [&["network"], &["port"], &["host", "numa"], &["pcie"], &["gpu"], &["nvswitch"]];
const HOSTS: usize = 2;
/// A node's box, the room between boxes, and a row.
const BOX: (f64, f64) = (118.0, 38.0);
const BETWEEN: f64 = 22.0;
const ROW: f64 = 120.0;
const TOP: f64 = 50.0;
/// Most links that have words beside them; more are only told by the pointer.
const WORDS: usize = 40;
/// Letters that a box has room for.
const LETTERS: usize = 19;

pub(super) fn page(description: &Description) -> String {
    let places = places(description);
    let right = places.iter().map(|at| at.0).fold(0.0, f64::max) + BOX.0 / 2.0 + BETWEEN;
    let bottom = places.iter().map(|at| at.1).fold(0.0, f64::max) + BOX.1 + ROW / 2.0;
    let title = escaped(if description.name.is_empty() { "topology" } else { &description.name });
    let right = right.max(40.0 + 7.0 * title.chars().count() as f64);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {right:.0} {bottom:.0}\" width=\"{right:.0}\" \
         height=\"{bottom:.0}\" role=\"img\"><title>{title}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"8\" y=\"20\" {FONT} font-weight=\"bold\">{title}</text>"
    );
    let place = |name: &str| description.node.iter().position(|node| node.name == name).map(|at| places[at]);
    for link in &description.link {
        let (Some(a), Some(b)) = (place(&link.between[0]), place(&link.between[1])) else { continue };
        let words = format!("{}, {}", gb_s(link.bandwidth_gb_s), link.kind.as_deref().unwrap_or("link"));
        line(&mut out, a, b, link.bandwidth_gb_s, &words, description.link.len() <= WORDS);
    }
    let mut first = 0;
    for (node, at) in description.node.iter().zip(&places) {
        block(&mut out, node, first, *at);
        first += node.ranks;
    }
    out.push_str("</svg>\n");
    out
}

/// Centres of the nodes.
fn places(description: &Description) -> Vec<(f64, f64)> {
    let nodes = &description.node;
    let row = |node: &Node| {
        let of_kind = |kind: &str| ROWS.iter().position(|kinds| kinds.contains(&kind));
        let other = if node.ranks > 0 { HOSTS } else { 0 };
        node.kind.as_deref().and_then(of_kind).unwrap_or(other)
    };
    let mut rows: Vec<Vec<usize>> = vec![Vec::new(); ROWS.len()];
    nodes.iter().enumerate().for_each(|(at, node)| rows[row(node)].push(at));
    let widest = rows.iter().map(Vec::len).max().unwrap_or(1).max(1) as f64;
    let mut x: Vec<Option<f64>> = vec![None; nodes.len()];
    // From the hosts outwards: a node stands near those that it is joined with.
    let mut order: Vec<usize> = (0..ROWS.len()).collect();
    order.sort_by_key(|row| (row.abs_diff(HOSTS), *row));
    let mut y = vec![0.0; nodes.len()];
    let used: Vec<usize> = (0..ROWS.len()).filter(|&row| !rows[row].is_empty()).collect();
    for number in order {
        let mut row = rows[number].clone();
        let wish = |at: usize| {
            let name = &nodes[at].name;
            let ends = description.link.iter().filter(|link| link.between.contains(name));
            let others = ends.filter_map(|link| link.between.iter().find(|other| *other != name));
            let known: Vec<f64> = others
                .filter_map(|other| nodes.iter().position(|node| node.name == *other).and_then(|other| x[other]))
                .collect();
            if known.is_empty() { f64::MAX } else { known.iter().sum::<f64>() / known.len() as f64 }
        };
        row.sort_by(|&a, &b| wish(a).total_cmp(&wish(b)).then(a.cmp(&b)));
        let step = widest * (BOX.0 + BETWEEN) / row.len().max(1) as f64;
        let level = used.iter().position(|&row| row == number).unwrap_or(0) as f64;
        for (place, at) in row.into_iter().enumerate() {
            x[at] = Some(BETWEEN + step * (place as f64 + 0.5));
            y[at] = TOP + BOX.1 / 2.0 + level * ROW;
        }
    }
    x.into_iter().zip(y).map(|(x, y)| (x.unwrap_or(0.0), y)).collect()
}

/// A link; the wider, the more it carries. In a row it is a curve below the boxes.
fn line(out: &mut String, a: (f64, f64), b: (f64, f64), rate: f64, words: &str, labelled: bool) {
    let width = (1.5 + (rate.max(1e-3) + 1.0).log2() * 0.5).min(6.0);
    let in_row = a.1 == b.1;
    let sag = if in_row { BOX.1 / 2.0 + 14.0 + 0.12 * (a.0 - b.0).abs() } else { 0.0 };
    let sag = sag.min(ROW - BOX.1);
    let middle = ((a.0 + b.0) / 2.0, (a.1 + b.1) / 2.0 + sag);
    let _ = write!(
        out,
        "<path d=\"M{:.1},{:.1} Q{:.1},{:.1} {:.1},{:.1}\" fill=\"none\" stroke=\"#777\" stroke-width=\"{width:.1}\">\
         <title>{}</title></path>",
        a.0,
        a.1,
        middle.0,
        middle.1 + sag,
        b.0,
        b.1,
        escaped(words)
    );
    if labelled {
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" {FONT} stroke=\"#fff\" stroke-width=\"3\" \
             paint-order=\"stroke\">{}</text>",
            middle.0,
            middle.1 + if in_row { 4.0 } else { 0.0 },
            escaped(words.split(',').next().unwrap_or_default())
        );
    }
}

/// A node's box, with its ranks.
fn block(out: &mut String, node: &Node, first: usize, (x, y): (f64, f64)) {
    let kind = node.kind.as_deref().unwrap_or(if node.ranks > 0 { "host" } else { "switch" });
    let row = ROWS.iter().position(|kinds| kinds.contains(&kind)).unwrap_or(0);
    let stroke = colour(row, ROWS.len());
    let note = node.note.as_deref().map_or(String::new(), |note| format!(": {note}"));
    let words = escaped(&format!("{} ({kind}){note}", node.name));
    let _ = write!(
        out,
        "<g><title>{words}</title><rect x=\"{:.1}\" y=\"{:.1}\" width=\"{}\" height=\"{}\" rx=\"5\" fill=\"#fff\" \
         stroke=\"{stroke}\" stroke-width=\"{}\"/>",
        x - BOX.0 / 2.0,
        y - BOX.1 / 2.0,
        BOX.0,
        BOX.1,
        if node.ranks > 0 { 3 } else { 1 }
    );
    // The end of a long name tells it from its neighbours'.
    let letters: Vec<char> = node.name.chars().collect();
    let name: String = letters[letters.len().saturating_sub(LETTERS)..].iter().collect();
    let below = match super::text::ranks(node, first) {
        Some(ranks) => ranks,
        None => kind.to_owned(),
    };
    for (text, y, weight) in [(name, y - 3.0, "bold"), (below, y + 12.0, "normal")] {
        let _ = write!(
            out,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" {FONT} font-weight=\"{weight}\">{}</text>",
            escaped(&text)
        );
    }
    out.push_str("</g>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
