//! Common parts of the pictures: a rank's memory as a strip of cells, a cell as a stack of contributions.

use std::fmt::Write;

use tinynccl_plan::schedule::rounds::{Memory, Message, Piece};

use crate::played::Played;

/// Side of a cell.
pub(crate) const CELL: f64 = 22.0;
/// Between segments of a strip.
const GAP: f64 = 4.0;
/// Font attributes of the words beside strips.
pub(crate) const FONT: &str = "font-family=\"sans-serif\" font-size=\"11\" fill=\"#222\"";

/// A rank's colour: hues spread evenly, each as light as it must be to stand out from white and from a dark page, also
/// inverted, as the book shows pictures in its dark themes.
pub(crate) fn colour(rank: usize, ranks: usize) -> String {
    let hue = 360.0 * rank as f64 / ranks as f64;
    // Neighbours differ in lightness too, for those who see hues alike.
    let wanted = if rank.is_multiple_of(2) { 0.14 } else { 0.28 };
    let lightness = (0..100).find(|&percent| luminance(rgb(hue, f64::from(percent) / 100.0)) >= wanted).unwrap_or(50);
    format!("hsl({hue:.0},70%,{lightness}%)")
}

/// Red, green and blue of a hue in degrees, as CSS computes them; its saturation is 70 %.
fn rgb(hue: f64, lightness: f64) -> [f64; 3] {
    [0.0, 8.0, 4.0].map(|offset| {
        let k = (offset + hue / 30.0) % 12.0;
        lightness - 0.7 * lightness.min(1.0 - lightness) * (k - 3.0).min(9.0 - k).clamp(-1.0, 1.0)
    })
}

/// Returns the relative luminance of a colour, from 0 to 1, by WCAG's definition.
fn luminance(rgb: [f64; 3]) -> f64 {
    let linear = rgb.map(|part| if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) });
    0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
}

/// A cell: its number, and beside it one line of colour for each rank whose input is in it; none where nothing is yet.
fn cell(out: &mut String, (x, y): (f64, f64), size: f64, number: usize, piece: Option<&Piece>, ranks: usize) {
    let _ = write!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{size:.1}\" height=\"{size:.1}\" fill=\"#fff\" stroke=\"#888\"/>"
    );
    let height = (size - 2.0) / ranks as f64;
    for &rank in piece.iter().flat_map(|piece| &piece.ranks) {
        let (top, width, fill) = (y + 1.0 + height * rank as f64, size * 0.45 - 1.0, colour(rank, ranks));
        let _ = write!(
            out,
            "<rect x=\"{:.1}\" y=\"{top:.2}\" width=\"{width:.1}\" height=\"{height:.2}\" fill=\"{fill}\"/>",
            x + size * 0.55
        );
    }
    // On the cell's own ground: no line of colour runs through it.
    let _ = write!(
        out,
        "<text class=\"part\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-family=\"sans-serif\" font-size=\"{:.0}\" \
         fill=\"#222\">{number}</text>",
        x + size * 0.28,
        y + size * 0.5 + size * 0.19,
        size * 0.52
    );
}

/// The number of the part at index `at` of a buffer; where a segment is one part, that of the segment.
fn number(played: &Played, at: usize) -> usize {
    if played.parts == 1 { at } else { at % played.parts }
}

/// Returns true if the input is shown beside the output: they cannot be the same memory.
fn shows_input(played: &Played) -> bool {
    played.shape.in_place(played.shape.root).is_none()
}

/// Rows of a strip.
pub(crate) fn rows(played: &Played) -> usize {
    1 + usize::from(shows_input(played))
}

/// Width of a strip.
pub(crate) fn width(played: &Played) -> f64 {
    let segments = (0..played.shape.ranks)
        .map(|r| played.shape.output_segments(r).max(played.shape.input_segments(r)))
        .max()
        .unwrap_or(1);
    (segments * played.parts) as f64 * CELL + (segments - 1) as f64 * GAP
}

/// A rank's memory: its output, where its own input lies too; a second row with the input if that is separate.
pub(crate) fn strip(out: &mut String, played: &Played, rank: usize, memory: &Memory, (x, y): (f64, f64)) {
    let ranks = played.shape.ranks;
    let mut row = |cells: Vec<Option<&Piece>>, y: f64| {
        for (at, piece) in cells.into_iter().enumerate() {
            let left = x + at as f64 * CELL + (at / played.parts) as f64 * GAP;
            cell(out, (left, y), CELL, number(played, at), piece, ranks);
        }
    };
    if shows_input(played) {
        row(memory.input.iter().map(Option::as_ref).collect(), y);
        row(memory.output.iter().map(Option::as_ref).collect(), y + CELL + GAP);
        return;
    }
    // The larger of the two is the memory that both are part of.
    let cells = match played.shape.in_place(rank) {
        Some((from, _)) if played.shape.input_segments(rank) > played.shape.output_segments(rank) => {
            let mut cells: Vec<Option<&Piece>> = memory.input.iter().map(Option::as_ref).collect();
            for part in 0..played.parts {
                cells[from * played.parts + part] = memory.output[part].as_ref();
            }
            cells
        }
        Some(_) => memory.output.iter().map(Option::as_ref).collect(),
        None => memory.input.iter().chain(&memory.output).map(Option::as_ref).collect(),
    };
    row(cells, y);
}

