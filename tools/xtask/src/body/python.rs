//! Python: the lines that are indented more than their `def`, below the docstring.

use std::ops::Range;

use anyhow::{Context as _, Result, ensure};

/// Name and body (whole lines, without the docstring) of the first function that begins at or after byte `from`.
pub(super) fn find(text: &str, from: usize) -> Result<(String, Range<usize>)> {
    let mut lines = lines(text).skip_while(|l| l.start < from).peekable();
    let begin = lines
        .by_ref()
        .find(|l| {
            !l.within && (l.text.trim_start().starts_with("def ") || l.text.trim_start().starts_with("async def "))
        })
        .context("no function follows")?;
    let (_, rest) = begin.text.split_once("def ").context("no function follows")?;
    let name = rest.split('(').next().unwrap_or_default().trim().to_owned();
    // The head ends with a colon; a parameter's annotation does not end a line of ours.
    let mut last = begin;
    while !last.code().ends_with(':') {
        last = lines.next().context("the function's head has no end")?;
    }
    let indent = begin.indent();
    let mut body: Option<Range<usize>> = None;
    let mut quoted = false;
    for line in lines {
        let blank = line.text.trim().is_empty();
        if !line.within && !blank && line.indent() <= indent {
            break;
        }
        // The docstring stays: it is part of the interface.
        if body.is_none() && (quoted || (line.text.trim_start().starts_with("\"\"\"") && !line.within)) {
            quoted = line.leaves_open;
            continue;
        }
        if body.is_none() && blank {
            continue;
        }
        if !blank || line.within {
            let start = body.map_or(line.start, |b| b.start);
            body = Some(start..line.start + line.text.len());
        }
    }
    let body = body.context("the function has no body")?;
    ensure!(text[body.clone()].ends_with('\n'), "the file must end with a line");
    Ok((name, body))
}

/// A line, and whether it begins and ends within a string of three quotes.
#[derive(Debug, Clone, Copy)]
struct Line<'a> {
    start: usize,
    text: &'a str,
    within: bool,
    leaves_open: bool,
}

impl Line<'_> {
    fn indent(&self) -> usize {
        self.text.len() - self.text.trim_start().len()
    }

    /// Without the comment at its end; a `#` in a string is taken for one, which a function's head does not have.
    fn code(&self) -> &str {
        self.text.split('#').next().unwrap_or_default().trim_end()
    }
}

fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let (mut start, mut open) = (0, false);
    text.split_inclusive('\n').map(move |text| {
        let within = open;
        open ^= (text.matches("\"\"\"").count() + text.matches("'''").count()) % 2 == 1;
        let line = Line { start, text, within, leaves_open: open };
        start += text.len();
        line
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docstrings_stay_and_the_next_function_is_not_taken() {
        let text = "class A:\n    def f(self, a,\n          b=1):  # two lines\n        \"\"\"Says\n        what.\"\"\"\n\n        x = \"\"\"\nleft\n\"\"\"\n\n        return x\n\n\n    def g(self):\n        pass\n";
        let (name, body) = find(text, 0).unwrap();
        assert_eq!(name, "f");
        assert_eq!(&text[body], "        x = \"\"\"\nleft\n\"\"\"\n\n        return x\n");
        let (name, body) = find(text, text.find("    def g").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("g", "        pass\n"));
        assert!(find(text, text.len()).is_err());
        assert!(find("def f():\n    \"\"\"Only says.\"\"\"\n", 0).is_err());
    }
}
