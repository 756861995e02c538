//! Rows of boxes with arrows between them.

use anyhow::{Context, Result, bail};

use super::{Picture, Screen};

/// Tokens that begin an arrow; those with a parenthesis are followed by words.
const ARROWS: [&str; 4] = ["-(", "=(", "->", "=>"];

pub(super) fn draw(text: &str, screen: &Screen) -> Result<String> {
    let mut picture = Picture::new(screen);
    let mut y = 6.0;
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        // Words on an arrow may have a colon too.
        let (caption, row) = match line.split_once(": ") {
            Some((caption, row)) if !ARROWS.iter().any(|a| caption.contains(a)) => (caption.trim(), row),
            _ => ("", line),
        };
        if !caption.is_empty() {
            picture.label(6.0, y + 12.0, "caption", caption);
            picture.wide = picture.wide.max(screen.width(caption) + 18.0);
            y += 20.0;
        }
        y = boxes(&mut picture, row.trim(), y).with_context(|| format!("in '{line}'"))?;
    }
    picture.high = y - 8.0;
    Ok(picture.finish(text.trim()))
}

/// Draws a row that begins at `y`, in several lines where it is too long; returns where the next row begins.
fn boxes(picture: &mut Picture<'_>, row: &str, mut y: f64) -> Result<f64> {
    let screen = picture.screen;
    let (mut x, mut rest) = (6.0, row);
    // The arrow before the next box.
    let mut arrow: Option<(&str, &str)> = None;
    loop {
        let next = ARROWS.iter().filter_map(|kind| rest.find(kind).map(|at| (at, *kind))).min();
        let name = rest[..next.map_or(rest.len(), |(at, _)| at)].trim();
        if name.is_empty() {
            bail!("a box without words");
        }
        let width = screen.name(name);
        if let Some((class, words)) = arrow {
            let gap = if words.is_empty() { 30.0 } else { screen.width(words) + 16.0 };
            if x + gap + width > screen.wide {
                (x, y) = (14.0, y + 42.0);
            }
            picture.line((x, y + 14.0), (x + gap, y + 14.0), class, true);
            picture.label(x + gap / 2.0 - 2.0, y + 9.0, "label", words);
            x += gap;
        }
        picture.rect((x, y), (width, 28.0), "box");
        picture.label(x + width / 2.0, y + 18.0, "name", name);
        x += width;
        picture.wide = picture.wide.max(x + 6.0);
        let Some((at, kind)) = next else { return Ok(y + 44.0) };
        rest = &rest[at + 2..];
        let class = if kind.starts_with('=') { "data" } else { "call" };
        let mut words = "";
        if kind.ends_with('(') {
            let end = if class == "data" { ")=>" } else { ")->" };
            (words, rest) = rest.split_once(end).with_context(|| format!("no '{end}'"))?;
        }
        arrow = Some((class, words));
    }
}

#[cfg(test)]
mod tests {
    use super::super::SCREENS;
    use super::*;

    #[test]
    fn boxes_stand_in_rows() {
        let svg = draw("way: GPU -> card =(PCIe)=> wire\nRESET -(port)-> INIT", &SCREENS[0]).unwrap();
        assert_eq!(svg.matches("<rect").count(), 5);
        assert!(svg.contains("port") && svg.contains("PCIe") && svg.contains("class=\"data\""));
        assert!(
            !draw("A -(to: b)-> B", &SCREENS[0]).unwrap().contains("caption"),
            "a colon on an arrow is no caption's"
        );
        assert!(draw("A -> -> B", &SCREENS[0]).is_err());
        assert!(draw("A =(x)-> B", &SCREENS[0]).is_err());
    }

    #[test]
    fn long_rows_are_broken_on_a_phone() {
        let row = "RESET -(port, pkey, access)-> INIT -(peer: qpn, gid, psn, mtu)-> RTR -(own psn, timeouts)-> RTS";
        let high = |screen| {
            let mut picture = Picture::new(screen);
            let y = boxes(&mut picture, row, 0.0).unwrap();
            assert!(picture.wide <= screen.wide, "{}", picture.wide);
            y
        };
        assert!(high(&SCREENS[1]) > high(&SCREENS[0]));
    }
}
