//! `run`: starts a program, unchanged, with our `libnccl.so.2` in place of NVIDIA's.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use program_kit::process;

use crate::doctor::nccl;

/// Our library, and the loader's audit library beside it, as cargo names them.
const LIBRARY: &str = "libnccl.so";
const AUDIT: &str = "libnccl_audit.so";
/// Where the audit library learns which library it answers with.
const AUDITED: &str = "TINYNCCL_NCCL_LIBRARY";

/// Starts a program with tinynccl's libnccl.so.2 in place of NVIDIA's: sets LD_PRELOAD, and becomes the program.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sets LD_AUDIT, too: for programs that open the library by its path, as JAX does.
    #[arg(long)]
    audit: bool,
    /// The library [default: libnccl.so in the folder of this program].
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Becomes the program.
///
/// # Errors
/// A library is missing or cannot be loaded (the loader itself would go on without it), or the program cannot start.
pub(crate) fn run(options: &Options) -> Result<()> {
    let [program, arguments @ ..] = options.command.as_slice() else { bail!("no program given") };
    let library = match &options.library {
        Some(file) => absolute(file)?,
        None => absolute(&folder_of_this_program()?.join(LIBRARY))?,
    };
    nccl::open_elsewhere(&library).with_context(|| format!("{} cannot be loaded", library.display()))?;
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", list(&library, std::env::var_os("LD_PRELOAD"))?);
    if options.audit {
        let beside = library.with_file_name(AUDIT);
        let audit = match beside.is_file() {
            true => absolute(&beside)?,
            false => absolute(&folder_of_this_program()?.join(AUDIT))?,
        };
        command.env("LD_AUDIT", list(&audit, std::env::var_os("LD_AUDIT"))?).env(AUDITED, &library);
    }
    process::ignore_children_as_before();
    let error = command.exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}

/// Our library, if it was built beside this program.
pub(crate) fn beside_this_program() -> Option<PathBuf> {
    folder_of_this_program().ok().map(|folder| folder.join(LIBRARY)).filter(|library| library.is_file())
}

fn folder_of_this_program() -> Result<PathBuf> {
    let mut folder = std::env::current_exe().context("finding this program")?;
    folder.pop();
    Ok(folder)
}

/// The file's path from the root, because the program may change its folder.
fn absolute(file: &Path) -> Result<PathBuf> {
    let found = file.canonicalize().ok().filter(|path| path.is_file());
    found.ok_or_else(|| {
        anyhow!(
            "{} is not there: build it with `cargo build --release -p tinynccl-nccl -p tinynccl-nccl-audit \
             -p tinynccl-cli`, or name the library with --library",
            file.display()
        )
    })
}

/// The list that the loader reads, with `first` before what is there.
fn list(first: &Path, rest: Option<OsString>) -> Result<OsString> {
    let bytes = first.as_os_str().as_bytes();
    if bytes.iter().any(|byte| matches!(byte, b':' | b' ')) {
        bail!("{}: the loader's lists separate paths by colons and blanks; move the library", first.display());
    }
    let mut list = first.as_os_str().to_owned();
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        list.push(OsStr::new(":"));
        list.push(rest);
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_comes_first_and_the_rest_stays() {
        let of = |rest: Option<&str>| list(Path::new("/a/libnccl.so"), rest.map(OsString::from)).unwrap();
        assert_eq!(of(None), "/a/libnccl.so");
        assert_eq!(of(Some("")), "/a/libnccl.so");
        assert_eq!(of(Some("/b/libjemalloc.so /c")), "/a/libnccl.so:/b/libjemalloc.so /c");
        for path in ["/a b/libnccl.so", "/a:b/libnccl.so"] {
            assert!(list(Path::new(path), None).is_err_and(|error| error.to_string().contains("blanks")), "{path}");
        }
    }
}
