//! NCCL's library: found, opened, its functions by name.
//!
//! cudarc searches only for `libnccl.so`, which only NCCL's development package installs. Programs have `libnccl.so.2`,
//! or a copy of it inside PyTorch's wheels.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use libloading::Library;

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// Oldest version that has communicators whose calls do not block (2.14).
const OLDEST: c_int = 2_14_00;

/// Status of a call. A number, because a newer library may have values that our header lacks.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;

/// A CUDA stream, as NCCL's header has it.
pub(super) type StreamHandle = *mut c_void;

/// `ncclConfig_t` as of 2.14 with the first field of later versions; they take the rest to be undefined.
#[repr(C)]
#[derive(Debug)]
pub(super) struct CommConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
}

impl CommConfig {
    /// Calls return at once; `ncclCommGetAsyncError` returns their status.
    pub(super) fn non_blocking() -> CommConfig {
        CommConfig {
            size: size_of::<CommConfig>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 0,
            // NCCL_CONFIG_UNDEF_INT
            cluster_size: c_int::MIN,
        }
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal : fn($($arg:ty),*) -> $result:ty;)*) => {
        /// The functions that we use.
        #[derive(Debug, Clone, Copy)]
        pub(super) struct Api {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl Api {
            /// # Safety
            /// The library must be NCCL.
            unsafe fn load(library: &Library) -> Result<Api, String> {
                Ok(Api {
                    // SAFETY: the signatures are those of nccl.h; the library stays open forever.
                    $($field: *unsafe { library.get($name) }.map_err(|_| format!("it lacks {}", $name))?,)*
                })
            }
        }
    };
}

functions! {
    unique_id = "ncclGetUniqueId": fn(*mut ncclUniqueId) -> Status;
    init = "ncclCommInitRankConfig": fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut CommConfig) -> Status;
    finalize = "ncclCommFinalize": fn(ncclComm_t) -> Status;
    destroy = "ncclCommDestroy": fn(ncclComm_t) -> Status;
    abort = "ncclCommAbort": fn(ncclComm_t) -> Status;
    state = "ncclCommGetAsyncError": fn(ncclComm_t, *mut Status) -> Status;
    words = "ncclGetErrorString": fn(Status) -> *const c_char;
    last_error = "ncclGetLastError": fn(ncclComm_t) -> *const c_char;
    group_start = "ncclGroupStart": fn() -> Status;
    group_end = "ncclGroupEnd": fn() -> Status;
    all_reduce = "ncclAllReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, StreamHandle) -> Status;
    broadcast = "ncclBroadcast":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, StreamHandle) -> Status;
    reduce = "ncclReduce":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, StreamHandle) -> Status;
    all_gather = "ncclAllGather":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, StreamHandle) -> Status;
    reduce_scatter = "ncclReduceScatter":
        fn(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, StreamHandle) -> Status;
    send = "ncclSend": fn(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, StreamHandle) -> Status;
    recv = "ncclRecv": fn(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, StreamHandle) -> Status;
}

/// NCCL, open.
#[derive(Debug)]
pub(super) struct Nccl {
    pub(super) api: Api,
    /// Version and path, for messages.
    pub(super) description: String,
    _library: Library,
}

/// NVIDIA's NCCL as process groups find it: its version and path, as text. It stays open.
///
/// # Errors
/// [`Error::Unsupported`] with the searched paths.
pub fn find(config: &Config) -> Result<String> {
    // It links CUDA's driver itself; opening it without a driver is of no use.
    open(config).map(|nccl| nccl.description.clone())
}

/// Files in which a process group would look for NCCL, best first: `TINYNCCL_NCCL_LIB` alone if it is set; otherwise
/// the loader's `libnccl.so.2` and `libnccl.so` (names without a folder, which need not exist), then files that exist
/// in the folders of Python packages, and where `CUDA_HOME` and `CUDA_PATH` say.
pub fn places(config: &Config) -> Vec<PathBuf> {
    candidates(config.nccl_library.as_deref(), &|name| std::env::var_os(name), &mut Vec::new())
}

/// Opens NCCL, once per process.
///
/// # Errors
/// [`Error::Unsupported`] with every searched path, and the error there.
pub(super) fn open(config: &Config) -> Result<&'static Nccl> {
    static OPEN: OnceLock<Nccl> = OnceLock::new();
    if let Some(open) = OPEN.get() {
        return Ok(open);
    }
    let variable = |name: &str| std::env::var_os(name);
    let mut tried = Vec::new();
    for place in candidates(config.nccl_library.as_deref(), &variable, &mut tried) {
        match open_at(&place) {
            Ok(nccl) => return Ok(OPEN.get_or_init(|| nccl)),
            Err(why) => tried.push(format!("{} ({why})", place.display())),
        }
    }
    let next = match config.nccl_library {
        Some(_) => "TINYNCCL_NCCL_LIB names it: correct or unset it",
        None => "install it (apt: libnccl2; pip: nvidia-nccl-cu12) or set TINYNCCL_NCCL_LIB to the file",
    };
    Err(Error::Unsupported { what: "NCCL".to_owned(), detail: format!("looked for {}; {next}", tried.join(", ")) })
}

