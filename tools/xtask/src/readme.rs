//! A milestone's README in parts: sections, numbered lists, folded blocks. It is the only place of its questions and
//! answers, so they are read here and copied nowhere.

use anyhow::{Context as _, Result};

use crate::course::Step;
use crate::learn::Learn;

/// The README of a step.
///
/// # Errors
/// The file cannot be read.
pub fn read(learn: &Learn, step: &Step) -> Result<String> {
    let path = step.solution(&learn.root).join("README.md");
    std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

/// The text of a section: the lines below the heading `title`, of any level, down to the next heading of the same or a
/// higher one.
pub fn section<'a>(readme: &'a str, title: &str) -> Option<&'a str> {
    let mut fenced = false;
    let mut begin = None;
    let mut at = 0;
    for line in readme.split_inclusive('\n') {
        let start = at;
        at += line.len();
        fenced ^= line.starts_with("```");
        let level = line.bytes().take_while(|&b| b == b'#').count();
        if fenced || level == 0 || !line[level..].starts_with(' ') {
            continue;
        }
        match begin {
            None if line[level..].trim() == title => begin = Some((at, level)),
            Some((from, ours)) if level <= ours => return Some(&readme[from..start]),
            _ => {}
        }
    }
    begin.map(|(from, _)| &readme[from..])
}

/// The items of the numbered list in a text, in order. Indented lines belong to the item above them.
pub fn numbered(text: &str) -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix(&format!("{}. ", items.len() + 1)) {
            items.push(rest.to_owned());
            inside = true;
        } else if let Some(item) = items.last_mut().filter(|_| inside && (line.is_empty() || line.starts_with("  "))) {
            item.push('\n');
            item.push_str(line.strip_prefix("   ").unwrap_or(line));
        } else {
            inside = false;
        }
    }
    items.iter().map(|item| item.trim_end().to_owned()).collect()
}

/// The folded blocks of a text, in order: the words that stand there, and those that unfold.
pub fn folded(text: &str) -> Vec<(&str, &str)> {
    let blocks = text.split("<details><summary>").skip(1);
    blocks.filter_map(|b| b.split_once("</details>")?.0.split_once("</summary>")).collect()
}

/// For a terminal: without the marks of Markdown and HTML, links as their words.
pub fn plain(text: &str) -> String {
    let text =
        text.replace("**", "").replace("<code>", "`").replace("</code>", "`").replace("<em>", "").replace("</em>", "");
    let mut out = String::with_capacity(text.len());
    let mut rest = text.as_str();
    // `[words](target)`: the words.
    while let Some((before, after)) = rest.split_once('[') {
        out.push_str(before);
        let link = after.split_once("](").and_then(|(words, t)| Some((words, t.split_once(')')?.1)));
        match link.filter(|(words, _)| !words.contains(['[', '\n'])) {
            Some((words, behind)) => {
                out.push_str(words);
                rest = behind;
            }
            None => {
                out.push('[');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

/// Columns of a line of [`flowed`].
const COLUMNS: usize = 100;

/// `text` with the lines of each paragraph joined, and broken anew. Lists, tables and code keep their lines.
pub fn flowed(text: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    let (mut open, mut fenced) = (false, false);
    for line in text.lines() {
        let kept =
            fenced || line.starts_with("```") || line.is_empty() || line.starts_with(['|', '-', ' ']) || is_item(line);
        fenced ^= line.starts_with("```");
        if kept {
            out.push(line.to_owned());
            open = is_item(line) || line.starts_with("- ");
            continue;
        }
        if !open {
            out.push(String::new());
        }
        open = true;
        for word in line.split_whitespace() {
            let full = out
                .last()
                .is_none_or(|last| !last.is_empty() && last.chars().count() + 1 + word.chars().count() > COLUMNS);
            match out.last_mut().filter(|_| !full) {
                Some(last) if last.is_empty() => last.push_str(word),
                Some(last) => *last += &format!(" {word}"),
                None => out.push(word.to_owned()),
            }
        }
    }
    out.join("\n")
}

/// Returns true for an item of a numbered list, `1. …`.
fn is_item(line: &str) -> bool {
    line.split_once(". ").is_some_and(|(number, _)| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_end_at_the_next_heading_of_their_level() {
        let readme = "# A\n## How\none\n### Why\ntwo\n```\n# no heading\n```\n## Next\nthree\n";
        assert_eq!(section(readme, "How"), Some("one\n### Why\ntwo\n```\n# no heading\n```\n"));
        assert_eq!(section(readme, "Why"), Some("two\n```\n# no heading\n```\n"));
        assert_eq!(section(readme, "Next"), Some("three\n"));
        assert_eq!(section(readme, "no heading"), None);
    }

    #[test]
    fn items_keep_their_further_lines() {
        let list =
            "before\n1. one\n   more\n2. two:\n\n   | a | b |\n3. three\n\nafter\n4. no item of this list's end\n";
        assert_eq!(numbered(list)[..3], ["one\nmore", "two:\n\n| a | b |", "three"]);
        assert_eq!(numbered("2. begins late\n"), Vec::<String>::new());
    }

    #[test]
    fn paragraphs_flow_and_lists_stay() {
        assert_eq!(flowed("one\ntwo\n\nthree\n- a\n- b\n| x |\n| y |"), "one two\n\nthree\n- a\n- b\n| x |\n| y |");
        assert_eq!(flowed("1. a\n2. b\n```\nc\nd\n```\ne"), "1. a\n2. b\n```\nc\nd\n```\ne");
        let long = "word ".repeat(50);
        assert!(flowed(&long).lines().count() == 3 && flowed(&long).lines().all(|line| line.len() <= COLUMNS));
        assert_eq!(flowed(""), "");
    }

    #[test]
    fn blocks_and_marks() {
        let text = "<details><summary>Why <code>x</code>?</summary>\n\n**So.**\n</details>\n<details><summary>B</summary>b</details>";
        assert_eq!(folded(text), [("Why <code>x</code>?", "\n\n**So.**\n"), ("B", "b")]);
        assert_eq!(plain("**44 ms** in [`a.rs`](../a.rs), x[0] and [b](c"), "44 ms in `a.rs`, x[0] and [b](c");
    }
}
