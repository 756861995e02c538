//! Pictures from a few lines of text, so that they can be read and compared as text.
//!
//! A `sequence` names its actors in the first line (`A | B`); each further line is a message (`A -> B: words`), a transfer of data
//! (`A => B: words`), one that is lost or refused (`A -x B: words`), a note (`A: words`) or a heading (`-- words`).
//! In `boxes` each line is a row, `caption: A -> B -(words)-> C`; the caption may be left out.

use std::fmt::Write;

use anyhow::{Context, Result, bail};

/// Width of a character of the labels, roughly; and of the bold names.
const CHAR: f64 = 6.5;
const BOLD: f64 = 7.6;
const STEP: f64 = 36.0;
/// Arrow heads have names of their own in every picture: a page holds several.
const HEADS: &str = "<defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" \
    markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"currentColor\"/></marker></defs>";

/// Text within SVG and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The picture for a block of this kind, or `None` if it is no picture.
pub(crate) fn draw(kind: &str, text: &str) -> Option<Result<String>> {
    match kind {
        "sequence" => Some(sequence(text)),
        "boxes" => Some(boxes(text)),
        _ => None,
    }
}

fn label(out: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escape(text));
}

fn frame(wide: f64, high: f64, kind: &str, described: &str, body: &str) -> String {
    format!(
        "<div class=\"drawn\"><svg viewBox=\"0 0 {wide:.0} {high:.0}\" style=\"width:{wide:.0}px;min-width:{:.0}px\" role=\"img\" \
         aria-label=\"{}\" class=\"{kind}\">{HEADS}{body}</svg></div>",
        wide.min(560.0),
        escape(described)
    )
}

