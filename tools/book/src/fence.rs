//! Checks the blocks of code in a chapter. Code comes from the source (`{{#code}}`), outputs from `{{#output}}`. Blocks
//! written by hand are text that is neither, and commands whose programs the check looks up.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::paths::repository;

/// Programs of the field that a reader may call.
const PROGRAMS: &str = "all_reduce_perf cd cargo git jq export mpirun torchfrtrace torchrun python3 maturin rustup perf ss ip nft openssl scp kill \
     nvidia-smi";

/// Refuses a block in the chapter's own text that is not allowed, with the reason.
pub(crate) fn check(info: &str, body: &str) -> Result<()> {
    match info.split([',', ' ']).next().unwrap_or("") {
        "sh" => body.lines().try_for_each(command),
        "text" => match body.lines().find(|l| l.starts_with("$ ")) {
            Some(line) => bail!("'{line}' shows a command and what it printed: use {{{{#output}}}}"),
            None => Ok(()),
        },
        "sequence" | "boxes" => Ok(()),
        _ if body.trim().starts_with("{{#include ") && body.trim().lines().count() == 1 && body.contains(':') => Ok(()),
        "" => bail!("a block without a language: text, sh, sequence or boxes"),
        other => {
            bail!("code in {other} is written here by hand: take it from a source file by {{{{#code PATH HEAD}}}}")
        }
    }
}

fn command(line: &str) -> Result<()> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(());
    }
    for part in line.split([';', '|', '&']).map(str::trim).filter(|p| !p.is_empty()) {
        let mut words = part.split_whitespace().skip_while(|w| w.contains('=') && !w.starts_with('-'));
        let Some(program) = words.next() else { continue };
        if program.starts_with("scripts/") {
            if !repository().join(program).exists() {
                bail!("'{program}' is not in the repository");
            }
        } else if !PROGRAMS.split(' ').any(|known| known == program) && !program.starts_with("target/") {
            bail!("'{program}' in '{part}' is no program that this check knows");
        }
        if program == "cargo" {
            let rest: Vec<&str> = words.collect();
            if let Some(at) = rest.iter().position(|w| *w == "-p")
                && let Some(package) = rest.get(at + 1)
                && !packages().iter().any(|p| p == package)
            {
                bail!("'{package}' is no package of this workspace");
            }
        }
    }
    Ok(())
}

/// Names of the workspace's packages.
fn packages() -> Vec<String> {
    let manifest = fs::read_to_string(repository().join("Cargo.toml")).unwrap_or_default();
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = [")).unwrap_or_default();
    let folders = members.trim_end_matches(']').split(", ").map(|member| repository().join(member.trim_matches('"')));
    let below = |folder: PathBuf| -> Vec<PathBuf> {
        if folder.ends_with("*") {
            fs::read_dir(folder.with_file_name("")).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
        } else {
            vec![folder]
        }
    };
    folders.flat_map(below).filter_map(|folder| name(&folder.join("Cargo.toml"))).collect()
}

fn name(manifest: &Path) -> Option<String> {
    let text = fs::read_to_string(manifest).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("name = \""))?;
    Some(line.trim_end_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_and_outputs_are_not_written_by_hand() {
        assert!(check("rust", "fn main() {}").is_err());
        assert!(check("", "x").is_err());
        assert!(check("text", "$ ls\nx").is_err());
        assert!(check("text", "a -> b").is_ok());
        assert!(check("rust", "{{#include ../../../lib/src/lib.rs:anchor}}").is_ok());
    }

    #[test]
    fn commands_exist() {
        assert!(check("sh", "RUST_LOG=info cargo run -p tcp-echo -- --nagle").is_ok());
        assert!(check("sh", "cargo build --release -p tinynccl-nccl-net").is_ok());
        assert!(check("sh", "cargo run -p tcp-ecko").is_err());
        assert!(check("sh", "scripts/nothing.sh").is_err());
        assert!(check("sh", "scripts/test.sh && sudo reboot").is_err());
    }
}
