//! The output that a milestone's README expects of its first command.

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::paths::repository;

/// The first output in the section *Expected output* of the README at this path, without the line that shows a command.
pub(crate) fn read(path: &str) -> Result<String> {
    let readme = fs::read_to_string(repository().join(path)).with_context(|| format!("reading {path}"))?;
    first(&readme).with_context(|| path.to_owned())
}

fn first(readme: &str) -> Result<String> {
    let Some((_, section)) = readme.split_once("\n## Expected output\n") else { bail!("no section 'Expected output'") };
    let section = section.split("\n## ").next().unwrap_or(section);
    let mut lines = section.lines().skip_while(|line| !line.starts_with("```")).skip(1).peekable();
    let mut output = String::new();
    loop {
        match lines.next() {
            None if output.is_empty() => bail!("no output in its section 'Expected output'"),
            None => bail!("its first output does not end"),
            Some(line) if line.starts_with("```") => return Ok(output),
            Some(line) if output.is_empty() && line.starts_with("$ ") => {}
            Some(line) => output += &format!("{line}\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_output_is_found() {
        let readme = "# X\n## Run\n```\nno\n```\n## Expected output\nOn a machine:\n```\n$ x\none\n\ntwo\n```\n```\nthree\n```\n## Next\n";
        assert_eq!(first(readme).unwrap(), "one\n\ntwo\n");
    }

    #[test]
    fn what_is_missing_is_said() {
        for (readme, words) in [
            ("# X\n", "no section"),
            ("# X\n## Expected output\nnothing\n## Next\n```\nx\n```\n", "no output"),
            ("# X\n## Expected output\n```\nx\n", "does not end"),
        ] {
            let error = format!("{:#}", first(readme).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }
}
