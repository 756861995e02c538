//! A milestone's files: listed and read.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::body::Language;

/// The files of a milestone's folder, from there, sorted. Without the README, which is read where it is.
///
/// # Errors
/// A folder that cannot be read.
pub fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(below) = folders.pop() {
        let path = folder.join(&below);
        for entry in std::fs::read_dir(&path).with_context(|| format!("reading {}", path.display()))? {
            let entry = entry.with_context(|| format!("reading {}", path.display()))?;
            let name = below.join(entry.file_name());
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && entry.file_name() != "__pycache__" && entry.file_name() != "target" => {
                    folders.push(name);
                }
                Ok(kind) if kind.is_file() && name != Path::new("README.md") => found.push(name),
                _ => {}
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The text of a file that exercises may stand in; nothing for others.
///
/// # Errors
/// It cannot be read.
pub fn read(file: &Path) -> Result<Option<String>> {
    match Language::of(file) {
        Some(_) => std::fs::read_to_string(file).map(Some).with_context(|| format!("reading {}", file.display())),
        None => Ok(None),
    }
}
