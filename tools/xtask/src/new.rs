//! `cargo xtask new PATH`: a program of the reader's own over the library, ready to run.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use program_kit::Usage;

/// The program: the library's first example.
const MAIN: &str = include_str!("../../../lib/examples/all_reduce.rs");

/// Last line of what the program prints.
pub const PRINTS: &str = "[rank 0] 2 ranks, 1";

/// Writes a package to `path` that depends on the library of the checkout `root`, and returns its folder.
///
/// # Errors
/// `path` is there already or has no name for a package; a file cannot be written.
pub fn make(root: &Path, path: &Path) -> Result<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let fits = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_'));
    let usage =
        || Usage(format!("'{}': expected a folder whose name is a package's, like ../my-program", path.display()));
    ensure!(fits, usage());
    ensure!(!path.exists(), "{} is there already: give another name, or remove it", path.display());
    let write = |file: &str, text: &str| {
        let file = path.join(file);
        std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()))
    };
    std::fs::create_dir_all(path.join("src")).with_context(|| format!("making {}", path.display()))?;
    write("Cargo.toml", &manifest(root, name))?;
    write("src/main.rs", &program())?;
    write(".gitignore", "/target\n")?;
    // The versions that the library is tested with; cargo leaves out those that this program does not need.
    std::fs::copy(root.join("Cargo.lock"), path.join("Cargo.lock")).context("copying Cargo.lock")?;
    std::path::absolute(path).with_context(|| format!("finding {}", path.display()))
}

fn manifest(root: &Path, name: &str) -> String {
    let lib = root.join("lib");
    format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         # Without the clone: {{ git = \"https://github.com/tinynccl/tinynccl\" }}\n\
         tinynccl = {{ path = {:?} }}\n\n\
         # Sums are slow without optimization.\n[profile.dev.package.\"*\"]\nopt-level = 3\n\n\
         # A workspace of its own, also inside of another one.\n[workspace]\n",
        lib.display().to_string()
    )
}

/// Text of [`MAIN`] without the line that says how to run it as an example.
fn program() -> String {
    let body = MAIN.trim_start_matches(|c| c != '\n').trim_start();
    format!("//! Two ranks, each a process, add up what they have.\n\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::course::checkout;

    #[test]
    fn a_new_program_is_a_package_of_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let path = make(&checkout(), &folder.path().join("a/my-program")).unwrap();
        let manifest: toml::Table = std::fs::read_to_string(path.join("Cargo.toml")).unwrap().parse().unwrap();
        assert_eq!(manifest["package"]["name"].as_str(), Some("my-program"));
        let library = manifest["dependencies"]["tinynccl"]["path"].as_str().unwrap();
        assert!(Path::new(library).join("Cargo.toml").is_file(), "{library}");
        let main = std::fs::read_to_string(path.join("src/main.rs")).unwrap();
        assert!(
            main.starts_with("//! Two ranks") && main.contains("\nuse tinynccl::launch") && !main.contains("--example")
        );
        assert!(make(&checkout(), &path).unwrap_err().to_string().contains("is there already"));
        for bad in ["", "..", "My program", "7up"] {
            assert!(make(&checkout(), Path::new(bad)).is_err(), "{bad}");
        }
    }
}
