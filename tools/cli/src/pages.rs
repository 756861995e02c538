//! `pages`: man pages and completions of shells, from the declarations behind `--help`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::aot::{Shell, generate};

/// Writes man pages and completions of shells below a folder, where distributions keep them.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The folder, for example `/usr/share`.
    folder: PathBuf,
}

/// Names that the program is installed under.
const NAMES: [&str; 2] = ["tinynccl", "tinynccl-cli"];

pub(crate) fn run(options: &Options) -> Result<()> {
    let command = || crate::Options::command().mut_subcommand("pages", |pages| pages.hide(true));
    let man = made(options.folder.join("man/man1"))?;
    clap_mangen::generate_to(command().name(NAMES[0]), &man).context("writing the man pages")?;
    write(&man.join("tinynccl-cli.1"), b".so man1/tinynccl.1\n")?;
    for (shell, folder) in [
        (Shell::Bash, "bash-completion/completions"),
        (Shell::Zsh, "zsh/site-functions"),
        (Shell::Fish, "fish/vendor_completions.d"),
    ] {
        let folder = made(options.folder.join(folder))?;
        for name in NAMES {
            let file = match shell {
                Shell::Zsh => format!("_{name}"),
                Shell::Fish => format!("{name}.fish"),
                _ => name.to_owned(),
            };
            let mut text = Vec::new();
            generate(shell, &mut command(), name, &mut text);
            write(&folder.join(file), &text)?;
        }
    }
    Ok(())
}

fn made(folder: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

fn write(file: &Path, text: &[u8]) -> Result<()> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}
