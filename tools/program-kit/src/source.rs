//! The end of an item in a source file.
//!
//! Sources are formatted, so an item of Rust, CUDA or C ends at the first closing bracket with the indentation of its
//! first line, and no parser is needed. In Python it ends before the next line that is indented no deeper.

/// Blanks before a line's first word.
pub fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// A line of Python without the comment at its end; a `#` in a string is taken for one, which a function's head does not
/// have.
pub fn python_code(line: &str) -> &str {
    line.split('#').next().unwrap_or_default().trim_end()
}

/// One past the last line of the item that begins at `first`.
pub fn end(lines: &[&str], first: usize, python: bool) -> usize {
    let margin = indent(lines[first]);
    let rest = first + 1..lines.len();
    if python {
        // The signature may go over several lines; its last one has the indentation of the first.
        let body = rest.clone().find(|&i| python_code(lines[i - 1]).ends_with(':')).unwrap_or(first + 1);
        let next = (body..lines.len()).find(|&i| !lines[i].trim().is_empty() && indent(lines[i]) <= margin);
        let mut end = next.unwrap_or(lines.len());
        while end > first + 1 && lines[end - 1].trim().is_empty() {
            end -= 1;
        }
        return end;
    }
    let one = lines[first].trim_end();
    let balanced = one.matches('(').count() == one.matches(')').count();
    if one.ends_with(';') || (one.ends_with(',') && balanced) || (one.contains('{') && one.ends_with('}')) {
        return first + 1;
    }
    let closes = |i: &usize| {
        let line = lines[*i];
        indent(line) == margin && line.trim_start().starts_with(['}', ']', ')']) && !line.trim_end().ends_with('{')
    };
    rest.into_iter().find(closes).map_or(lines.len(), |i| i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_end_where_their_indentation_does() {
        let ends = |text: &str, first, python| end(&text.lines().collect::<Vec<_>>(), first, python);
        let rust =
            "fn a(\n    x: u8,\n) -> u8 {\n    x\n}\n\nfn b() {}\nuse c;\nfn d()\nwhere\n    T: X,\n{\n    x\n}\n";
        assert_eq!([0, 6, 7, 8].map(|first| ends(rust, first, false)), [5, 7, 8, 14]);
        let python =
            "class A:\n    def one(\n        self,\n    ):\n        return 1\n\n    def two(self):\n        return 2\n";
        assert_eq!([0, 1, 6].map(|first| ends(python, first, true)), [8, 5, 8]);
    }
}
