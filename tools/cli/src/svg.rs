//! One picture of a whole schedule: a column per rank, a row per round, time going down.

use std::fmt::Write;

use crate::picture::{CELL, DEFS, FONT, arrow, colour, rows, strip, width};
use crate::played::Played;

/// Room at the left, for the rounds' numbers.
const LEFT: f64 = 60.0;
/// Room above, for the title and the ranks' names.
const TOP: f64 = 60.0;
/// Between columns.
const BETWEEN: f64 = 46.0;
/// Room for arrows between two rows.
const ARROWS: f64 = 52.0;

pub(crate) fn page(played: &Played) -> String {
    let ranks = played.shape.ranks;
    // Where the first round only sends, it shows the start too.
    let first = usize::from(played.rounds.get(1).is_some_and(|r| r.memory == played.rounds[0].memory));
    let rounds = &played.rounds[first..];
    let strip_width = width(played);
    let column = strip_width + BETWEEN;
    let strip_height = rows(played) as f64 * (CELL + 4.0);
    let row = strip_height + ARROWS;
    let right = LEFT + column * ranks as f64;
    let bottom = TOP + row * rounds.len() as f64 - ARROWS + 20.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {right:.0} {bottom:.0}\" width=\"{right:.0}\" \
         height=\"{bottom:.0}\" role=\"img\"><title>{title}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>{DEFS}\
         <text x=\"8\" y=\"20\" {FONT} font-weight=\"bold\">{title}</text>",
        title = played.title()
    );
    let middle = |rank: usize| LEFT + column * rank as f64 + strip_width / 2.0;
    for rank in 0..ranks {
        let (x, fill) = (middle(rank), colour(rank, ranks));
        let _ = write!(out, "<circle cx=\"{:.1}\" cy=\"40\" r=\"5\" fill=\"{fill}\"/>", x - 28.0);
        let _ = write!(out, "<text x=\"{:.1}\" y=\"44\" {FONT}>rank {rank}</text>", x - 18.0);
    }
    for (number, round) in rounds.iter().enumerate() {
        let number = number + first;
        let y = TOP + row * (number - first) as f64;
        let name = match number {
            0 => "start".to_owned(),
            _ if round.sent.is_empty() => "done".to_owned(),
            _ => format!("round {number}"),
        };
        let _ = write!(out, "<text x=\"8\" y=\"{:.1}\" {FONT}>{name}</text>", y + CELL * 0.7);
        for (rank, memory) in round.memory.iter().enumerate() {
            strip(&mut out, played, rank, memory, (LEFT + column * rank as f64, y));
        }
        for message in &round.sent {
            let from = (middle(message.from), y + strip_height + 2.0);
            let to = (middle(message.to), y + row - 3.0);
            // Near its sender: arrows that cross do so further on.
            arrow(&mut out, played, message, from, to, 0.3);
        }
    }
    out.push_str("</svg>\n");
    out
}
