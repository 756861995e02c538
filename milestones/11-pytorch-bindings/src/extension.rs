//! Builds the extension module and lays out the package `tinynccl` as Python wants it. A wheel holds the same files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::unavailable::Unavailable;

/// The checkout that this program was built from.
fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the extension (`cargo build --release -p tinynccl-python`) and returns the folder to put into `PYTHONPATH`.
pub fn build() -> Result<PathBuf> {
    let root = checkout();
    ensure!(
        root.join("bindings/python/Cargo.toml").is_file(),
        Unavailable(format!("no checkout in {}: give the folder of a built package, --module DIR", root.display()))
    );
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let output = Command::new(&cargo)
        .current_dir(&root)
        .args(["build", "--release", "--locked", "-p", "tinynccl-python", "--message-format=json-render-diagnostics"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting {}", cargo.display()))?;
    ensure!(output.status.success(), "cargo could not build the extension ({})", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let library = library(&text).context("cargo did not say where it put libtinynccl_python.so")?;
    let package = library.with_file_name("python").join("tinynccl");
    lay_out(&root.join("bindings/python/python/tinynccl"), &library, &package)?;
    Ok(library.with_file_name("python"))
}

/// The path of the library in cargo's messages.
fn library(messages: &str) -> Option<PathBuf> {
    let end = messages.find("libtinynccl_python.so\"")? + "libtinynccl_python.so".len();
    let start = messages[..end].rfind('"')? + 1;
    Some(PathBuf::from(&messages[start..end]))
}

/// Copies only what is newer, each file in one step: another program may be reading them.
fn lay_out(sources: &Path, library: &Path, package: &Path) -> Result<()> {
    std::fs::create_dir_all(package).with_context(|| format!("making {}", package.display()))?;
    let mut files = vec![(library.to_owned(), package.join("_core.abi3.so"))];
    for entry in std::fs::read_dir(sources).with_context(|| format!("reading {}", sources.display()))? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            files.push((path.clone(), package.join(name)));
        }
    }
    for (from, to) in files {
        let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
        if changed(&to) >= changed(&from) {
            continue;
        }
        let new = to.with_extension(format!("new-{}", std::process::id()));
        std::fs::copy(&from, &new).with_context(|| format!("copying {} to {}", from.display(), new.display()))?;
        std::fs::rename(&new, &to).with_context(|| format!("putting {} in place", to.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_library_in_cargos_messages() {
        let messages =
            r#"{"reason":"compiler-artifact","filenames":["/a/target/release/libtinynccl_python.so"],"x":1}"#;
        assert_eq!(library(messages), Some(PathBuf::from("/a/target/release/libtinynccl_python.so")));
        assert_eq!(library("{}"), None);
    }
}
