//! The learner's folder: `learn/` in the checkout, which git ignores. A separate cargo workspace, so that nothing in
//! it can break ours; its manifest is made from ours, so that the milestones' own manifests work there as they are.

use std::collections::BTreeSet;
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

    /// Returns the folder of the learner's step.
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
        let lock = read("Cargo.lock")?;
        let used = used(&lock, STEPS.iter().filter(|s| self.started(s)).map(|s| s.name))?;
        write(&self.folder.join("Cargo.toml"), &manifest(&read("Cargo.toml")?, &used)?)?;
        // The same versions as ours, downloaded and built already. Cargo then writes in what the learner adds.
        let copied = self.folder.join(".Cargo.lock.ours");
        if std::fs::read_to_string(&copied).ok().as_ref() != Some(&lock) {
            write(&self.folder.join("Cargo.lock"), &lock)?;
            write(&copied, &lock)?;
        }
        write(&self.folder.join(".cargo/config.toml"), &config())
    }

    /// A path for people: from the checkout.
    pub fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }
}

/// Programs are built into the learner's folder, so none is mistaken for ours. Intermediate files are shared with ours
/// by cargo 1.91 or later; an older one warns about the unknown setting and builds the dependencies again.
/// A rank waits as briefly as [`CONNECT_TIMEOUT`] for one that has failed or was never started.
fn config() -> String {
    let (name, seconds) = CONNECT_TIMEOUT;
    format!("[build]\ntarget-dir = \"target\"\nbuild-dir = \"../target\"\n\n[env]\n{name} = \"{seconds}\"\n")
}

/// Environment variable and its value in seconds: the time that a learner's ranks wait for each other.
pub(crate) const CONNECT_TIMEOUT: (&str, &str) = ("TINYNCCL_CONNECT_TIMEOUT", "10");

/// The packages that `steps` need by the lock file `ours`, directly or not.
fn used(ours: &str, steps: impl Iterator<Item = &'static str>) -> Result<BTreeSet<String>> {
    let table: Table = ours.parse().context("reading the checkout's Cargo.lock")?;
    let packages = table.get("package").and_then(Value::as_array).context("Cargo.lock has no packages")?;
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = steps.collect();
    let has = |package: &Value, key: &str, text: &str| package.get(key).and_then(Value::as_str) == Some(text);
    let mut seen = BTreeSet::new();
    while let Some(wanted) = open.pop() {
        // `name`, or `name version` where there are several.
        let (name, version) = wanted.split_once(' ').unwrap_or((wanted, ""));
        let fits = |p: &&Value| has(p, "name", name) && (version.is_empty() || has(p, "version", version));
        for package in packages.iter().filter(fits).filter(|_| seen.insert(wanted)) {
            found.insert(name.to_owned());
            let needs = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
            open.extend(needs.filter_map(Value::as_str));
        }
    }
    Ok(found)
}

/// The workspace's manifest, made from ours: the same versions, lints and profiles, for the packages [`used`] there.
fn manifest(ours: &str, used: &BTreeSet<String>) -> Result<String> {
    let mut table: Table = ours.parse().context("reading the checkout's Cargo.toml")?;
    let workspace = table.get_mut("workspace").and_then(Value::as_table_mut).context("Cargo.toml has no workspace")?;
    workspace.insert("members".to_owned(), Value::Array(vec!["[0-9][0-9]-*".into()]));
    workspace.remove("exclude");
    if let Some(package) = workspace.get_mut("package").and_then(Value::as_table_mut) {
        // The learner's verbs-hello and ours may stand in one lock file: their versions tell them apart.
        let version = package.get("version").and_then(Value::as_str).unwrap_or("0.0.0");
        package.insert("version".to_owned(), format!("{version}-learn").into());
    }
    let mut library = Vec::new();
    if let Some(dependencies) = workspace.get_mut("dependencies").and_then(Value::as_table_mut) {
        for (name, dependency) in dependencies.iter_mut() {
            if let Some(path) = dependency.get_mut("path") {
                library.extend(path.as_str().filter(|p| p.starts_with("lib")).map(|_| name.clone()));
                *path = format!("../{}", path.as_str().unwrap_or_default()).into();
            }
        }
    }
    // A body that is not written yet leaves imports, arguments and functions unused; and no one reads a learner's
    // documentation.
    for (group, lint) in [("rust", "unused"), ("rust", "missing_docs"), ("rust", "unreachable_pub"), ("clippy", "todo")]
    {
        let lints = workspace.entry("lints").or_insert_with(|| Table::new().into()).as_table_mut();
        let group = lints.map(|l| l.entry(group).or_insert_with(|| Table::new().into())).and_then(Value::as_table_mut);
        group.context("lints are no table")?.insert(lint.to_owned(), "allow".into());
    }
    let profiles = table.get_mut("profile").and_then(Value::as_table_mut).context("Cargo.toml has no profiles")?;
    // Cargo warns of packages that are not used.
    for profile in profiles.iter_mut().filter_map(|(_, profile)| profile.as_table_mut()) {
        if let Some(packages) = profile.get_mut("package").and_then(Value::as_table_mut) {
            packages.retain(|name, _| name == "*" || used.contains(name));
        }
    }
    let dev = profiles.get_mut("dev").and_then(Value::as_table_mut).context("Cargo.toml has no profile dev")?;
    let own: Table =
        ["opt-level", "debug"].iter().filter_map(|k| Some(((*k).to_owned(), dev.get(*k)?.clone()))).collect();
    let packages = dev.get_mut("package").and_then(Value::as_table_mut).context("profiles of packages")?;
    // The library is no member there, so it would be built like the other dependencies, and again.
    packages.extend(library.into_iter().filter(|name| used.contains(name)).map(|name| (name, own.clone().into())));
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
        let read = |name: &str| std::fs::read_to_string(crate::course::checkout().join(name)).unwrap();
        let (ours, lock) = (read("Cargo.toml"), read("Cargo.lock"));
        let of = |step: &'static str| manifest(&ours, &used(&lock, [step].into_iter()).unwrap()).unwrap();
        let (with, without) = (of("lib-hello"), of("tcp-echo"));
        let table: Table = with.parse().unwrap();
        assert_eq!(table["workspace"]["dependencies"]["tinynccl"]["path"].as_str(), Some("../lib"));
        assert_eq!(table["workspace"]["package"]["version"].as_str(), Some("0.1.0-learn"));
        assert_eq!(table["workspace"]["lints"]["rust"]["unused"].as_str(), Some("allow"));
        let old: Table = ours.parse().unwrap();
        assert_eq!(table["workspace"]["dependencies"]["half"], old["workspace"]["dependencies"]["half"]);
        assert_eq!(table["workspace"]["lints"]["clippy"]["dbg_macro"].as_str(), Some("deny"));
        assert!(table["profile"]["dev"]["package"].get("tinynccl").is_some());
        assert!(table["profile"]["dev"]["package"].get("sha2").is_some(), "the library uses it");
        for name in ["tinynccl", "sha2"] {
            assert!(!without.contains(&format!("profile.dev.package.{name}]")), "cargo warns of packages not used");
        }
        assert!(!without.contains("profile.release.package.tinynccl-comm]"), "{without}");
    }

    #[test]
    fn the_folder_is_one_name() {
        for bad in ["", "a/b", "..", "/tmp/x", "a.b"] {
            assert!(Learn::new(Path::new("/x"), bad).is_err(), "{bad}");
        }
        assert_eq!(Learn::new(Path::new("/x"), "learn").unwrap().folder, Path::new("/x/learn"));
    }
}
