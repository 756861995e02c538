//! Every `libnccl` that a process would find, its version, and the functions that PyTorch would miss in it.
//!
//! A library is opened in a separate process (this program again, with `--open`): a broken one, or one that ends its
//! process while it is loaded, does not end this one.

use std::ffi::{CStr, OsStr, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use libloading::Library;
use serde::{Deserialize, Serialize};
use tinynccl::Config;
use tinynccl::process_group::nccl_places;

use super::nccl_symbols::{TORCH_2_11, TORCH_2_15_ADDS};

/// Time that a library may take to be loaded.
const LIMIT: Duration = Duration::from_secs(20);

/// A library that was opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Its file, from `dladdr`, with links resolved.
    pub(crate) file: PathBuf,
    /// Version as `ncclGetVersion` returns it: 22809 is 2.28.9.
    pub(crate) version: c_int,
    /// Functions of torch 2.11 that it lacks.
    pub(crate) torch_2_11_lacks: Vec<String>,
    /// Functions of torch 2.15 that it lacks.
    pub(crate) torch_2_15_lacks: Vec<String>,
}

/// A path that was tried, and the library there or the reason why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Place {
    pub(crate) asked: PathBuf,
    /// The one that `run` takes.
    pub(crate) ours: bool,
    pub(crate) opened: Result<Opened, String>,
}

impl Opened {
    /// `2.28.9`
    pub(crate) fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// Describes the functions of torch 2.11 and 2.15 that it lacks.
    pub(crate) fn judgement(&self) -> String {
        let of = |torch: &str, count: usize, lacks: &[String]| match lacks {
            [] => format!("all {count} functions of torch {torch}"),
            lacks => format!("{} of the {count} of torch {torch} missing ({})", lacks.len(), lacks.join(", ")),
        };
        let old = of("2.11", TORCH_2_11.len(), &self.torch_2_11_lacks);
        format!("{old}, {}", of("2.15", TORCH_2_11.len() + TORCH_2_15_ADDS.len(), &self.torch_2_15_lacks))
    }
}

/// All libraries: first ours that `run` takes, if it was built, then the others in the order in which a process group
/// searches.
pub(crate) fn all() -> Vec<Place> {
    let ours = crate::run::ours();
    let mut places: Vec<PathBuf> = ours.iter().cloned().collect();
    match Config::from_env() {
        Ok(config) => places.extend(nccl_places(&config)),
        Err(error) => {
            return vec![Place { asked: PathBuf::new(), ours: false, opened: Err(error.to_string()) }];
        }
    }
    let mut found: Vec<Place> = Vec::new();
    for asked in places {
        // A name without a folder is the loader's to find.
        if asked.components().count() > 1 && !asked.is_file() {
            continue;
        }
        let opened = open_elsewhere(&asked).map_err(|error| format!("{error:#}"));
        let again = |other: &Place| matches!((&other.opened, &opened), (Ok(a), Ok(b)) if a.file == b.file);
        let by_product = opened.as_ref().is_ok_and(|opened| is_by_product(&opened.file));
        if !by_product && !found.iter().any(again) {
            found.push(Place { ours: ours.as_ref() == Some(&asked), asked, opened });
        }
    }
    found
}

/// Returns true if a file lies in `deps` of cargo's builds and tests. `cargo run` shows it to the loader, and no other
/// command does.
fn is_by_product(file: &Path) -> bool {
    let Some(folder) = file.parent() else { return false };
    folder.ends_with("deps") && folder.with_file_name(".fingerprint").is_dir()
}

/// Opens the library in a separate process.
///
/// # Errors
/// The loader's reason, a missing `ncclGetVersion`, a timeout, or the exit status of the process.
pub(crate) fn open_elsewhere(library: &Path) -> Result<Opened> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command.args(["doctor", "--open"]).arg(library).env_remove("NCCL_DEBUG");
    let outcome = program_kit::process::run(&mut command, LIMIT)?;
    if outcome.late {
        return Err(anyhow!("it was still being loaded after {LIMIT:?}"));
    }
    if !outcome.success() {
        let said = outcome.stderr.trim().trim_start_matches("error: ").to_owned();
        return Err(match (outcome.code, said.is_empty()) {
            (Some(_), false) => anyhow!(said),
            (code, _) => anyhow!("the process that opened it ended with {code:?} (a signal, if None)"),
        });
    }
    // The library may print, too, before our line or, from C's buffer, at the end.
    let line = |line: &str| serde_json::from_str(line).ok();
    outcome.stdout.lines().find_map(line).ok_or_else(|| anyhow!("no description in {:?}", outcome.stdout))
}

