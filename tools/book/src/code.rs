//! An item of a source file, found by how its first line begins.

use anyhow::{Result, bail};
use program_kit::source::{end, indent};

/// Lines of a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Number of the first line, from 1.
    pub(crate) line: usize,
    /// The lines, without the indentation that they share.
    pub(crate) text: String,
}

/// Words that may precede the beginning of an item as a page writes it.
const BEFORE: [&str; 9] = [
    "pub ",
    "async ",
    "unsafe ",
    "const ",
    "static ",
    "__device__ ",
    "__global__ ",
    "__forceinline__ ",
    "extern \"C\" ",
];

/// Returns true if a line, without its leading words of [`BEFORE`] and `pub(…)`, begins with `head` as whole words.
fn begins(line: &str, head: &str) -> bool {
    let mut rest = line.trim_start();
    loop {
        if let Some(after) = rest.strip_prefix(head) {
            let whole = |c: char| c.is_alphanumeric() || c == '_';
            return !(head.ends_with(whole) && after.starts_with(whole));
        }
        let within = || rest.strip_prefix("pub(")?.split_once(") ").map(|(_, after)| after);
        match BEFORE.iter().find_map(|word| rest.strip_prefix(word)).or_else(within) {
            Some(after) => rest = after.trim_start(),
            None => return false,
        }
    }
}

/// Finds the one item of `source` that begins with `head`. `outer > inner` looks for `inner` within `outer`.
pub(crate) fn find(source: &str, head: &str, python: bool) -> Result<Item> {
    let lines: Vec<&str> = source.lines().collect();
    let mut range = 0..lines.len();
    for head in head.split(" > ") {
        let found: Vec<usize> = range.clone().filter(|&i| begins(lines[i], head)).collect();
        let [first] = found[..] else {
            let where_: Vec<String> = found.iter().map(|i| (i + 1).to_string()).collect();
            bail!("{} lines begin with '{head}' (at {}), expected one", found.len(), where_.join(", "));
        };
        range = first..end(&lines, first, python);
    }
    let first = range.start;
    // Its documentation and attributes.
    let mut start = first;
    while start > 0 && ["///", "#[", "//"].iter().any(|mark| lines[start - 1].trim_start().starts_with(mark)) {
        start -= 1;
    }
    let margin = indent(lines[first]);
    let text: Vec<&str> =
        lines[start..range.end].iter().map(|l| l.get(margin.min(indent(l))..).unwrap_or("")).collect();
    Ok(Item { line: start + 1, text: text.join("\n") })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUST: &str = "use a;\n\n/// Doc.\n#[inline]\npub fn one(\n    a: u8,\n) -> u8 {\n    a\n}\n\nimpl X {\n    fn one() {}\n\n    const fn two(&self) {\n        body();\n    }\n}\n";

    #[test]
    fn an_item_comes_with_its_documentation() {
        let item = find(RUST, "fn one(", false).unwrap_err().to_string();
        assert_eq!(item, "2 lines begin with 'fn one(' (at 5, 12), expected one");
        let two = find(RUST, "fn two", false).unwrap();
        assert_eq!(two, Item { line: 14, text: "const fn two(&self) {\n    body();\n}".into() });
        assert_eq!(find(RUST, "impl X > fn one", false).unwrap().text, "fn one() {}");
        let all = "fn a(\n    x: u8,\n) -> u8 {\n    x\n}\n";
        assert_eq!(find(all, "fn a", false).unwrap().text, all.trim_end());
    }

    #[test]
    fn a_head_ends_at_the_end_of_a_word() {
        assert!(begins("pub(crate) fn send(x)", "fn send"));
        assert!(begins("    pub(in super::super) unsafe fn send(x)", "fn send"));
        assert!(!begins("fn send_all(x)", "fn send"));
        assert!(find("fn a() {}\n", "fn b", false).is_err());
    }

    #[test]
    fn python_ends_by_indentation() {
        let source =
            "class A:\n    def one(\n        self,\n    ):\n        return 1\n\n    def two(self):\n        return 2\n";
        assert_eq!(find(source, "def one", true).unwrap().text, "def one(\n    self,\n):\n    return 1");
        assert_eq!(find(source, "def two", true).unwrap().line, 7);
    }
}
