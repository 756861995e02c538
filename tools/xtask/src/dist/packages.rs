//! The crates that a build holds, as cargo resolves them, and the SBOM that lists them (CycloneDX 1.5).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// Answer of `cargo metadata`, in part.
pub(super) struct Metadata {
    all: Value,
    /// Version of the workspace.
    pub(super) version: String,
    /// Cargo's folder for what it builds.
    pub(super) target: PathBuf,
}

impl Metadata {
    /// Asks cargo.
    ///
    /// # Errors
    /// Cargo fails, or its answer lacks a field.
    pub(super) fn read(checkout: &Path) -> Result<Metadata> {
        let triple = super::triple();
        let output = Command::new("cargo")
            .current_dir(checkout)
            .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", &triple])
            .args(["--features", "tinynccl-cli/pages"])
            .stderr(std::process::Stdio::inherit())
            .output()
            .context("starting cargo metadata")?;
        ensure!(output.status.success(), "cargo metadata failed ({})", output.status);
        let all: Value = serde_json::from_slice(&output.stdout).context("reading cargo's metadata")?;
        let target = all["target_directory"].as_str().context("cargo's metadata has no target_directory")?.into();
        let version = package(&all, |p| p["name"] == "tinynccl")?["version"].as_str().unwrap_or_default().to_owned();
        Ok(Metadata { all, version, target })
    }

    /// Cargo's folder with the sources of crates.
    ///
    /// # Errors
    /// No crate comes from a registry.
    pub(super) fn cargo_home(&self) -> Result<PathBuf> {
        let packages = self.all["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
        let foreign = packages.iter().find(|p| !p["source"].is_null()).and_then(|p| p["manifest_path"].as_str());
        // …/registry/src/REGISTRY/CRATE/Cargo.toml
        let folder = foreign.and_then(|path| Path::new(path).ancestors().nth(2)).context("no crate of a registry")?;
        Ok(folder.to_owned())
    }

    /// The SBOM of `roots` and all that is linked into them. It has neither a date nor a serial number: one commit gives one
    /// file.
    ///
    /// # Errors
    /// A package is not in cargo's answer, or `Cargo.lock` cannot be read.
    pub(super) fn sbom(&self, checkout: &Path, roots: &[&str]) -> Result<Value> {
        let lock = std::fs::read_to_string(checkout.join("Cargo.lock")).context("reading Cargo.lock")?;
        let sums = checksums(&lock)?;
        let used = linked(&self.all, roots)?;
        let mut components = Vec::new();
        let mut dependencies = Vec::new();
        for (id, needs) in &used {
            let p = package(&self.all, |p| p["id"] == **id)?;
            let (name, version) = (p["name"].as_str().unwrap_or_default(), p["version"].as_str().unwrap_or_default());
            let mut component = json!({
                "type": "library", "bom-ref": purl(p), "name": name, "version": version, "purl": purl(p),
                "licenses": [{"expression": p["license"]}],
            });
            if let Some(sum) = sums.get(&(name.to_owned(), version.to_owned())) {
                component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
            }
            components.push(component);
            let needs = needs.iter().map(|id| Ok(purl(package(&self.all, |p| p["id"] == **id)?)));
            dependencies.push(json!({"ref": purl(p), "dependsOn": needs.collect::<Result<BTreeSet<String>>>()?}));
        }
        let sort = |values: &mut Vec<Value>, key: &str| values.sort_by_key(|v| v[key].to_string());
        sort(&mut components, "bom-ref");
        sort(&mut dependencies, "ref");
        Ok(json!({
            "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
            "metadata": {"component": {
                "type": "library", "bom-ref": "tinynccl", "name": "tinynccl", "version": self.version,
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
            }},
            "components": components, "dependencies": dependencies,
        }))
    }
}

fn package(all: &Value, wanted: impl Fn(&Value) -> bool) -> Result<&Value> {
    let mut packages = all["packages"].as_array().into_iter().flatten();
    packages.find(|p| wanted(p)).context("a package is missing in cargo's metadata")
}

fn purl(package: &Value) -> String {
    let of = |field: &str| package[field].as_str().unwrap_or_default();
    format!("pkg:cargo/{}@{}", of("name"), of("version"))
}

/// Packages that are linked into `roots`, each with those that it needs. What only builds or tests is left out.
fn linked<'a>(all: &'a Value, roots: &[&str]) -> Result<BTreeMap<&'a str, Vec<&'a str>>> {
    let nodes = all["resolve"]["nodes"].as_array().context("cargo's metadata has no resolved packages")?;
    let needs = |id: &str| -> Vec<&'a str> {
        let node = nodes.iter().find(|node| node["id"] == id);
        let deps = node.and_then(|node| node["deps"].as_array()).into_iter().flatten();
        let normal = deps.filter(|d| d["dep_kinds"].as_array().into_iter().flatten().any(|k| k["kind"].is_null()));
        normal.filter_map(|d| d["pkg"].as_str()).collect()
    };
    let mut open = Vec::new();
    for root in roots {
        open.push(package(all, |p| p["name"] == *root)?["id"].as_str().unwrap_or_default());
    }
    let mut used = BTreeMap::new();
    while let Some(id) = open.pop() {
        if !used.contains_key(id) {
            let below = needs(id);
            open.extend(&below);
            used.insert(id, below);
        }
    }
    Ok(used)
}

