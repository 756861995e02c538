//! The system's own libibverbs, opened beside this library where the kernel has RDMA devices: theirs are listed with
//! ours, and their objects go to it.
//!
//! It is opened by its path, as its name is taken by this library. The providers that it loads (librxe, libmlx5) ask
//! for `libibverbs.so.1` by name and so are bound to this library: a [`Slot`] for each private symbol leads on.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use softroce_verbs::ibv_device;

use crate::forwards;
use crate::slot::Slot;

/// The system's function of a symbol, looked for until it is found; null where there is none of this name and version.
pub(crate) fn function(slot: &Slot, name: &CStr, version: &CStr) -> *const () {
    let mut found = slot.get();
    if found.is_null() {
        found = library().and_then(|library| library.symbol(name, version)).unwrap_or_default();
        slot.set(found);
    }
    found.cast()
}

/// The open library. It stays open: objects of it may live as long as the process.
#[derive(Clone, Copy)]
pub(crate) struct Library(*mut c_void);

// SAFETY: a handle of the loader, which takes calls of all threads.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    fn symbol(self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        // SAFETY: an open library and two texts.
        let found = unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// A function by the name and version that a macro or a caller knows its type by.
    pub(crate) fn device_list(self) -> Option<GetList> {
        let found = self.symbol(c"ibv_get_device_list", c"IBVERBS_1.1")?;
        // SAFETY: the function of this name and version.
        Some(unsafe { std::mem::transmute::<*mut c_void, GetList>(found) })
    }
}

pub(crate) type GetList = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;

/// Versions of the symbols that providers ask for, one for each private interface, and how they offer themselves.
const PRIVATE: [(&CStr, &CStr); 2] =
    [(c"IBVERBS_PRIVATE_34", c"verbs_register_driver_34"), (c"IBVERBS_PRIVATE_65", c"verbs_register_driver_65")];

/// The system's library, or `None` where the kernel has no RDMA device, there is no such library, or it has another
/// private interface than this library. `TINYROCE_SYSTEM_LIBRARY` names another file; empty, none is opened.
pub(crate) fn library() -> Option<Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let path = match std::env::var_os("TINYROCE_SYSTEM_LIBRARY") {
            Some(path) if path.is_empty() => return None,
            Some(path) => PathBuf::from(path),
            None => find()?,
        };
        match open(&path) {
            Ok(library) => {
                log::debug!("devices of the kernel come from {}", path.display());
                Some(library)
            }
            Err(why) => {
                log::warn!("devices of the kernel are not listed: {}: {why}", path.display());
                None
            }
        }
    })
}

/// The first such file of the usual folders that is not this library.
fn find() -> Option<PathBuf> {
    std::fs::read_dir("/sys/class/infiniband").ok()?.next()?.ok()?;
    let own = own_path().and_then(|path| path.canonicalize().ok());
    let machine = std::env::consts::ARCH;
    [format!("/usr/lib/{machine}-linux-gnu"), "/usr/lib64".into(), "/usr/lib".into(), "/usr/local/lib".into()]
        .iter()
        .map(|folder| Path::new(folder).join("libibverbs.so.1"))
        .find(|path| path.exists() && path.canonicalize().ok() != own)
}

fn own_path() -> Option<PathBuf> {
    // SAFETY: `info` is filled where the call succeeds; the address is one of this library.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(library as *const c_void, &raw mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        Some(PathBuf::from(std::ffi::OsStr::from_bytes(CStr::from_ptr(info.dli_fname).to_bytes())))
    }
}

fn open(path: &Path) -> Result<Library, String> {
    let mut bytes = path.as_os_str().as_bytes().to_vec();
    bytes.push(0);
    // DEEPBIND: what the library calls of itself is its own, not ours.
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;
    // SAFETY: loading the system's library runs its initialization alone; the path ends with a zero.
    let handle = unsafe { libc::dlopen(bytes.as_ptr().cast::<c_char>(), flags) };
    if handle.is_null() {
        // SAFETY: the loader's text of the call that failed, of this thread.
        let why = unsafe { CStr::from_ptr(libc::dlerror()) };
        return Err(why.to_string_lossy().into_owned());
    }
    let library = Library(handle);
    if !PRIVATE.iter().any(|(version, _)| library.symbol(c"verbs_set_ops", version).is_some()) {
        let known = PRIVATE.map(|(version, _)| version.to_string_lossy());
        return Err(format!("its private interface is none of {known:?}, which this library forwards"));
    }
    for (name, version, slot) in forwards::forwards().chain(forwards::forwards_65()) {
        if let Some(found) = library.symbol(name, version) {
            slot.set(found);
        }
    }
    let mut providers = PROVIDERS.lock().unwrap_or_else(PoisonError::into_inner);
    for operations in std::mem::take(&mut providers.waiting) {
        register(library, operations);
    }
    providers.library = Some(library);
    Ok(library)
}

/// Providers: registered with the library, or, where they were loaded with the program before it, kept in a list.
struct Providers {
    library: Option<Library>,
    waiting: Vec<usize>,
}

static PROVIDERS: Mutex<Providers> = Mutex::new(Providers { library: None, waiting: Vec::new() });

fn register(library: Library, operations: usize) {
    if let Some(found) = PRIVATE.iter().find_map(|(version, name)| library.symbol(name, version)) {
        // SAFETY: the function of this name takes a provider's table, which is static.
        unsafe {
            let register: unsafe extern "C" fn(usize) = std::mem::transmute(found);
            register(operations);
        }
    }
}

/// A provider offers itself as it is loaded: by the program, or by the system's library, which is opened when a program
/// asks for devices.
pub(crate) unsafe extern "C" fn register_driver(operations: usize) {
    let mut providers = PROVIDERS.lock().unwrap_or_else(PoisonError::into_inner);
    match providers.library {
        Some(library) => register(library, operations),
        None => providers.waiting.push(operations),
    }
}
