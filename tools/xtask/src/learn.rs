//! The learner's folder: `learn/` in the checkout, which git ignores. A cargo workspace of its own, so that nothing in
//! it can break ours; its manifest is made from ours, so that the milestones' own manifests work there as they are.
//!
//! A milestone that uses another one (05 uses 02) is given ours of the other, not the learner's: an exercise of one
//! step cannot break another step.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use toml::{Table, Value};

use crate::course::{STEPS, Step};
use crate::{files, stub};

/// The folder of all that a learner writes.
#[derive(Debug, Clone)]
pub struct Learn {
    /// The checkout.
    pub root: PathBuf,
    /// `learn`, beside `milestones`: paths between packages are as long in both.
    pub folder: PathBuf,
}

impl Learn {
    /// The folder `name` of the checkout.
    ///
    /// # Errors
    /// `name` is more than a name: paths from there would not fit.
    pub fn new(root: &Path, name: &str) -> Result<Learn> {
        ensure!(
            !name.is_empty() && !name.contains(['/', '.']),
            "TINYNCCL_LEARN is '{name}': expected the name of a folder in the checkout, like learn"
        );
        Ok(Learn { root: root.to_owned(), folder: root.join(name) })
    }

    /// Where the learner's step is.
    pub fn step(&self, step: &Step) -> PathBuf {
        self.folder.join(step.folder())
    }

    /// True when it was started.
    pub fn started(&self, step: &Step) -> bool {
        self.step(step).join("Cargo.toml").is_file()
    }

    /// Gives the learner the step's stub.
    ///
    /// # Errors
    /// It was started before; a file cannot be read or written.
    pub fn start(&self, step: &Step) -> Result<()> {
        let (from, to) = (step.solution(&self.root), self.step(step));
        ensure!(
            !to.exists(),
            "{} is there already: go on with it, or `cargo xtask reset {:02}`, which keeps it aside",
            self.shown(&to),
            step.number
        );
        // Under another name until it is complete, so an interrupted start leaves no half of a step.
        let part = self.folder.join(format!(".{}.part", step.folder()));
        if part.exists() {
            std::fs::remove_dir_all(&part).with_context(|| format!("removing {}", part.display()))?;
        }
        for file in files::list(&from)? {
            let (source, target) = (from.join(&file), part.join(&file));
            if let Some(folder) = target.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
            }
            match files::read(&source)? {
                Some(text) => write(&target, &stub::strip(step, &file, &text)?)?,
                None if file == Path::new("Cargo.toml") => {
                    let manifest =
                        std::fs::read_to_string(&source).with_context(|| format!("reading {}", source.display()))?;
                    write(&target, &manifest.replace("path = \"../", "path = \"../../milestones/"))?;
                }
                None => {
                    std::fs::copy(&source, &target).with_context(|| format!("copying {}", source.display()))?;
                }
            }
        }
        std::fs::rename(&part, &to).with_context(|| format!("putting {} in place", to.display()))?;
        self.prepare()
    }

    /// Moves the learner's step to a folder in `backup`, and starts it again. Returns that folder.
    ///
    /// # Errors
    /// It was not started; a folder cannot be moved.
    pub fn reset(&self, step: &Step) -> Result<PathBuf> {
        let now = self.step(step);
        ensure!(now.exists(), "{} was not started: `cargo xtask start {:02}`", step.folder(), step.number);
        let backup = self.folder.join("backup");
        std::fs::create_dir_all(&backup).with_context(|| format!("making {}", backup.display()))?;
        for n in 1..10_000 {
            let old = backup.join(format!("{}-{n}", step.folder()));
            if !old.exists() {
                std::fs::rename(&now, &old)
                    .with_context(|| format!("moving {} to {}", now.display(), old.display()))?;
                self.start(step)?;
                return Ok(old);
            }
        }
        bail!("{} holds too many: remove some", backup.display())
    }

    /// Writes what makes the folder a workspace: again each time, because ours may have changed.
    ///
    /// # Errors
    /// Our manifest cannot be read, or theirs not written.
    pub fn prepare(&self) -> Result<()> {
        let read = |name: &str| {
            let path = self.root.join(name);
            std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let mut uses_library = false;
        for step in STEPS.iter().filter(|s| self.started(s)) {
            let path = self.step(step).join("Cargo.toml");
            let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            uses_library |= text.lines().any(|line| line.starts_with("tinynccl"));
        }
        write(&self.folder.join("Cargo.toml"), &manifest(&read("Cargo.toml")?, uses_library)?)?;
        // The same versions as ours, downloaded and built already. Cargo then writes in what the learner adds.
        let (lock, copied) = (read("Cargo.lock")?, self.folder.join(".Cargo.lock.ours"));
        if std::fs::read_to_string(&copied).ok().as_ref() != Some(&lock) {
            write(&self.folder.join("Cargo.lock"), &lock)?;
            write(&copied, &lock)?;
        }
        write(&self.folder.join(".cargo/config.toml"), CONFIG)
    }

    /// A path for people: from the checkout.
    pub fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }
}

