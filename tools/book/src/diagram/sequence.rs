//! Sequence diagrams: messages between actors, from top to bottom.

use std::fmt::Write;

use anyhow::{Context, Result};

use super::{Picture, Screen};

enum Line<'a> {
    Arrow { from: usize, to: usize, kind: &'a str, text: &'a str },
    Note { at: usize, text: &'a str },
    Heading(&'a str),
}

/// Height of a row without its words.
const ROW: f64 = 20.0;

pub(super) fn draw(text: &str, screen: &Screen) -> Result<String> {
    let (actors, lines) = parse(text)?;
    let (places, wide) = columns(&actors, &lines, screen);
    let mut picture = Picture::new(screen);
    picture.wide = wide;
    let names: Vec<Vec<String>> = actors.iter().map(|name| name_lines(name, screen)).collect();
    let top = 12.0 + screen.line * names.iter().map(Vec::len).max().unwrap_or(1) as f64;
    let mut y = top + 12.0;
    for line in &lines {
        y = row(&mut picture, line, &places, y);
    }
    picture.high = y + 4.0;
    let rows = std::mem::take(&mut picture.body);
    for (x, name) in places.iter().zip(&names) {
        picture.line((*x, top + 4.0), (*x, y), "life", false);
        let half = name.iter().map(|n| screen.name(n)).fold(0.0, f64::max) / 2.0;
        picture.rect((x - half, 4.0), (2.0 * half, top), "box");
        let first = 4.0 + top / 2.0 + 4.0 - (name.len() - 1) as f64 * screen.line / 2.0;
        for (i, word) in name.iter().enumerate() {
            picture.label(*x, first + i as f64 * screen.line, "name", word);
        }
    }
    picture.body.push_str(&rows);
    Ok(picture.finish(&format!("Sequence between {}", actors.join(", "))))
}

fn parse(text: &str) -> Result<(Vec<&str>, Vec<Line<'_>>)> {
    let mut lines = text.lines().filter(|l| !l.trim().is_empty());
    let actors: Vec<&str> = lines.next().context("an empty sequence")?.split('|').map(str::trim).collect();
    let actor = |name: &str| {
        actors.iter().position(|a| *a == name.trim()).with_context(|| format!("'{}' is no actor", name.trim()))
    };
    let parsed = lines
        .map(|line| {
            if let Some(heading) = line.strip_prefix("-- ") {
                return Ok(Line::Heading(heading.trim()));
            }
            let (who, text) = line.split_once(':').with_context(|| format!("no colon in '{line}'"))?;
            let text = text.trim();
            for kind in ["->", "=>", "-x"] {
                if let Some((from, to)) = who.split_once(kind) {
                    return Ok(Line::Arrow { from: actor(from)?, to: actor(to)?, kind, text });
                }
            }
            Ok(Line::Note { at: actor(who)?, text })
        })
        .collect::<Result<_>>()?;
    Ok((actors, parsed))
}

/// A name may be broken where there is little room.
fn name_lines(name: &str, screen: &Screen) -> Vec<String> {
    screen.lines(name, screen.words.max(60.0) * screen.char / screen.bold)
}

/// Returns the x of each actor, and the width of the picture: actors are as close as names and words allow.
fn columns(actors: &[&str], lines: &[Line<'_>], screen: &Screen) -> (Vec<f64>, f64) {
    let half = |name: &str| {
        let lines = name_lines(name, screen);
        lines.iter().map(|n| screen.name(n)).fold(0.0, f64::max) / 2.0
    };
    let halves: Vec<f64> = actors.iter().map(|name| half(name)).collect();
    let ends = halves[0] + halves[halves.len() - 1] + 8.0;
    let between = actors.len().max(2) - 1;
    // Where there is room left, words are broken less.
    let words = screen.words.min((screen.wide - ends) / between as f64 - 12.0).max(40.0);
    let mut gaps: Vec<f64> = halves.windows(2).map(|pair| (pair[0] + pair[1] + 8.0).max(words.min(80.0))).collect();
    for line in lines {
        let Line::Arrow { from, to, text, .. } = line else { continue };
        let span = *from.min(to)..*from.max(to);
        if span.is_empty() {
            continue;
        }
        let needed = screen.widest(&screen.lines(text, words * span.len() as f64)) + 18.0;
        let missing = needed - gaps[span.clone()].iter().sum::<f64>();
        if missing > 0.0 {
            let each = missing / span.len() as f64;
            gaps[span].iter_mut().for_each(|gap| *gap += each);
        }
    }
    let mut places = vec![halves[0] + 4.0];
    for gap in gaps {
        places.push(places[places.len() - 1] + gap);
    }
    let mut right = places[places.len() - 1] + halves[halves.len() - 1] + 4.0;
    // Notes hang over at both ends, as far as there is room.
    let (mut left_over, mut right_over) = (0.0_f64, 0.0_f64);
    for line in lines {
        let Line::Note { at, text } = line else { continue };
        let half = screen.widest(&screen.lines(text, note_room(screen))) / 2.0 + 10.0;
        right = right.max(2.0 * half);
        left_over = left_over.max(half - places[*at]);
        right_over = right_over.max(places[*at] + half - right);
    }
    let spare = (screen.wide - right).max(0.0);
    let shift = left_over.min(spare);
    places.iter_mut().for_each(|x| *x += shift);
    (places, right + shift + right_over.min(spare - shift))
}

fn note_room(screen: &Screen) -> f64 {
    screen.words * 1.3
}

/// Draws a row that begins at `y`; returns where the next one begins.
fn row(picture: &mut Picture<'_>, line: &Line<'_>, places: &[f64], y: f64) -> f64 {
    let screen = picture.screen;
    match *line {
        Line::Arrow { from, to, kind, text } => {
            let (start, mut stop) = (places[from], places[to]);
            let lines = screen.lines(text, (stop - start).abs() - 10.0);
            let at = y + lines.len() as f64 * screen.line + 4.0;
            let class = match kind {
                "=>" => "data",
                "-x" => "lost",
                _ => "call",
            };
            if kind == "-x" {
                stop = start + (stop - start) * 0.86;
                let _ = write!(
                    picture.body,
                    "<path d=\"M{:.1} {:.1}l10 10m0 -10l-10 10\" class=\"lost\"/>",
                    stop - 5.0,
                    at - 5.0
                );
            }
            picture.line((start, at), (stop, at), class, kind != "-x");
            for (i, words) in lines.iter().enumerate() {
                let below = (lines.len() - 1 - i) as f64 * screen.line;
                picture.label((start + places[to]) / 2.0, at - 5.0 - below, "label", words);
            }
            at + ROW - 6.0
        }
        Line::Note { at, text } => {
            let lines = screen.lines(text, note_room(screen));
            let half = screen.widest(&lines) / 2.0 + 8.0;
            let middle = places[at].clamp(half + 2.0, (picture.wide - half - 2.0).max(half + 2.0));
            let high = lines.len() as f64 * screen.line + 8.0;
            picture.rect((middle - half, y), (2.0 * half, high), "note");
            for (i, words) in lines.iter().enumerate() {
                picture.label(middle, y + (i + 1) as f64 * screen.line, "label", words);
            }
            y + high + 10.0
        }
        Line::Heading(text) => {
            let at = y + screen.line;
            picture.label(picture.wide / 2.0, at, "heading", text);
            picture.line((4.0, at + 5.0), (picture.wide - 4.0, at + 5.0), "life", false);
            at + ROW
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::SCREENS;
    use super::*;

    const TEXT: &str = "A | card A | B\nA -> card A: hello <you>\nB -x A: gone\nB: a note of some length that must be broken on a \
                        phone\n-- later\nA => card A: data, data, data and then the word";

    #[test]
    fn a_sequence_has_every_line() {
        for screen in &SCREENS {
            let svg = draw(TEXT, screen).unwrap();
            assert_eq!(svg.matches("marker-end").count(), 2);
            assert!(
                svg.contains("hello") && svg.contains("&lt;you&gt;") && svg.contains("a note") && svg.contains("later")
            );
        }
        assert!(draw("A | B\nA -> C: x", &SCREENS[0]).unwrap_err().to_string().contains("'C' is no actor"));
    }

    #[test]
    fn four_actors_fit_a_phone() {
        let text = "A | card A | card B | B\nA -> card A: post WRITE_WITH_IMM, 32 bits beside the data\n\
                    card B -> B: completion: RECV, byte_len, and more words than fit";
        let (actors, lines) = parse(text).unwrap();
        let (_, wide) = columns(&actors, &lines, &SCREENS[1]);
        assert!(wide <= SCREENS[1].wide + 40.0, "{wide}");
    }
}
