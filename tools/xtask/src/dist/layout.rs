//! The files below a prefix.
//!
//! The libraries that stand in for NVIDIA's and rdma-core's lie in `lib/tinynccl`, where no loader looks by itself: after an
//! installation into `/usr/local` other programs load what they loaded before.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::succeeds;

/// Name among what cargo built, place below the prefix.
const BUILT: [(&str, &str); 5] = [
    ("tinynccl-cli", "bin/tinynccl-cli"),
    ("libnccl.so", "lib/tinynccl/libnccl.so.2"),
    ("libnccl_audit.so", "lib/tinynccl/libnccl_audit.so"),
    ("libibverbs_roce.so", "lib/tinynccl/libibverbs.so.1"),
    // Its name is tinynccl's alone.
    ("libnccl_net_tinynccl.so", "lib/libnccl-net-tinynccl.so"),
];

/// Name in the checkout, place below the prefix.
const COPIED: [(&str, &str); 7] = [
    ("bindings/nccl/include/nccl.h", "include/tinynccl/nccl.h"),
    ("docs/nccl.md", "share/doc/tinynccl/nccl.md"),
    ("docs/nccl-net.md", "share/doc/tinynccl/nccl-net.md"),
    ("docs/config.md", "share/doc/tinynccl/config.md"),
    ("CHANGELOG.md", "share/doc/tinynccl/CHANGELOG.md"),
    ("LICENSE-MIT", "share/doc/tinynccl/LICENSE-MIT"),
    ("LICENSE-APACHE", "share/doc/tinynccl/LICENSE-APACHE"),
];

/// Link, what it points to. The linker takes names without a version.
const LINKS: [(&str, &str); 3] = [
    ("bin/tinynccl", "tinynccl-cli"),
    ("lib/tinynccl/libnccl.so", "libnccl.so.2"),
    ("lib/tinynccl/libibverbs.so", "libibverbs.so.1"),
];

/// Installs below `prefix`, and returns the files.
///
/// # Errors
/// A file cannot be written, or tinynccl-cli cannot write its pages.
pub(super) fn install(checkout: &Path, built: &Path, prefix: &Path, version: &str) -> Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    for (from, to) in BUILT {
        made.push(copy(&built.join(from), &prefix.join(to), 0o755)?);
    }
    for (from, to) in COPIED {
        made.push(copy(&checkout.join(from), &prefix.join(to), 0o644)?);
    }
    for (link, target) in LINKS {
        let link = prefix.join(link);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link).with_context(|| format!("replacing {}", link.display()))?;
        }
        std::os::unix::fs::symlink(target, &link).with_context(|| format!("linking {}", link.display()))?;
        made.push(link);
    }
    for (name, text) in pkg_config(version) {
        let file = prefix.join("lib/pkgconfig").join(name);
        folder_of(&file)?;
        fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
        made.push(file);
    }
    let share = prefix.join("share");
    succeeds(Command::new(prefix.join("bin/tinynccl-cli")).arg("pages").arg(&share), "tinynccl-cli pages")?;
    made.push(share);
    Ok(made)
}

/// Replaces `to`: a program that runs keeps the old file.
fn copy(from: &Path, to: &Path, mode: u32) -> Result<PathBuf> {
    folder_of(to)?;
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let beside = to.with_file_name(format!(".{name}.new"));
    fs::copy(from, &beside).with_context(|| format!("copying {} to {}", from.display(), beside.display()))?;
    fs::set_permissions(&beside, fs::Permissions::from_mode(mode))
        .and_then(|()| fs::rename(&beside, to))
        .with_context(|| format!("installing {}", to.display()))?;
    Ok(to.to_owned())
}

fn folder_of(file: &Path) -> Result<()> {
    let folder = file.parent().unwrap_or(file);
    fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))
}

/// Files of pkg-config. Their names are not NVIDIA's and rdma-core's `nccl` and `libibverbs`: both may be installed.
/// They find the libraries by their own place, so a tarball may be unpacked anywhere.
fn pkg_config(version: &str) -> [(&'static str, String); 2] {
    let of = |name: &str, about: &str, lib: &str, cflags: &str| {
        format!(
            "prefix=${{pcfiledir}}/../..\nlibdir=${{prefix}}/lib/tinynccl\nincludedir=${{prefix}}/include/tinynccl\n\n\
             Name: {name}\nDescription: {about}\nURL: https://github.com/tinynccl/tinynccl\nVersion: {version}\n\
             Libs: -L${{libdir}} -Wl,-rpath,${{libdir}} -l{lib}\n{cflags}"
        )
    };
    [
        (
            "tinynccl-nccl.pc",
            of("tinynccl-nccl", "NCCL's C interface over tinynccl", "nccl", "Cflags: -I${includedir}\n"),
        ),
        // verbs.h is rdma-core's.
        ("tinynccl-ibverbs.pc", of("tinynccl-ibverbs", "libibverbs over an RDMA card in user space", "ibverbs", "")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pkg_config_names_the_folders_below_the_prefix() {
        let [(nccl, text), (_, verbs)] = pkg_config("1.2.3");
        assert_eq!(nccl, "tinynccl-nccl.pc");
        assert!(text.starts_with("prefix=${pcfiledir}/../..\nlibdir=${prefix}/lib/tinynccl\n"), "{text}");
        assert!(text.contains("\nVersion: 1.2.3\nLibs: -L${libdir} -Wl,-rpath,${libdir} -lnccl\nCflags: "), "{text}");
        assert!(verbs.ends_with(" -libverbs\n"), "{verbs}");
    }

    #[test]
    fn a_file_is_replaced_and_not_written_into() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("a"), folder.path().join("below/b"));
        fs::write(&from, "new").unwrap();
        copy(&from, &to, 0o644).unwrap();
        let open = fs::File::open(&to).unwrap();
        fs::write(&from, "newer").unwrap();
        copy(&from, &to, 0o755).unwrap();
        assert_eq!(std::io::read_to_string(open).unwrap(), "new");
        assert_eq!(fs::read_to_string(&to).unwrap(), "newer");
        assert_eq!(fs::metadata(&to).unwrap().permissions().mode() & 0o777, 0o755);
    }
}