/// The arrow of a message, with its contents in the middle.
pub(crate) fn arrow(
    out: &mut String,
    played: &Played,
    message: &Message,
    (x1, y1): (f64, f64),
    (x2, y2): (f64, f64),
    along: f64,
) {
    let ranks = played.shape.ranks;
    let stroke = colour(message.from, ranks);
    let _ = write!(
        out,
        "<g class=\"arrow\"><title>{}</title><line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" \
         stroke=\"{stroke}\" stroke-width=\"2\" marker-end=\"url(#head)\"/>",
        describe(played, message)
    );
    let small = 16.0;
    let (x, y) = (x1 + (x2 - x1) * along, y1 + (y2 - y1) * along);
    let left = x - small * message.pieces.len() as f64 / 2.0;
    // A page lets it travel from the beginning of the arrow.
    let _ = write!(out, "<g class=\"travel\" style=\"--x:{:.1}px;--y:{:.1}px\">", x1 - x, y1 - y);
    for (at, (part, piece)) in message.parts.clone().zip(&message.pieces).enumerate() {
        let segment = piece.as_ref().map_or(0, |piece| piece.segment);
        let number = if played.parts == 1 { segment } else { part };
        cell(out, (left + at as f64 * small, y - small / 2.0), small, number, piece.as_ref(), ranks);
    }
    out.push_str("</g></g>");
}

/// A message in words.
pub(crate) fn describe(played: &Played, message: &Message) -> String {
    let parts = match message.parts.len() {
        1 => format!("part {}", message.parts.start),
        _ => format!("parts {}..{}", message.parts.start, message.parts.end),
    };
    let segment = match message.pieces.iter().flatten().next() {
        Some(piece) if played.shape.input_segments(played.shape.root) > 1 => format!(" of segment {}", piece.segment),
        _ => String::new(),
    };
    let mut from: Vec<usize> = message.pieces.iter().flatten().flat_map(|p| p.ranks.clone()).collect();
    from.sort_unstable();
    from.dedup();
    let from: Vec<String> = from.iter().map(usize::to_string).collect();
    format!("rank {} to rank {}: {parts}{segment}, from rank {}", message.from, message.to, from.join(" + "))
}

/// The tip of arrows.
pub(crate) const DEFS: &str = "<defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"5\" \
     markerHeight=\"5\" orient=\"auto\"><path d=\"M0,0 L8,4 L0,8 z\" fill=\"#444\"/></marker></defs>";

#[cfg(test)]
mod tests {
    use super::*;

    /// WCAG asks for a contrast of 3 between a picture's parts and what is behind them.
    #[test]
    fn every_ranks_colour_stands_out_from_white_and_from_the_dark_page() {
        let contrast = |a: f64, b: f64| (a.max(b) + 0.05) / (a.min(b) + 0.05);
        let dark = luminance([0x16, 0x19, 0x23].map(|part| f64::from(part) / 255.0));
        for (rank, ranks) in (1..=16).flat_map(|ranks| (0..ranks).map(move |rank| (rank, ranks))) {
            let colour = colour(rank, ranks);
            let inner = colour.strip_prefix("hsl(").and_then(|rest| rest.strip_suffix("%)")).unwrap();
            let (hue, lightness) = inner.split_once(",70%,").unwrap();
            let plain = rgb(hue.parse().unwrap(), lightness.parse::<f64>().unwrap() / 100.0);
            // invert(1) hue-rotate(180deg), by the matrices of CSS.
            let luma = 0.213 * plain[0] + 0.715 * plain[1] + 0.072 * plain[2];
            let inverted = plain.map(|part| (1.0 - 2.0 * luma + part).clamp(0.0, 1.0));
            for (shown, behind) in [(plain, 1.0), (plain, dark), (inverted, dark)] {
                let shown = luminance(shown);
                assert!(contrast(shown, behind) >= 3.0, "rank {rank} of {ranks}: {colour} on {behind:.3}");
            }
        }
    }
}
