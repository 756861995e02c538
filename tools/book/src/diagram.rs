//! Pictures from a few lines of text, so that they can be read and compared as text.
//!
//! A `sequence` names its actors in the first line (`A | B`); each further line is a message (`A -> B: words`), a
//! transfer of data (`A => B: words`), one that is lost or refused (`A -x B: words`), a note (`A: words`) or a heading
//! (`-- words`). In `boxes` each line is a row, `caption: A -> B -(words)-> C =(words)=> D`; the caption may be left
//! out, thick arrows are data.
//!
//! Each picture is drawn twice, for a desktop and for a phone: style sheets show one of them.

mod boxes;
mod sequence;

use std::fmt::Write;

use anyhow::Result;

/// The screen that a picture is drawn for.
struct Screen {
    class: &'static str,
    /// Pictures are not wider than this, unless a single word is.
    wide: f64,
    /// Width of a character of the labels, roughly; and of the bold names.
    char: f64,
    bold: f64,
    /// Between lines of words.
    line: f64,
    /// Words between two actors, and notes, are broken where they are longer than this.
    words: f64,
}

const SCREENS: [Screen; 2] = [
    Screen { class: "desktop", wide: 900.0, char: 6.9, bold: 7.8, line: 14.0, words: 190.0 },
    Screen { class: "phone", wide: 350.0, char: 6.3, bold: 7.0, line: 12.0, words: 90.0 },
];

/// A picture as it grows.
struct Picture<'a> {
    screen: &'a Screen,
    body: String,
    wide: f64,
    high: f64,
}

/// Text within SVG and HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The pictures for a block of this kind, or `None` if it is no picture.
pub(crate) fn draw(kind: &str, text: &str) -> Option<Result<String>> {
    let one: fn(&str, &Screen) -> Result<String> = match kind {
        "sequence" => sequence::draw,
        "boxes" => boxes::draw,
        _ => return None,
    };
    Some(SCREENS.iter().map(|screen| one(text, screen)).collect())
}

impl Screen {
    /// Width of words in one line.
    fn width(&self, text: &str) -> f64 {
        text.chars().count() as f64 * self.char
    }

    /// Width of a box around a name.
    fn name(&self, name: &str) -> f64 {
        name.chars().count() as f64 * self.bold + 14.0
    }

    /// Lines of about equal length, none wider than `room` unless a word is.
    fn lines(&self, text: &str, room: f64) -> Vec<String> {
        let fill = |room: f64| {
            let mut lines: Vec<String> = vec![];
            for word in text.split_whitespace() {
                match lines.last_mut() {
                    Some(line) if self.width(line) + self.char + self.width(word) <= room => {
                        line.push(' ');
                        line.push_str(word);
                    }
                    _ => lines.push(word.to_owned()),
                }
            }
            lines
        };
        let greedy = fill(room);
        let even = fill((self.width(text) / greedy.len().max(1) as f64 + 4.0 * self.char).min(room));
        if even.len() == greedy.len() { even } else { greedy }
    }

    /// Width of the longest of some lines.
    fn widest(&self, lines: &[String]) -> f64 {
        lines.iter().map(|l| self.width(l)).fold(0.0, f64::max)
    }
}

impl<'a> Picture<'a> {
    fn new(screen: &'a Screen) -> Picture<'a> {
        Picture { screen, body: String::new(), wide: 0.0, high: 0.0 }
    }

    fn label(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = write!(self.body, "<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{}</text>", escape(text));
    }

    fn rect(&mut self, (x, y): (f64, f64), (wide, high): (f64, f64), class: &str) {
        let _ = write!(
            self.body,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\" rx=\"4\" class=\"{class}\"/>"
        );
    }

    /// A straight line, with a head or without.
    fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str, head: bool) {
        let head = if head { format!(" marker-end=\"url(#head-{})\"", self.screen.class) } else { String::new() };
        let _ = write!(
            self.body,
            "<line x1=\"{x1:.1}\" x2=\"{x2:.1}\" y1=\"{y1:.1}\" y2=\"{y2:.1}\" class=\"{class}\"{head}/>"
        );
    }

    fn finish(self, described: &str) -> String {
        let Picture { screen: Screen { class, .. }, body, wide, high } = self;
        // Heads of arrows that are not shown cannot be referred to: each screen has its own.
        format!(
            "<div class=\"drawn {class}\"><svg viewBox=\"0 0 {wide:.0} {high:.0}\" style=\"width:{wide:.0}px\" role=\"img\" \
             aria-label=\"{}\"><defs><marker id=\"head-{class}\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" \
             markerHeight=\"8\" markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" \
             fill=\"currentColor\"/></marker></defs>{body}</svg></div>",
            escape(described)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_picture_is_drawn_for_both_screens() {
        for (kind, text) in [("sequence", "A | B\nA -> B: x"), ("boxes", "A -> B")] {
            let both = draw(kind, text).unwrap().unwrap();
            assert_eq!(both.matches("<svg").count(), 2, "{kind}");
            assert!(both.contains("drawn desktop") && both.contains("drawn phone"), "{kind}");
        }
        assert!(draw("text", "").is_none());
    }

    #[test]
    fn words_are_broken_evenly() {
        let screen = &SCREENS[0];
        assert_eq!(screen.lines("one two", 200.0), ["one two"]);
        let lines = screen.lines("everything before is visible before what follows", 190.0);
        assert_eq!(lines.len(), 2);
        assert!(lines.iter().all(|l| l.len() < 30), "{lines:?}");
        assert_eq!(screen.lines("unbreakable", 10.0), ["unbreakable"]);
    }
}
