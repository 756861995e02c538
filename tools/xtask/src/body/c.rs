//! CUDA C: the first braces outside comments and strings, and the word before the parentheses before them.

use std::ops::Range;

use anyhow::{Context as _, Result};

/// Name and body, braces included, of the first function that begins at or after byte `from`.
pub(super) fn find(text: &str, from: usize) -> Result<(String, Range<usize>)> {
    let code = blank(text);
    let begin = from + code.get(from..).and_then(|c| c.find('{')).context("no function with a body follows")?;
    let mut depth = 0_usize;
    let length = code[begin..].bytes().position(|b| {
        match b {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    let end = begin + length.context("its body has no end")? + 1;
    // Back over the parameters.
    let head = code[from..begin].trim_end().strip_suffix(')').context("no parameters before the braces")?;
    let mut depth = 1_usize;
    let open = head.bytes().rposition(|b| {
        match b {
            b')' => depth += 1,
            b'(' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    let head = head[..open.context("no parameters before the braces")?].trim_end();
    let name = head.rsplit(|c: char| !(c.is_alphanumeric() || c == '_')).next().filter(|n| !n.is_empty());
    Ok((name.context("no name before the parameters")?.to_owned(), begin..end))
}

/// The text with comments, strings and characters blanked: the same length.
fn blank(text: &str) -> String {
    let mut code = text.as_bytes().to_vec();
    let mut at = 0;
    while at < code.len() {
        let rest = &text.as_bytes()[at..];
        let end = |of: &[u8], from: usize| {
            rest.windows(of.len()).skip(from).position(|w| w == of).map(|p| p + from + of.len())
        };
        let length = match rest {
            [b'/', b'/', ..] => rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()),
            [b'/', b'*', ..] => end(b"*/", 2).unwrap_or(rest.len()),
            [quote @ (b'"' | b'\''), ..] => {
                let mut escaped = false;
                let close = rest.iter().skip(1).position(|b| {
                    let closes = b == quote && !escaped;
                    escaped = *b == b'\\' && !escaped;
                    closes
                });
                close.map_or(rest.len(), |c| c + 2)
            }
            _ => {
                at += 1;
                continue;
            }
        };
        code[at..at + length].fill(b' ');
        at += length;
    }
    String::from_utf8(code).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_comments_and_strings() {
        let text = "// { é\nextern \"C\" __global__ void __launch_bounds__(256) add(const float* a /* } */, u64 n) {\n  if (n) { x = '{'; } // }\n}\nvoid next() {}\n";
        let (name, body) = find(text, 0).unwrap();
        assert_eq!(name, "add");
        assert!(text[body.clone()].starts_with("{\n  if") && text[body.clone()].ends_with("}\n}"), "{}", &text[body]);
        let (name, _) = find(text, text.find("void next").unwrap()).unwrap();
        assert_eq!(name, "next");
        assert!(find(text, text.len()).is_err() && find("struct S {};", 0).is_err());
    }
}
