//! Programs of the workspace that the book runs. scripts/book.sh builds them beforehand, all at once: `cargo run -p`
//! would choose other features of their dependencies, and compile most of the library again.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The program of this name, or `examples/NAME`, beside this one.
pub(crate) fn path(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding this program's own path")?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!("{} is not built: scripts/book.sh builds it", path.display());
    }
    Ok(path)
}

/// `command` with each `cargo run -q -p PACKAGE …` as the program in `folder`, and each `cargo build …` left out.
pub(crate) fn built(command: &str, folder: &Path) -> String {
    let mut out = String::new();
    for (i, line) in command.split('\n').enumerate() {
        out.push_str(if i == 0 { "" } else { "\n" });
        if line.trim_start().starts_with("cargo build ") {
            out.push(':');
            continue;
        }
        let mut parts = line.split("cargo run -q -p ");
        out.push_str(parts.next().unwrap_or_default());
        for part in parts {
            let (package, rest) = part.split_once(' ').unwrap_or((part, ""));
            let (program, rest) = match rest.strip_prefix("--example ") {
                Some(rest) => {
                    let (example, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                    (format!("examples/{example}"), rest)
                }
                None => (package.to_owned(), rest),
            };
            out.push_str(&format!("'{}' {}", folder.join(program).display(), rest.strip_prefix("-- ").unwrap_or(rest)));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_is_replaced_by_what_it_built() {
        let built = |command| super::built(command, Path::new("/t"));
        assert_eq!(built("cargo run -q -p ddp-sine"), "'/t/ddp-sine' ");
        assert_eq!(built("setsid cargo run -q -p labs -- order & job=$!"), "setsid '/t/labs' order & job=$!");
        assert_eq!(built("cargo run -q -p lib-hello | sed s/a/b/"), "'/t/lib-hello' | sed s/a/b/");
        assert_eq!(built("cargo run -q -p tinynccl --example all_reduce"), "'/t/examples/all_reduce' ");
        assert_eq!(built("cargo build -q -p labs\ncat x"), ":\ncat x");
        assert_eq!(built("cat x | grep y"), "cat x | grep y");
    }

    #[test]
    fn a_program_that_is_not_built_is_named() {
        assert!(path("no-such-program").unwrap_err().to_string().contains("no-such-program is not built"));
    }
}
