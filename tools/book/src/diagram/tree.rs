//! Trees: boxes below each other, children indented.

use anyhow::{Context, Result, bail};

use super::{Picture, Screen};

const INDENT: f64 = 26.0;

pub(super) fn draw(text: &str, screen: &Screen) -> Result<String> {
    let mut picture = Picture::new(screen);
    // Of each open level: its indentation in characters, and where its box ends below.
    let mut open: Vec<(usize, f64)> = vec![];
    let mut y = 6.0;
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        let indent = line.len() - line.trim_start().len();
        open.retain(|(level, _)| *level < indent);
        if open.is_empty() && indent > 0 {
            bail!("'{line}' belongs to nothing");
        }
        let (name, words) = line.trim().split_once(": ").unwrap_or((line.trim(), ""));
        let x = 6.0 + INDENT * open.len() as f64;
        let width = screen.name(name);
        if let Some((_, bottom)) = open.last() {
            let trunk = x - INDENT + 12.0;
            picture.line((trunk, *bottom), (trunk, y + 13.0), "call", false);
            picture.line((trunk, y + 13.0), (x, y + 13.0), "call", false);
        }
        picture.rect((x, y), (width, 26.0), "box");
        picture.label(x + width / 2.0, y + 17.0, "name", name);
        picture.wide = picture.wide.max(x + width + 6.0);
        open.push((indent, y + 26.0));
        // Beside the box, or below it where there is no room.
        let (mut left, mut at) = (x + width + 8.0, y + 17.0);
        let mut lines = vec![words.to_owned()];
        if left + screen.width(words) > screen.wide {
            (left, at) = (x + INDENT - 4.0, y + 26.0 + screen.line);
            lines = screen.lines(words, screen.wide - left);
        }
        for line in &lines {
            picture.label(left, at, "caption", line);
            picture.wide = picture.wide.max(left + screen.width(line) + 6.0);
            at += screen.line;
        }
        y = (y + 26.0).max(at - screen.line + 2.0) + 12.0;
    }
    picture.high = y;
    Ok(picture.finish(text.lines().next().context("an empty tree")?))
}

#[cfg(test)]
mod tests {
    use super::super::SCREENS;
    use super::*;

    #[test]
    fn children_hang_on_their_parents() {
        for screen in &SCREENS {
            let svg = draw(
                "a: first\n  b: with words that are so long that a phone has no room for them beside the box\n    c\n  d",
                screen,
            );
            let svg = svg.unwrap();
            assert_eq!((svg.matches("<rect").count(), svg.matches("<line").count()), (4, 6));
        }
        assert!(draw("  a", &SCREENS[0]).is_err());
    }
}
