//! `dist`: what C programs and users of packages install, in a folder or as a tarball.
//!
//! ```text
//! layout     where each file goes
//! packages   the crates inside, as an SBOM
//! tarball    an archive that is the same each time, and checksums
//! ```

mod layout;
mod packages;
mod tarball;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use program_kit::Usage;

use packages::Metadata;

/// Builds libnccl.so.2, the network plugin, libibverbs.so.1 and tinynccl-cli, and lays them out for an installation.
#[derive(Debug, Args)]
pub struct Options {
    /// Install below this folder, for example /usr/local. Nothing there changes what other programs load.
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// Write tinynccl-VERSION-TARGET.tar.gz, its SBOM and SHA256SUMS into this folder.
    #[arg(long, value_name = "DIR", required_unless_present = "prefix")]
    tarball: Option<PathBuf>,
    /// The oldest glibc to run on, for example 2.28; needs cargo-zigbuild. Without it: this machine's.
    #[arg(long, value_name = "VERSION")]
    glibc: Option<String>,
}

/// Packages that hold what is installed.
const PACKAGES: [&str; 5] =
    ["tinynccl-nccl", "tinynccl-nccl-audit", "tinynccl-nccl-net", "tinynccl-ibverbs", "tinynccl-cli"];

/// The target, as Rust calls it.
fn triple() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Builds, then installs or packs.
///
/// # Errors
/// A program or a file fails; the message names it.
pub fn run(checkout: &Path, options: &Options) -> Result<Vec<PathBuf>> {
    let metadata = Metadata::read(checkout)?;
    let built = build(checkout, &metadata, options.glibc.as_deref())?;
    let mut made = Vec::new();
    if let Some(prefix) = &options.prefix {
        let prefix = std::path::absolute(prefix).with_context(|| format!("the folder {}", prefix.display()))?;
        made.extend(layout::install(checkout, &built, &prefix, &metadata.version)?);
    }
    if let Some(folder) = &options.tarball {
        let name = format!("tinynccl-{}-{}", metadata.version, triple());
        let staged = metadata.target.join("dist").join(&name);
        if staged.exists() {
            std::fs::remove_dir_all(&staged).with_context(|| format!("removing {}", staged.display()))?;
        }
        layout::install(checkout, &built, &staged, &metadata.version)?;
        let sbom = metadata.sbom(checkout, &PACKAGES)?;
        made.extend(tarball::write(checkout, &staged, folder, &sbom)?);
    }
    Ok(made)
}

/// Returns the folder of what was built.
fn build(checkout: &Path, metadata: &Metadata, glibc: Option<&str>) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(checkout);
    let mut folder = metadata.target.clone();
    match glibc {
        None => _ = cargo.arg("build"),
        Some(version) => {
            let plain = version.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
            if !plain {
                bail!(Usage(format!("--glibc {version}: expected a version such as 2.28")));
            }
            cargo.args(["zigbuild", "--target", &format!("{}.{version}", triple())]);
            folder.push(triple());
        }
    }
    cargo.args(["--locked", "--profile", "dist", "--features", "tinynccl-cli/pages"]);
    for package in PACKAGES {
        cargo.args(["-p", package]);
    }
    // Messages of panics name source files: those of the repository and of crates, not of this machine.
    let home = metadata.cargo_home()?;
    let flags = format!(
        "{} --remap-path-prefix={}=tinynccl --remap-path-prefix={}=crates",
        std::env::var("RUSTFLAGS").unwrap_or_default(),
        checkout.display(),
        home.display()
    );
    succeeds(
        cargo.env("RUSTFLAGS", flags.trim()),
        "cargo (with --glibc: `pip install cargo-zigbuild ziglang` has it)",
    )?;
    Ok(folder.join("dist"))
}

/// Runs a command to its end.
fn succeeds(command: &mut Command, name: &str) -> Result<()> {
    let status = command.status().with_context(|| format!("starting {name}"))?;
    ensure!(status.success(), "{name} failed ({status}): {command:?}");
    Ok(())
}
