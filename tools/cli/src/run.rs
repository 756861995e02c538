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

/// Our library as cargo names it, and as it is installed.
const LIBRARY: [&str; 2] = ["libnccl.so", "libnccl.so.2"];
/// The loader's audit library.
const AUDIT: &str = "libnccl_audit.so";
/// The commands that build them.
pub(crate) const BUILD: &str = "cargo build --release -p tinynccl-nccl";
const BUILD_AUDIT: &str = "cargo build --release -p tinynccl-nccl-audit";
/// Environment variable with the path of the library that the audit library answers with.
const AUDITED: &str = "TINYNCCL_NCCL_LIBRARY";

/// Starts a program with tinynccl's libnccl.so.2 in place of NVIDIA's: sets LD_PRELOAD, and becomes the program.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Sets LD_AUDIT, too: for programs that open the library by its path, as JAX does.
    #[arg(long)]
    audit: bool,
    /// The library [default: libnccl.so in the folder of this program, in lib/tinynccl beside it, in target/release
    /// or in target/debug].
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
        None => find(&LIBRARY, BUILD)?,
    };
    nccl::open_elsewhere(&library).with_context(|| format!("{} cannot be loaded", library.display()))?;
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", list(&library, std::env::var_os("LD_PRELOAD"))?);
    if options.audit {
        let beside = library.with_file_name(AUDIT);
        let audit = match beside.is_file() {
            true => absolute(&beside)?,
            false => find(&[AUDIT], BUILD_AUDIT)?,
        };
        command.env("LD_AUDIT", list(&audit, std::env::var_os("LD_AUDIT"))?).env(AUDITED, &library);
    }
    process::ignore_children_as_before();
    let error = command.exec();
    Err(error).with_context(|| format!("starting {}", program.display()))
}

/// Our library, if it was built.
pub(crate) fn ours() -> Option<PathBuf> {
    first(&folders(), &LIBRARY)
}

/// The command that starts this program, as a user in this folder types it.
pub(crate) fn this_program() -> String {
    let (program, here) = (std::env::current_exe(), std::env::current_dir());
    let program = program.unwrap_or_else(|_| PathBuf::from("tinynccl-cli"));
    let below = here.ok().and_then(|here| program.strip_prefix(here).ok().map(Path::to_owned));
    below.unwrap_or(program).display().to_string()
}

/// Folders of the libraries, best first: this program's; `lib/tinynccl` beside it, where `cargo xtask dist` installs them;
/// those of either profile, where cargo built this program beside them.
fn folders() -> Vec<PathBuf> {
    let own = std::env::current_exe().ok().and_then(|program| program.parent().map(Path::to_owned));
    let target = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let installed = target.as_deref().map(|prefix| prefix.join("lib/tinynccl"));
    let profiles = target.into_iter().flat_map(|target| ["release", "debug"].map(|p| target.join(p)));
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in own.into_iter().chain(installed).chain(profiles) {
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

/// The first file of one of these names in one of these folders.
fn first(folders: &[PathBuf], names: &[&str]) -> Option<PathBuf> {
    folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name))).find(|file| file.is_file())
}

/// A library of ours in one of the [`folders`].
fn find(names: &[&str], build: &str) -> Result<PathBuf> {
    let folders = folders();
    if let Some(file) = first(&folders, names) {
        return absolute(&file);
    }
    let name = names.first().copied().unwrap_or_default();
    let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    bail!(
        "{name} is not built (looked in {}): run `{build}` in the checkout, then this command again; or name the library \
         with --library",
        folders.join(", ")
    )
}

/// The file's path from the root, because the program may change its folder.
fn absolute(file: &Path) -> Result<PathBuf> {
    let found = file.canonicalize().ok().filter(|path| path.is_file());
    found.ok_or_else(|| {
        anyhow!(
            "{} is not there: `{BUILD}` makes target/release/{}, which is found without --library",
            file.display(),
            LIBRARY[0]
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
    fn what_is_not_built_is_an_error_with_the_command_that_builds_it() {
        let error = find(&["libnone.so"], BUILD).unwrap_err().to_string();
        assert!(error.starts_with("libnone.so is not built (looked in /"), "{error}");
        let own = std::env::current_exe().unwrap();
        assert!(error.contains(own.parent().unwrap().to_str().unwrap()) && error.contains("/release"), "{error}");
        assert!(error.contains("run `cargo build --release -p tinynccl-nccl` in"), "{error}");
    }

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