fn open_at(place: &Path) -> Result<Nccl, String> {
    // The reason suffices: dlopen's text begins with the path.
    let short = |e: libloading::Error| {
        let text = std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string);
        text.split_once(": ").map_or(text.clone(), |(_, reason)| reason.to_owned())
    };
    // SAFETY: NCCL's constructors have no preconditions. It stays open forever.
    let library = unsafe { Library::new(place) }.map_err(short)?;
    // SAFETY: every version of the library has it so.
    let version: unsafe extern "C" fn(*mut c_int) -> Status =
        *unsafe { library.get("ncclGetVersion") }.map_err(|_| "not NCCL: it lacks ncclGetVersion".to_owned())?;
    let mut number = 0;
    // SAFETY: writes the version.
    if unsafe { version(&mut number) } != SUCCESS {
        return Err("ncclGetVersion fails".to_owned());
    }
    let name = format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100);
    if number < OLDEST {
        return Err(format!("version {name}, expected 2.14 or later"));
    }
    // SAFETY: it said its version, so it is NCCL.
    let api = unsafe { Api::load(&library) }?;
    Ok(Nccl { api, description: format!("NCCL {name} ({})", place.display()), _library: library })
}

/// Candidate paths of NCCL, best first. Folders without it are added to `tried`.
fn candidates(
    setting: Option<&str>,
    variable: &dyn Fn(&str) -> Option<OsString>,
    tried: &mut Vec<String>,
) -> Vec<PathBuf> {
    if let Some(path) = setting {
        return vec![path.into()];
    }
    // By the loader: LD_LIBRARY_PATH, the cache of ldconfig, the system's folders.
    let mut places = vec![PathBuf::from("libnccl.so.2"), PathBuf::from("libnccl.so")];
    let mut wheels = Vec::new();
    for root in python_roots(variable) {
        for name in ["site-packages", "dist-packages"] {
            wheels.push(root.join("python3").join(name));
            let versions = std::fs::read_dir(&root).into_iter().flatten().flatten();
            let mut versions: Vec<PathBuf> = versions
                .filter(|e| e.file_name().to_string_lossy().starts_with("python3."))
                .map(|e| e.path().join(name))
                .collect();
            // Newer Pythons first.
            versions.sort_by_key(|path| std::cmp::Reverse(path.as_os_str().len()));
            wheels.extend(versions);
        }
    }
    wheels.extend(variable("PYTHONPATH").iter().flat_map(std::env::split_paths));
    let mut without = 0;
    for packages in wheels.into_iter().filter(|p| p.is_dir()) {
        let place = packages.join("nvidia/nccl/lib/libnccl.so.2");
        if place.is_file() {
            places.push(place);
        } else {
            without += 1;
            if without <= 4 {
                tried.push(format!("{} (not there)", place.display()));
            }
        }
    }
    if without > 4 {
        tried.push(format!("{} more Python folders", without - 4));
    }
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        places.extend(variable(name).map(|home| Path::new(&home).join("lib64/libnccl.so.2")));
    }
    places
}

/// Folders that hold `python3.*` folders: of the active environment, of the `python3` on the PATH, of the user, of the
/// system.
fn python_roots(variable: &dyn Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|n| variable(n)).map(|p| Path::new(&p).join("lib")).collect();
    let path = variable("PATH").unwrap_or_default();
    let mut pythons = std::env::split_paths(&path).map(|folder| folder.join("python3")).filter(|p| p.is_file());
    if let Some(python) = pythons.next() {
        // The path itself, and the target of the link: a virtual environment's leads to the system's.
        for program in [Some(python.clone()), python.canonicalize().ok()].into_iter().flatten() {
            roots.extend(program.parent().and_then(Path::parent).map(|prefix| prefix.join("lib")));
        }
    }
    roots.extend(variable("HOME").map(|home| Path::new(&home).join(".local/lib")));
    roots.extend(["/usr/local/lib", "/usr/lib"].map(PathBuf::from));
    let mut seen = Vec::new();
    roots.retain(|root| {
        let new = !seen.contains(root);
        seen.push(root.clone());
        new
    });
    roots
}

impl Nccl {
    /// NCCL's text for a status, and its text of the last failure.
    pub(super) fn words(&self, status: Status, comm: ncclComm_t) -> String {
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL's strings are static, or belong to the thread.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: both take any value; the communicator may be null.
        let (words, last) = unsafe { (text((self.api.words)(status)), text((self.api.last_error)(comm))) };
        if last.is_empty() { format!("NCCL: {words} ({status})") } else { format!("NCCL: {words} ({status}): {last}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_of_the_environment_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let lib = dir.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&lib).expect("folders");
        std::fs::write(lib.join("libnccl.so.2"), "not a library").expect("a file");
        let environment = dir.path().as_os_str().to_owned();
        let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| environment.clone());
        let mut tried = Vec::new();
        let found = candidates(None, &variable, &mut tried);
        assert_eq!(found[..2], ["libnccl.so.2", "libnccl.so"].map(PathBuf::from));
        assert!(found.contains(&lib.join("libnccl.so.2")), "{found:?}");
        assert!(open_at(&lib.join("libnccl.so.2")).is_err_and(|why| !why.is_empty()));
    }

    #[test]
    fn the_error_says_where_it_was_looked_for() {
        let config = Config::default().with(|c| c.nccl_library = Some("/nowhere/libnccl.so.2".to_owned()));
        match open(&config) {
            // A machine with NCCL, opened by another test.
            Ok(_) => {}
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains("/nowhere/libnccl.so.2") && text.contains("TINYNCCL_NCCL_LIB"), "{text}");
            }
        }
    }
}
