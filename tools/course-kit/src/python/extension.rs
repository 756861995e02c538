//! Builds the extension module and lays out the package `tinynccl` as Python expects it. A wheel holds the same files.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use super::Unavailable;

/// The checkout that this program was built from.
fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Builds the extension (`cargo build -p tinynccl-python`) as this program was built, `--release` or not, so that both
/// share the library; returns the folder for `PYTHONPATH`.
pub fn build() -> Result<PathBuf> {
    let root = checkout();
    ensure!(
        root.join("bindings/python/Cargo.toml").is_file(),
        Unavailable(format!("no checkout in {}: give the folder of a built package, --module DIR", root.display()))
    );
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let output = Command::new(&cargo)
        .current_dir(&root)
        .args(["build", "--locked", "-p", "tinynccl-python", "--message-format=json-render-diagnostics"])
        .args((!cfg!(debug_assertions)).then_some("--release"))
        .args(cfg!(feature = "verbs").then_some("--features=tinynccl-python/verbs"))
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

/// Copies newer files only, and replaces each atomically, as another program may be reading it.
fn lay_out(sources: &Path, library: &Path, package: &Path) -> Result<()> {
    copy_folder(sources, package)?;
    copy_newer(library, &package.join("_core.abi3.so"))
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
    for entry in std::fs::read_dir(from).with_context(|| format!("reading {}", from.display()))? {
        let (path, name) = entry.map(|e| (e.path(), e.file_name()))?;
        match path.is_dir() {
            true if name == "__pycache__" => {}
            true => copy_folder(&path, &to.join(name))?,
            false => copy_newer(&path, &to.join(name))?,
        }
    }
    Ok(())
}

fn copy_newer(from: &Path, to: &Path) -> Result<()> {
    let changed = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    if changed(to) >= changed(from) {
        return Ok(());
    }
    let new = to.with_extension(format!("new-{}", std::process::id()));
    std::fs::copy(from, &new).with_context(|| format!("copying {} to {}", from.display(), new.display()))?;
    std::fs::rename(&new, to).with_context(|| format!("putting {} in place", to.display()))
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

    #[test]
    fn lays_out_folders_and_only_what_is_newer() {
        let folder = std::env::temp_dir().join(format!("tinynccl-lay-out-{}", std::process::id()));
        let (sources, library, package) = (folder.join("sources"), folder.join("lib.so"), folder.join("package"));
        std::fs::create_dir_all(sources.join("torch/__pycache__")).unwrap();
        std::fs::write(sources.join("torch/work.py"), "old").unwrap();
        std::fs::write(&library, "library").unwrap();
        lay_out(&sources, &library, &package).unwrap();
        let read = |name: &str| std::fs::read_to_string(package.join(name)).unwrap();
        assert_eq!((read("torch/work.py"), read("_core.abi3.so")), ("old".to_owned(), "library".to_owned()));
        assert!(!package.join("torch/__pycache__").exists());
        // Newer than its source, so it must stay.
        std::fs::write(package.join("torch/work.py"), "mine").unwrap();
        lay_out(&sources, &library, &package).unwrap();
        assert_eq!(read("torch/work.py"), "mine");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