/// SHA-256 of the crates' archives, by name and version.
fn checksums(lock: &str) -> Result<BTreeMap<(String, String), String>> {
    let lock: toml::Table = lock.parse().context("Cargo.lock is no TOML")?;
    let packages = lock.get("package").and_then(|p| p.as_array()).into_iter().flatten();
    let of = |p: &toml::Value, field: &str| p.get(field).and_then(|v| v.as_str()).map(str::to_owned);
    Ok(packages.filter_map(|p| Some(((of(p, "name")?, of(p, "version")?), of(p, "checksum")?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Value {
        let node = |id: &str, deps: &[(&str, Value)]| {
            let deps: Vec<Value> =
                deps.iter().map(|(pkg, kind)| json!({"pkg": pkg, "dep_kinds": [{"kind": kind}]})).collect();
            json!({"id": id, "deps": deps})
        };
        let package = |id: &str| json!({"id": id, "name": id, "version": "1.0.0", "license": "MIT"});
        let packages = ["a", "b", "c", "d", "e"].map(package);
        json!({
            "packages": packages,
            "resolve": {"nodes": [
                node("a", &[("b", Value::Null), ("d", json!("build")), ("e", json!("dev"))]),
                node("b", &[("c", Value::Null)]), node("c", &[]), node("d", &[]), node("e", &[("a", Value::Null)]),
            ]},
        })
    }

    #[test]
    fn what_is_linked_counts_and_what_builds_or_tests_does_not() {
        let all = all();
        let used = linked(&all, &["a"]).unwrap();
        assert_eq!(used.into_iter().collect::<Vec<_>>(), [("a", vec!["b"]), ("b", vec!["c"]), ("c", vec![])]);
        assert!(linked(&all, &["none"]).is_err());
    }

    #[test]
    fn the_sbom_of_this_checkout_has_the_crates_with_licences_and_sums() {
        let checkout = crate::course::checkout();
        let sbom = Metadata::read(&checkout).unwrap().sbom(&checkout, &["tinynccl-nccl-net"]).unwrap();
        let components = sbom["components"].as_array().unwrap();
        let find = |name: &str| components.iter().find(|c| c["name"] == name);
        assert!(components.iter().all(|c| c["licenses"][0]["expression"].is_string()));
        assert_eq!(find("snow").unwrap()["hashes"][0]["content"].as_str().unwrap().len(), 64);
        assert!(find("softroce").unwrap().get("hashes").is_none());
        // Programs of the workspace, and what tests alone need.
        assert!(find("stress").is_none() && find("proptest").is_none() && find("cudarc").is_none());
    }
}
