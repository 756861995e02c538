//! A page that steps through a schedule: no library, nothing from the network.

use std::collections::{BTreeMap, BTreeSet};
use std::f64::consts::TAU;
use std::fmt::Write;

use ::replay::look;
use tinynccl_plan::schedule::rounds::{Message, Round};

use crate::picture::{CELL, DEFS, FONT, arrow, colour, describe, rows, strip, width};
use crate::played::Played;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

pub(crate) fn page(played: &Played) -> String {
    let title = played.title();
    // A first round that only sends shows the start, too.
    let first = usize::from(played.rounds.get(1).is_some_and(|r| r.memory == played.rounds[0].memory));
    let rounds = &played.rounds[first..];
    let complete = if played.shape.collective.reduces() { ": the result is complete when all are there" } else { "" };
    let example = match played.shape.collective.reduces() {
        true => "0+3 is the sum of the parts of ranks 0 and 3",
        false => "3 is data of rank 3",
    };
    let mut out = look::head(&title, STYLE);
    let _ = writeln!(
        out,
        "<p>Each cell is a part of a rank's memory, with its number. It has one stripe for each rank whose data is in \
         it{complete}. Below a receiver stands what arrives: {example}. Arrow keys step, Home and End jump.</p>\
         <p><button id=\"back\">Back</button><button id=\"forward\">Forward</button><button id=\"play\">Play</button>\
         <label>speed <select id=\"speed\"><option>0.25<option>0.5<option selected>1<option>2</select></label>\
         <span id=\"at\" aria-live=\"polite\"></span></p>"
    );
    drawing(&mut out, played, rounds);
    out.push_str("<div class=\"logs\">");
    for round in rounds {
        out.push_str("<div class=\"log\"><ul>");
        for message in &round.sent {
            let _ = write!(out, "<li>{}</li>", describe(played, message));
        }
        if round.sent.is_empty() {
            let what =
                if round.steps.is_empty() { "Every rank has its own input." } else { "The last messages arrive." };
            let _ = write!(out, "<li>{what}</li>");
        }
        out.push_str("</ul></div>\n");
    }
    out.push_str("</div>\n");
    links(&mut out, played);
    let _ = writeln!(
        out,
        "<script>const first={first},sent={};{SCRIPT}{}</script></body></html>",
        sent(played, rounds),
        look::SCRIPT
    );
    out
}

/// Returns the position of each rank: a tree as a tree, all others in a circle or an ellipse.
fn places(played: &Played) -> Vec<(f64, f64)> {
    let ranks = played.shape.ranks;
    let (wide, high) = (width(played), rows(played) as f64 * (CELL + 4.0));
    if played.is_tree() {
        // Ranks are numbered such that children stand on both sides of their parents.
        return depths(played)
            .iter()
            .enumerate()
            .map(|(rank, depth)| (rank as f64 * (wide + 34.0), *depth as f64 * (high + 66.0)))
            .collect();
    }
    // Strips of neighbours do not touch. A circle of many long strips is too wide for a phone: an ellipse, where ranks
    // beside each other stand at different heights.
    let step = TAU / ranks as f64;
    let round = ranks as f64 * (wide + 30.0) / TAU;
    if round > 160.0 && (5..=8).contains(&ranks) {
        let (rx, ry) = ((wide * 0.6).max(110.0), (high + 52.0) / (1.0 - step.cos()));
        let at = |rank: usize| step * rank as f64 - TAU / 4.0;
        return (0..ranks).map(|rank| (rx * at(rank).cos(), ry * at(rank).sin())).collect();
    }
    let radius = (ranks as f64 * (wide + 30.0) / TAU).max(wide.max(110.0));
    let angle = |rank: usize| TAU * rank as f64 / ranks as f64 - TAU / 4.0;
    (0..ranks).map(|rank| (radius * angle(rank).cos(), radius * angle(rank).sin())).collect()
}

/// Returns the number of links from the root to each rank.
fn depths(played: &Played) -> Vec<usize> {
    let links: Vec<(usize, usize)> = played.rounds.iter().flat_map(|r| &r.sent).map(|m| (m.from, m.to)).collect();
    let mut depths: Vec<Option<usize>> = vec![None; played.shape.ranks];
    depths[played.shape.root] = Some(0);
    for depth in 0..played.shape.ranks {
        for &(from, to) in &links {
            for (near, far) in [(from, to), (to, from)] {
                if depths[near] == Some(depth) && depths[far].is_none() {
                    depths[far] = Some(depth + 1);
                }
            }
        }
    }
    depths.into_iter().map(Option::unwrap_or_default).collect()
}

