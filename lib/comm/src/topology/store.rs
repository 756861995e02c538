//! A measured model in a file, so that the next start need not measure.
//!
//! One JSON object per file: the format's version, the *key* (everything the figures depend on), the model. A file that
//! does not parse, is of another version or has another key counts as none, and is replaced. Writing makes a new file
//! and renames it over the old one: readers see one or the other, whole, and of several writers the last wins. Nothing
//! here is an error to the caller: without a file, the links are measured.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::CostModel;
use super::host::Host;

/// Version of the file's format.
const FORMAT: u32 = 1;
/// No file of ours is longer.
const LONGEST: u64 = 64 << 10;

/// Everything that the measured figures depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// Version of the library: its code is part of what is measured.
    pub library: String,
    /// Build with or without optimisation.
    pub optimised: bool,
    /// The machine of the rank that measures.
    pub host: Host,
    /// Names of the other machines, as a digest; empty when there are none.
    pub others: String,
    /// Kinds of links in use.
    pub links: Vec<String>,
    /// Ranks on the machine of the rank that measures.
    pub ranks_per_host: usize,
    /// Longest message.
    pub message: usize,
    /// Messages per link.
    pub depth: usize,
    /// `TINYNCCL_VERIFY`.
    pub verify: String,
    /// Socket buffers, if set.
    pub socket_buffer: usize,
    /// Time that ranks spin, in nanoseconds: a rank that waits longer has to be woken.
    pub spin_ns: u64,
}

impl Key {
    /// A short name for the key, the same in every run.
    fn digest(&self) -> String {
        hex(&serde_json::to_vec(self).unwrap_or_default())
    }
}

/// 16 hexadecimal digits that stand for `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|b| format!("{b:02x}")).collect()
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    format: u32,
    key: Key,
    model: CostModel,
}

/// Location of the models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Store {
    /// A file per key in this folder.
    Folder(PathBuf),
    /// This file, for whichever key was measured last.
    File(PathBuf),
}

impl Store {
    /// From the setting `TINYNCCL_TUNE_CACHE` (`None` when it is not set) and the environment.
    ///
    /// `off` and a home that is not known give `None`. A name that ends in `.json`, and an existing file, is a file;
    /// all else is a folder.
    pub fn locate(setting: Option<&str>, env: impl Fn(&str) -> Option<OsString>) -> Option<Store> {
        match setting {
            Some("off") => None,
            Some(path) => {
                let path = PathBuf::from(path);
                let is_file = path.extension().is_some_and(|e| e == "json") && !path.is_dir() || path.is_file();
                Some(if is_file { Store::File(path) } else { Store::Folder(path) })
            }
            None => {
                // As the XDG base directory specification has it: relative paths are ignored.
                let absolute = |name: &str| env(name).map(PathBuf::from).filter(|path| path.is_absolute());
                let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
                Some(Store::Folder(base.join("tinynccl")))
            }
        }
    }

    /// The file for `key`.
    pub fn path(&self, key: &Key) -> PathBuf {
        match self {
            Store::Folder(folder) => folder.join(format!("cost-{}.json", key.digest())),
            Store::File(path) => path.clone(),
        }
    }

    /// The model kept for `key`, if there is one.
    pub fn load(&self, key: &Key) -> Option<CostModel> {
        let path = self.path(key);
        match read(&path, key) {
            Ok(model) => Some(model),
            Err(reason) => {
                log::debug!("no measured cost model in {}: {reason}", path.display());
                None
            }
        }
    }

    /// Keeps `model` for `key`. Failing to is worth a line in the log and no more.
    pub fn save(&self, key: &Key, model: &CostModel) {
        let path = self.path(key);
        if let Err(error) = write(&path, &Record { format: FORMAT, key: key.clone(), model: model.clone() }) {
            log::debug!("the measured cost model is not kept in {}: {error}", path.display());
        }
    }
}

fn read(path: &Path, key: &Key) -> Result<CostModel, String> {
    // Not blocking: the path may name a pipe.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(|e| e.to_string())?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return Err("not a file".to_owned());
    }
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).map_err(|e| e.to_string())?;
    let record: Record = serde_json::from_str(&text).map_err(|e| format!("it does not parse: {e}"))?;
    if record.format != FORMAT {
        return Err(format!("it has format {}, expected {FORMAT}", record.format));
    }
    if record.key != *key {
        return Err(format!("it was measured for {:?}, expected {key:?}", record.key));
    }
    record.model.check()?;
    Ok(record.model)
}

