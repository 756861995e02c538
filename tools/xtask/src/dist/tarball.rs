//! An archive whose bytes follow from its files and the commit, its SBOM, and the checksums of both.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::succeeds;

/// Writes `staged` as an archive into `folder`, and returns the files.
///
/// # Errors
/// git, tar, sha256sum or a file fails.
pub(super) fn write(checkout: &Path, staged: &Path, folder: &Path, sbom: &Value) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    let name = staged.file_name().unwrap_or_default().to_string_lossy();
    let (archive, list) = (format!("{name}.tar.gz"), format!("{name}.cdx.json"));
    let text = serde_json::to_string_pretty(sbom).context("writing the SBOM")?;
    fs::write(folder.join(&list), text + "\n").with_context(|| format!("writing {list}"))?;

    let mut tar = Command::new("tar");
    tar.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--format=gnu",
        "--use-compress-program=gzip -n9",
    ])
    .arg(format!("--mtime=@{}", time(checkout)?))
    .arg("-cf")
    .arg(folder.join(&archive))
    .arg("-C")
    .args([staged.parent().unwrap_or(staged), Path::new(&*name)]);
    succeeds(&mut tar, "tar")?;

    let sums = Command::new("sha256sum").current_dir(folder).args([&archive, &list]).output();
    let sums = sums.context("starting sha256sum")?;
    ensure!(sums.status.success(), "sha256sum failed: {}", String::from_utf8_lossy(&sums.stderr));
    fs::write(folder.join("SHA256SUMS"), sums.stdout).context("writing SHA256SUMS")?;
    Ok([archive.as_str(), list.as_str(), "SHA256SUMS"].map(|file| folder.join(file)).to_vec())
}

/// Seconds since 1970 of the files in the archive: SOURCE_DATE_EPOCH, else the commit's.
fn time(checkout: &Path) -> Result<u64> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => {
            let git = Command::new("git").current_dir(checkout).args(["log", "-1", "--format=%ct"]).output();
            String::from_utf8_lossy(&git.context("starting git")?.stdout).into_owned()
        }
    };
    text.trim().parse().with_context(|| format!("'{}' is no time: set SOURCE_DATE_EPOCH", text.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let staged = folder.path().join("x-1");
        fs::create_dir(&staged).unwrap();
        let checkout = crate::course::checkout();
        let once = |out: &str| {
            fs::write(staged.join("file"), "text").unwrap();
            let out = folder.path().join(out);
            let made = write(&checkout, &staged, &out, &serde_json::json!({})).unwrap();
            assert!(made.iter().all(|file| file.is_file()), "{made:?}");
            let sums = fs::read_to_string(out.join("SHA256SUMS")).unwrap();
            assert_eq!(sums.lines().count(), 2, "{sums}");
            sums
        };
        assert_eq!(once("a"), once("b"));
    }
}