/// Opens the library in this process.
///
/// # Errors
/// The loader's reason, or the function that the library lacks or that failed.
pub(crate) fn open(library: &Path) -> Result<Opened> {
    // SAFETY: the constructors of a libnccl have no preconditions; this process does nothing else.
    let opened = unsafe { Library::new(library) }.map_err(|error| anyhow!(reason(&error)))?;
    // SAFETY: every version of the library has it so, and the library stays open to the end of this function.
    let get: unsafe extern "C" fn(*mut c_int) -> c_int =
        *unsafe { opened.get("ncclGetVersion") }.map_err(|_| anyhow!("no libnccl: it lacks ncclGetVersion"))?;
    let mut version = 0;
    // SAFETY: it writes the version.
    let status = unsafe { get(&mut version) };
    if status != 0 {
        return Err(anyhow!("ncclGetVersion returned {status}"));
    }
    let lacks = |names: &[&str]| -> Vec<String> {
        // SAFETY: the address alone is asked for; nothing is called.
        let there = |name: &str| unsafe { opened.get::<unsafe extern "C" fn()>(name) }.is_ok();
        names.iter().filter(|name| !there(name)).map(|name| (*name).to_owned()).collect()
    };
    let torch_2_11_lacks = lacks(&TORCH_2_11);
    let torch_2_15_lacks = [torch_2_11_lacks.clone(), lacks(&TORCH_2_15_ADDS)].concat();
    Ok(Opened { file: file_of(get as *const libc::c_void)?, version, torch_2_11_lacks, torch_2_15_lacks })
}

/// The file that holds an address.
fn file_of(address: *const libc::c_void) -> Result<PathBuf> {
    // SAFETY: plain numbers and pointers, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: takes any address, and writes to `info`.
    if unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return Err(anyhow!("dladdr knows no file of ncclGetVersion"));
    }
    // SAFETY: the loader's own string, which lives as long as the library is open.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    Ok(path.canonicalize().unwrap_or(path))
}

/// The loader's reason, without the path before it.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_have_no_name_twice() {
        let mut names: Vec<&str> = TORCH_2_11.iter().chain(&TORCH_2_15_ADDS).copied().collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 51);
    }

    #[test]
    fn a_library_that_lacks_functions_says_which() {
        let lacks = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
        let opened = Opened {
            file: "/x/libnccl.so.2".into(),
            version: 22809,
            torch_2_11_lacks: Vec::new(),
            torch_2_15_lacks: lacks(&["ncclCommGrow", "ncclSignal"]),
        };
        assert_eq!(opened.version(), "2.28.9");
        let words = "all 38 functions of torch 2.11, 2 of the 51 of torch 2.15 missing (ncclCommGrow, ncclSignal)";
        assert_eq!(opened.judgement(), words);
    }

    #[test]
    fn what_cargo_leaves_in_deps_is_no_library() {
        let target = tempfile::tempdir().unwrap();
        let deps = target.path().join("debug/deps");
        std::fs::create_dir_all(&deps).unwrap();
        let file = deps.join("libnccl.so");
        assert!(!is_by_product(&file), "another folder of that name");
        std::fs::create_dir(target.path().join("debug/.fingerprint")).unwrap();
        assert!(is_by_product(&file) && !is_by_product(&target.path().join("debug/libnccl.so")));
    }

    #[test]
    fn another_library_is_refused() {
        assert!(open(Path::new("/nowhere/libnccl.so.2")).is_err_and(|e| e.to_string().contains("/nowhere")));
        let error = open(Path::new("libc.so.6")).unwrap_err().to_string();
        assert_eq!(error, "no libnccl: it lacks ncclGetVersion");
    }
}