/// Programs are built into the learner's folder, so none is mistaken for ours. Intermediate files are shared with ours
/// by cargo 1.91 or later; an older one warns about the unknown setting and builds the dependencies again.
const CONFIG: &str = "[build]\ntarget-dir = \"target\"\nbuild-dir = \"../target\"\n";

/// The workspace's manifest, made from ours: the same versions, lints and profiles.
fn manifest(ours: &str, uses_library: bool) -> Result<String> {
    let mut table: Table = ours.parse().context("reading the checkout's Cargo.toml")?;
    let workspace = table.get_mut("workspace").and_then(Value::as_table_mut).context("Cargo.toml has no workspace")?;
    workspace.insert("members".to_owned(), Value::Array(vec!["[0-9][0-9]-*".into()]));
    workspace.remove("exclude");
    if let Some(package) = workspace.get_mut("package").and_then(Value::as_table_mut) {
        // The learner's verbs-hello and ours may stand in one lock file: their versions tell them apart.
        let version = package.get("version").and_then(Value::as_str).unwrap_or("0.0.0");
        package.insert("version".to_owned(), format!("{version}-learn").into());
    }
    if let Some(dependencies) = workspace.get_mut("dependencies").and_then(Value::as_table_mut) {
        for (_, dependency) in dependencies.iter_mut() {
            if let Some(path) = dependency.get_mut("path") {
                *path = format!("../{}", path.as_str().unwrap_or_default()).into();
            }
        }
    }
    // A body that is not written yet leaves imports, arguments and functions unused; and nobody reads a learner's
    // documentation.
    for (group, lint) in [("rust", "unused"), ("rust", "missing_docs"), ("rust", "unreachable_pub"), ("clippy", "todo")]
    {
        let lints = workspace.entry("lints").or_insert_with(|| Table::new().into()).as_table_mut();
        let group = lints.map(|l| l.entry(group).or_insert_with(|| Table::new().into())).and_then(Value::as_table_mut);
        group.context("lints are no table")?.insert(lint.to_owned(), "allow".into());
    }
    // Our library is no member there, so it would be optimised like the other dependencies: slow to build.
    if uses_library
        && let Some(dev) = table.get_mut("profile").and_then(|p| p.get_mut("dev")).and_then(Value::as_table_mut)
    {
        let level = dev.get("opt-level").cloned().unwrap_or(Value::Integer(1));
        let packages =
            dev.entry("package").or_insert_with(|| Table::new().into()).as_table_mut().context("profiles")?;
        packages.insert("tinynccl".to_owned(), Table::from_iter([("opt-level".to_owned(), level)]).into());
    }
    Ok(format!("# Made by cargo xtask from the checkout's Cargo.toml, and made again each time.\n{table}"))
}

/// Writes a file, and its folder, unless it holds this already.
fn write(path: &Path, text: &str) -> Result<()> {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_is_ours_seen_from_one_folder_below() {
        let ours = std::fs::read_to_string(crate::course::checkout().join("Cargo.toml")).unwrap();
        let (with, without) = (manifest(&ours, true).unwrap(), manifest(&ours, false).unwrap());
        let table: Table = with.parse().unwrap();
        assert_eq!(table["workspace"]["dependencies"]["tinynccl"]["path"].as_str(), Some("../lib"));
        assert_eq!(table["workspace"]["package"]["version"].as_str(), Some("0.1.0-learn"));
        assert_eq!(table["workspace"]["lints"]["rust"]["unused"].as_str(), Some("allow"));
        let old: Table = ours.parse().unwrap();
        assert_eq!(table["workspace"]["dependencies"]["half"], old["workspace"]["dependencies"]["half"]);
        assert_eq!(table["workspace"]["lints"]["clippy"]["dbg_macro"].as_str(), Some("deny"));
        assert!(table["profile"]["dev"]["package"].get("tinynccl").is_some());
        assert!(!without.contains("profile.dev.package.tinynccl"), "cargo warns of packages that are not used");
    }

    #[test]
    fn the_folder_is_one_name() {
        for bad in ["", "a/b", "..", "/tmp/x", "a.b"] {
            assert!(Learn::new(Path::new("/x"), bad).is_err(), "{bad}");
        }
        assert_eq!(Learn::new(Path::new("/x"), "learn").unwrap().folder, Path::new("/x/learn"));
    }
}
