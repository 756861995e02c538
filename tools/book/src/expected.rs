//! The output of a milestone that CI cannot run, taken from its README, which records an earlier run.

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::paths::repository;

/// The first output of the README's section *Expected output*, with the text before it.
pub(crate) fn show(milestone: &str) -> Result<String> {
    let path = format!("milestones/{milestone}/README.md");
    let readme = fs::read_to_string(repository().join(&path)).with_context(|| format!("reading {path}"))?;
    first(&readme).with_context(|| path)
}

fn first(readme: &str) -> Result<String> {
    let mut lines = readme.lines().skip_while(|line| *line != "## Expected output").skip(1).peekable();
    if lines.peek().is_none() {
        bail!("no section 'Expected output'");
    }
    let mut lead = Vec::new();
    loop {
        match lines.next() {
            None => bail!("no output in its section 'Expected output'"),
            Some(line) if line.starts_with("## ") => bail!("no output in its section 'Expected output'"),
            Some(line) if line.starts_with("```") => break,
            Some(line) => lead.push(line),
        }
    }
    if lead.iter().any(|line| line.contains("](")) {
        bail!("the words before its first output have a link, which would lead elsewhere from another page");
    }
    let output: Vec<&str> = lines.by_ref().take_while(|line| !line.starts_with("```")).collect();
    if lines.peek().is_none() {
        bail!("its first output does not end");
    }
    Ok(format!(
        "{}\n\n```text\n{}\n```\n\n<div class=\"origin\">As printed then: CI does not run it again.</div>",
        lead.join("\n").trim(),
        output.join("\n")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_output_comes_with_the_words_before_it() {
        let readme = "# X\n## Run\n```\nno\n```\n## Expected output\nOn a machine:\n```sh\none\n\ntwo\n```\nand\n```\nthree\n```\n## Next\n";
        let shown = first(readme).unwrap();
        assert!(shown.starts_with("On a machine:\n\n```text\none\n\ntwo\n```\n"), "{shown}");
        assert!(!shown.contains("three"));
    }

    #[test]
    fn what_is_missing_is_said() {
        for (readme, words) in [
            ("# X\n", "no section"),
            ("## Expected output\nnothing\n## Next\n```\nx\n```\n", "no output"),
            ("## Expected output\n```\nx\n", "does not end"),
            ("## Expected output\n[a](b)\n```\nx\n```\ny\n", "link"),
        ] {
            let error = format!("{:#}", first(readme).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