fn write(path: &Path, record: &Record) -> io::Result<()> {
    static WRITES: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.exists() && !path.is_file() {
        return Err(io::Error::other("there is something else than a file"));
    }
    fs::create_dir_all(folder)?;
    let mut text = serde_json::to_vec_pretty(record)?;
    text.push(b'\n');
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let turn = WRITES.fetch_add(1, Ordering::Relaxed);
    let part = folder.join(format!(".{name}.{}-{turn}.part", std::process::id()));
    let whole = File::options().write(true).create_new(true).open(&part).and_then(|mut file| file.write_all(&text));
    let outcome = whole.and_then(|()| fs::rename(&part, path));
    if outcome.is_err() {
        // Best effort: what is left is a hidden file that no process reads.
        let _ = fs::remove_file(&part);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// A folder that is removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("tinynccl-store-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn key() -> Key {
        Key {
            library: "0.1.0".into(),
            optimised: true,
            host: Host::here(),
            others: String::new(),
            links: vec!["shm".into()],
            ranks_per_host: 2,
            message: 128 << 10,
            depth: 4,
            verify: "off".to_owned(),
            socket_buffer: 0,
            spin_ns: 60_000,
        }
    }

    #[test]
    fn the_default_place_is_the_users_cache() {
        let env = |vars: &'static [(&str, &str)]| {
            move |name: &str| vars.iter().find(|v| v.0 == name).map(|v| OsString::from(v.1))
        };
        let folder = |path: &str| Some(Store::Folder(PathBuf::from(path)));
        assert_eq!(Store::locate(None, env(&[("HOME", "/h")])), folder("/h/.cache/tinynccl"));
        assert_eq!(Store::locate(None, env(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")])), folder("/x/tinynccl"));
        assert_eq!(Store::locate(None, env(&[("HOME", "/h"), ("XDG_CACHE_HOME", "x")])), folder("/h/.cache/tinynccl"));
        assert_eq!(Store::locate(None, env(&[])), None);
        assert_eq!(Store::locate(Some("off"), env(&[("HOME", "/h")])), None);
        assert_eq!(Store::locate(Some("/a/b"), env(&[])), folder("/a/b"));
        assert_eq!(Store::locate(Some("/a/b.json"), env(&[])), Some(Store::File("/a/b.json".into())));
        assert_eq!(Store::locate(Some("/dev/null"), env(&[])), folder("/dev/null"));
    }

    #[test]
    fn what_is_saved_is_loaded_for_the_same_key_only() {
        let scratch = Scratch::new("same-key");
        for store in [Store::Folder(scratch.0.join("new/folder")), Store::File(scratch.0.join("one.json"))] {
            let model = CostModel::shm().on_cores(2, 2);
            assert_eq!(store.load(&key()), None);
            store.save(&key(), &model);
            assert_eq!(store.load(&key()), Some(model));
            let host = Host { kernel: "6.99 x86_64".into(), ..Host::here() };
            for other in [
                Key { library: "0.1.1".into(), ..key() },
                Key { host, ..key() },
                Key { ranks_per_host: 3, ..key() },
                Key { message: 64 << 10, ..key() },
                Key { links: vec!["tcp".into()], ..key() },
                Key { verify: "all".to_owned(), ..key() },
            ] {
                assert_eq!(store.load(&other), None, "{other:?}");
                let theirs = CostModel::tcp();
                store.save(&other, &theirs);
                assert_eq!(store.load(&other), Some(theirs));
                store.save(&key(), &CostModel::shm());
                assert_eq!(store.load(&key()), Some(CostModel::shm()), "replaced");
            }
        }
    }

    #[test]
    fn stale_corrupt_and_foreign_files_are_ignored_and_replaced() {
        let scratch = Scratch::new("corrupt");
        let store = Store::File(scratch.0.join("cost.json"));
        let path = store.path(&key());
        store.save(&key(), &CostModel::shm());
        let good = fs::read_to_string(&path).unwrap();
        let mut bad = vec![
            Vec::new(),
            b"hello".to_vec(),
            vec![0xff; 100],
            vec![b' '; LONGEST as usize + 1],
            good.replace("\"format\": 1", "\"format\": 2").into_bytes(),
            good.replace("\"version\": 3", "\"version\": 2").into_bytes(),
            good.replace("\"alpha_ns\": 100.0", "\"alpha_ns\": -100.0").into_bytes(),
            good.replace("\"optimised\": true", "\"optimised\": false").into_bytes(),
        ];
        bad.extend((0..good.len()).step_by(97).map(|cut| good.as_bytes()[..cut].to_vec()));
        for text in bad {
            fs::write(&path, &text).unwrap();
            assert_ne!(text, good.as_bytes());
            assert_eq!(store.load(&key()), None, "{}", String::from_utf8_lossy(&text));
            store.save(&key(), &CostModel::shm());
            assert_eq!(fs::read_to_string(&path).unwrap(), good);
        }
    }

    #[test]
    fn places_that_cannot_be_written_are_no_error() {
        let scratch = Scratch::new("unwritable");
        let file = scratch.0.join("file");
        fs::write(&file, "x").unwrap();
        for store in [
            Store::Folder("/proc/tinynccl".into()),
            Store::Folder(file.join("below")),
            Store::File(scratch.0.clone()),
            Store::File("/dev/null".into()),
            Store::File("/proc/version".into()),
        ] {
            store.save(&key(), &CostModel::shm());
            assert_eq!(store.load(&key()), None, "{store:?}");
        }
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "nothing is left over");
    }

    #[test]
    fn a_pipe_does_not_block() {
        let scratch = Scratch::new("pipe");
        let path = scratch.0.join("cost.json");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o600),
            0,
        )
        .unwrap();
        assert_eq!(Store::File(path.clone()).load(&key()), None);
        Store::File(path).save(&key(), &CostModel::shm());
    }

    #[test]
    fn writers_at_the_same_time_leave_a_whole_file() {
        let scratch = Scratch::new("parallel");
        let store = Store::Folder(scratch.0.clone());
        store.save(&key(), &CostModel::shm());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|i| {
                    let store = &store;
                    scope.spawn(move || {
                        for turn in 0..50 {
                            store.save(&key(), &CostModel { call_ns: f64::from(i * 100 + turn), ..CostModel::shm() });
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    assert!(store.load(&key()).is_some(), "a reader saw half a file");
                }
            });
            for writer in writers {
                writer.join().unwrap();
            }
            done.store(true, Ordering::Release);
        });
        assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1, "no leftovers");
    }
}