enum Line<'a> {
    Arrow { from: usize, to: usize, kind: &'a str, text: &'a str },
    Note { at: usize, text: &'a str },
    Heading(&'a str),
}

fn sequence(text: &str) -> Result<String> {
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
        .collect::<Result<Vec<Line<'_>>>>()?;

    let length = |text: &str| text.chars().count() as f64 * CHAR;
    let mut column = 96.0_f64;
    for name in &actors {
        column = column.max(name.chars().count() as f64 * BOLD + 30.0);
    }
    for line in &parsed {
        match line {
            Line::Arrow { from, to, text, .. } => {
                column = column.max((length(text) + 16.0) / from.abs_diff(*to).max(1) as f64);
            }
            // A note may hang over by half a column on both sides.
            Line::Note { text, .. } => column = column.max(length(text) / 1.3),
            Line::Heading(_) => {}
        }
    }
    let wide = column * actors.len() as f64 + 20.0;
    let high = 48.0 + STEP * parsed.len() as f64 + 10.0;
    let x = |actor: usize| 10.0 + column * (actor as f64 + 0.5);
    let mut body = String::new();
    for (i, name) in actors.iter().enumerate() {
        let half = name.chars().count() as f64 * BOLD / 2.0 + 8.0;
        let _ = write!(
            body,
            "<line x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"32\" y2=\"{high:.1}\" class=\"life\"/>\
             <rect x=\"{1:.1}\" y=\"6\" width=\"{2:.1}\" height=\"26\" rx=\"4\" class=\"box\"/>",
            x(i),
            x(i) - half,
            2.0 * half
        );
        label(&mut body, x(i), 23.0, "name", name);
    }
    for (i, line) in parsed.iter().enumerate() {
        let y = 48.0 + STEP * (i as f64 + 0.6);
        match *line {
            Line::Arrow { from, to, kind, text } => {
                let class = match kind {
                    "=>" => "data",
                    "-x" => "lost",
                    _ => "call",
                };
                let (start, mut stop) = (x(from), x(to));
                if kind == "-x" {
                    stop = start + (stop - start) * 0.82;
                    let _ = write!(
                        body,
                        "<path d=\"M{:.1} {:.1}l10 10m0 -10l-10 10\" class=\"lost\"/>",
                        stop - 5.0,
                        y - 5.0
                    );
                }
                let head = if kind == "-x" { "" } else { " marker-end=\"url(#head)\"" };
                let _ = write!(
                    body,
                    "<line x1=\"{start:.1}\" x2=\"{stop:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" class=\"{class}\"{head}/>"
                );
                label(&mut body, (x(from) + x(to)) / 2.0, y - 6.0, "label", text);
            }
            Line::Note { at, text } => {
                let half = length(text) / 2.0 + 8.0;
                let middle = x(at).clamp(half + 2.0, (wide - half - 2.0).max(half + 2.0));
                let _ = write!(
                    body,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"22\" rx=\"3\" class=\"note\"/>",
                    middle - half,
                    y - 15.0,
                    2.0 * half
                );
                label(&mut body, middle, y, "label", text);
            }
            Line::Heading(text) => {
                let _ = write!(
                    body,
                    "<line x1=\"4\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" class=\"life\"/>",
                    wide - 4.0,
                    y + 5.0
                );
                label(&mut body, wide / 2.0, y, "heading", text);
            }
        }
    }
    Ok(frame(wide, high, "sequence", &format!("Sequence between {}", actors.join(", ")), &body))
}

fn boxes(text: &str) -> Result<String> {
    let length = |text: &str| text.chars().count() as f64 * CHAR + 4.0;
    let (mut body, mut wide, mut y) = (String::new(), 0.0_f64, 6.0);
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        // Words on an arrow may have a colon too.
        let (caption, row) = match line.split_once(": ") {
            Some((caption, row)) if !["-(", "->", "=>"].iter().any(|a| caption.contains(a)) => (caption.trim(), row),
            _ => ("", line),
        };
        if !caption.is_empty() {
            label(&mut body, 6.0, y + 12.0, "caption", caption);
            wide = wide.max(length(caption) + 14.0);
            y += 20.0;
        }
        let mut x = 6.0;
        let mut rest = row.trim();
        loop {
            let arrow = ["-(", "->", "=>"].iter().filter_map(|kind| rest.find(kind).map(|at| (at, *kind))).min();
            let name = rest[..arrow.map_or(rest.len(), |(at, _)| at)].trim();
            if name.is_empty() {
                bail!("a box without words in '{line}'");
            }
            let width = name.chars().count() as f64 * BOLD + 16.0;
            let _ = write!(
                body,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"28\" rx=\"4\" class=\"box\"/>"
            );
            label(&mut body, x + width / 2.0, y + 18.0, "name", name);
            x += width;
            let Some((at, kind)) = arrow else { break };
            rest = &rest[at + 2..];
            let mut words = "";
            if kind == "-(" {
                let (inner, after) = rest.split_once(")->").with_context(|| format!("no ')->' in '{line}'"))?;
                (words, rest) = (inner, after);
            }
            let gap = (length(words) + 12.0).max(34.0);
            let class = if kind == "=>" { "data" } else { "call" };
            let _ = write!(
                body,
                "<line x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"{1:.1}\" y2=\"{1:.1}\" class=\"{class}\" marker-end=\"url(#head)\"/>",
                x + gap,
                y + 14.0
            );
            label(&mut body, x + gap / 2.0 - 2.0, y + 10.0, "label", words);
            x += gap;
        }
        wide = wide.max(x + 6.0);
        y += 44.0;
    }
    Ok(frame(wide, y - 8.0, "boxes", text.trim(), &body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_has_every_line() {
        let svg = draw("sequence", "A | B\nA -> B: hello <you>\nB -x A: gone\nB: a note\n-- later\nA => B: data")
            .unwrap()
            .unwrap();
        assert_eq!(svg.matches("marker-end").count(), 2);
        assert!(svg.contains("hello &lt;you&gt;") && svg.contains("a note") && svg.contains("later"));
        assert!(sequence("A | B\nA -> C: x").unwrap_err().to_string().contains("'C' is no actor"));
    }

    #[test]
    fn boxes_stand_in_rows() {
        let svg = boxes("way: GPU -> card => wire\nRESET -(port)-> INIT").unwrap();
        assert_eq!(svg.matches("<rect").count(), 5);
        assert!(svg.contains("port") && svg.contains("class=\"data\""));
        assert!(!boxes("A -(to: b)-> B").unwrap().contains("caption"), "a colon on an arrow is no caption's");
        assert!(boxes("A -> -> B").is_err());
        assert!(draw("text", "").is_none());
    }
}