/// All ranks, one group for each round.
fn drawing(out: &mut String, played: &Played, rounds: &[Round]) {
    let ranks = played.shape.ranks;
    let (wide, high) = (width(played), rows(played) as f64 * (CELL + 4.0));
    let places = places(played);
    let centre = |rank: usize| places[rank];
    let least = |of: fn(&(f64, f64)) -> f64| places.iter().map(of).fold(f64::INFINITY, f64::min);
    let most = |of: fn(&(f64, f64)) -> f64| places.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
    // Names and arrows beside the strips need some room.
    let (left, top) = (least(|p| p.0) - (wide / 2.0).max(32.0) - 8.0, least(|p| p.1) - high / 2.0 - 28.0);
    let (right, bottom) = (most(|p| p.0) + (wide / 2.0).max(32.0) + 8.0, most(|p| p.1) + high / 2.0 + 26.0);
    // Not larger than twice, and not so small that the numbers of parts cannot be read: on a phone it scrolls instead.
    let _ = write!(
        out,
        "<div class=\"scroll\"><svg viewBox=\"{left:.0} {top:.0} {:.0} {:.0}\" \
         style=\"min-width:{:.0}px;max-width:{:.0}px;margin:.6rem auto\" role=\"img\" aria-label=\"{}\">{DEFS}",
        right - left,
        bottom - top,
        0.6 * (right - left),
        2.0 * (right - left),
        played.title()
    );
    if played.is_tree() {
        let links: BTreeSet<(usize, usize)> =
            played.rounds.iter().flat_map(|r| &r.sent).map(|m| (m.from.min(m.to), m.from.max(m.to))).collect();
        for (a, b) in links {
            let ((x1, y1), (x2, y2)) = (centre(a), centre(b));
            let _ = write!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"edge\"/>");
        }
    }
    for Round { sent, memory, .. } in rounds {
        out.push_str("<g class=\"frame\">");
        for (rank, memory) in memory.iter().enumerate() {
            let (x, y) = centre(rank);
            strip(out, played, rank, memory, (x - wide / 2.0, y - high / 2.0));
        }
        for message in sent {
            let (from, to) = (centre(message.from), centre(message.to));
            let (dx, dy) = (to.0 - from.0, to.1 - from.1);
            let length = dx.hypot(dy).max(1.0);
            // Beside the straight line, so that the two directions of a pair do not cover each other; and clear of the
            // strips.
            let beside = (dy / length * 9.0, -dx / length * 9.0);
            let clear =
                0.5_f64.min((wide / 2.0 * dx.abs() / length + high / 2.0 * dy.abs() / length + 8.0) / length * 0.8);
            let point = |along: f64| (from.0 + dx * along + beside.0, from.1 + dy * along + beside.1);
            arrow(out, played, message, point(clear), point(1.0 - clear), 0.6);
        }
        for to in sent.iter().map(|m| m.to).collect::<BTreeSet<_>>() {
            let (x, y) = (centre(to).0, centre(to).1 + high / 2.0 + 8.0);
            let said = arriving(played, sent.iter().filter(|m| m.to == to));
            let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"arriving\" text-anchor=\"middle\" {FONT}>");
            // Strips of one cell stand close together.
            if wide < 60.0 {
                let _ = write!(out, "<tspan>{said}</tspan></text>");
            } else {
                let _ = write!(out, "arriving: {said}</text>");
            }
        }
        out.push_str("</g>\n");
    }
    for rank in 0..ranks {
        let (x, y) = centre(rank);
        let top = y - high / 2.0 - 8.0;
        let fill = colour(rank, ranks);
        let _ = write!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{fill}\"/>", x - 26.0, top - 4.0);
        let _ = write!(out, "<text x=\"{:.1}\" y=\"{top:.1}\" class=\"name\" {FONT}>rank {rank}</text>", x - 16.0);
    }
    out.push_str("</svg></div>\n");
}

/// The contents of the messages that arrive at one rank: the ranks whose data is in them.
fn arriving<'a>(played: &Played, messages: impl Iterator<Item = &'a Message>) -> String {
    let ranks = played.shape.ranks;
    let mut said: Vec<String> = Vec::new();
    for message in messages {
        let from: BTreeSet<usize> = message.pieces.iter().flatten().flat_map(|p| p.ranks.iter().copied()).collect();
        let whole = played.shape.collective.reduces() && from.len() == ranks;
        // Data of several ranks side by side is no sum of them.
        let sum = message.pieces.iter().flatten().any(|p| p.ranks.len() > 1);
        let names: Vec<String> = from.iter().map(usize::to_string).collect();
        said.push(if whole && sum { "the sum".to_owned() } else { names.join(if sum { "+" } else { "," }) });
    }
    said.dedup();
    said.join(", ")
}

/// Bytes of each message, as a script reads them: for each round, lists of (from, to, bytes).
fn sent(played: &Played, rounds: &[Round]) -> String {
    let round = |round: &Round| {
        let messages: Vec<String> =
            round.sent.iter().map(|m| format!("[{},{},{}]", m.from, m.to, played.bytes(m))).collect();
        format!("[{}]", messages.join(","))
    };
    format!("[{}]", rounds.iter().map(round).collect::<Vec<_>>().join(","))
}

/// Bytes that each pair of ranks exchanges: in all, until the script counts up to the round that is shown.
fn links(out: &mut String, played: &Played) {
    let ranks = played.shape.ranks;
    let mut sent: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    for message in played.rounds.iter().flat_map(|r| &r.sent) {
        *sent.entry((message.from, message.to)).or_default() += played.bytes(message);
    }
    let _ = write!(
        out,
        "<p>Bytes sent over each link up to here, for segments of {} bytes:</p><div class=\"scroll\"><table><tr>\
         <th>from \\ to</th>",
        played.size
    );
    for to in 0..ranks {
        let _ = write!(out, "<th>{to}</th>");
    }
    out.push_str("<th>in all</th></tr>");
    for from in 0..ranks {
        let _ = write!(out, "<tr><th>{from}</th>");
        for to in 0..ranks {
            match sent.get(&(from, to)) {
                Some(bytes) => {
                    let _ = write!(out, "<td data-link=\"{from}-{to}\">{bytes}</td>");
                }
                None => out.push_str("<td></td>"),
            }
        }
        let all: u64 = sent.range((from, 0)..(from, ranks)).map(|(_, bytes)| bytes).sum();
        let _ = write!(out, "<td data-link=\"{from}-all\">{all}</td></tr>");
    }
    out.push_str("</table></div>\n");
}
