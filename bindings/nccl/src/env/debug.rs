//! `NCCL_DEBUG`: the library's log, in the form that NCCL's users know.

use std::cell::Cell;
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, Once, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};

use super::{settings, variables, version};

thread_local! {
    /// The GPU of this thread's last call; -1 before.
    static DEVICE: Cell<i32> = const { Cell::new(-1) };
}

/// Destination of the log.
enum Sink {
    Stdout,
    Stderr,
    File(File),
}

struct Logger {
    sink: Mutex<Sink>,
}

/// The logger of this library's own copy of `log`, which no other part of the program has set.
static LOGGER: Logger = Logger { sink: Mutex::new(Sink::Stdout) };

/// Sets the log up, once, before anything else happens, and logs [`introduction`].
pub(crate) fn begin() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        // Refused where a program of Rust has linked this crate and has a log: that one is used then.
        let _ = log::set_logger(&LOGGER);
        read();
        log::info!("{}", introduction());
        let variables = variables::all();
        settings::not_done(&variables).iter().for_each(|line| log::warn!("{line}"));
        let unused = settings::unused(&variables);
        if !unused.is_empty() {
            log::info!("not used by tinynccl: {}", unused.join(" "));
        }
    });
}

/// Reads the variables, at the start and again for `ncclResetDebugInit`.
pub(crate) fn read() {
    let sink = match variables::get("NCCL_DEBUG_FILE").as_deref().map(str::trim) {
        None | Some("" | "stdout") => Sink::Stdout,
        Some("stderr") => Sink::Stderr,
        Some(pattern) => match File::create(path(pattern, &host(), std::process::id())) {
            Ok(file) => Sink::File(file),
            Err(_) => Sink::Stdout,
        },
    };
    *LOGGER.sink.lock().unwrap_or_else(PoisonError::into_inner) = sink;
    log::set_max_level(level(variables::get("NCCL_DEBUG").as_deref()));
    if is_version(variables::get("NCCL_DEBUG").as_deref()) {
        LOGGER.write("", &introduction());
    }
}

/// Remembers the GPU of this thread, for the lines that follow.
pub(crate) fn on_device(ordinal: usize) {
    DEVICE.set(ordinal as i32);
}

fn is_version(requested: Option<&str>) -> bool {
    requested.is_some_and(|requested| requested.trim().eq_ignore_ascii_case("VERSION"))
}

fn level(requested: Option<&str>) -> LevelFilter {
    match requested.unwrap_or_default().trim().to_ascii_uppercase().as_str() {
        "WARN" | "ABORT" => LevelFilter::Warn,
        "INFO" => LevelFilter::Info,
        "TRACE" => LevelFilter::Trace,
        _ => LevelFilter::Off,
    }
}

/// `%h` is the host, `%p` the process, `%%` a percent sign.
fn path(pattern: &str, host: &str, process: u32) -> String {
    let mut path = String::new();
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        match (letter, letter == '%') {
            (_, false) => path.push(letter),
            _ => match letters.next() {
                Some('h') => path.push_str(host),
                Some('p') => path.push_str(&process.to_string()),
                Some(other) => path.push(other),
                None => path.push('%'),
            },
        }
    }
    path
}

/// Returns the host name without its domain.
fn host() -> String {
    let host = tinynccl::bootstrap::Host::current().hostname;
    host.split('.').next().unwrap_or_default().to_owned()
}

/// Returns the line that names this library, the file it was loaded from, and the NCCL version that it stands for.
fn introduction() -> String {
    let version = version::version();
    // NCCL's own coding of versions from 2.9 on.
    let words = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    format!(
        "NCCL version {words} by tinynccl {} ({}), with none of NVIDIA's NCCL behind it",
        env!("CARGO_PKG_VERSION"),
        loaded_from().unwrap_or_else(|| "of an unknown file".to_owned())
    )
}

/// The file of this library.
fn loaded_from() -> Option<String> {
    let mut info: libc::Dl_info = no_info();
    // SAFETY: any address may be passed; writes the result, whose texts the loader keeps.
    let found = unsafe { libc::dladdr((loaded_from as fn() -> Option<String>) as *const libc::c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's text, ended by a zero.
    Some(unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

fn no_info() -> libc::Dl_info {
    libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    }
}

impl Logger {
    fn write(&self, level: &str, text: &str) {
        let (process, thread) = (std::process::id(), thread());
        let line = match level {
            // As NCCL prints its version: alone.
            "" => format!("{text}\n"),
            _ => format!("{}:{process}:{thread} [{}] NCCL {level} {text}\n", host(), DEVICE.get()),
        };
        // One write per line. A log that cannot be written is no reason to fail.
        let _ = match &mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Stdout => std::io::stdout().write_all(line.as_bytes()),
            Sink::Stderr => std::io::stderr().write_all(line.as_bytes()),
            Sink::File(file) => file.write_all(line.as_bytes()),
        };
    }
}

fn thread() -> i64 {
    // SAFETY: no arguments, no effects.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let level = match record.level() {
                Level::Error | Level::Warn => "WARN",
                Level::Info => "INFO",
                Level::Debug | Level::Trace => "TRACE",
            };
            self.write(level, &record.args().to_string());
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_after_host_and_process() {
        assert_eq!(path("/tmp/log.%h.%p", "node1", 42), "/tmp/log.node1.42");
        assert_eq!(path("100%%%", "node1", 42), "100%%");
    }

    #[test]
    fn levels_are_those_of_nccl() {
        let all = [None, Some("VERSION"), Some("warn"), Some("INFO"), Some("TRACE"), Some("?")];
        let expected = [
            LevelFilter::Off,
            LevelFilter::Off,
            LevelFilter::Warn,
            LevelFilter::Info,
            LevelFilter::Trace,
            LevelFilter::Off,
        ];
        assert_eq!(all.map(level), expected);
        assert!(is_version(Some("Version")) && !is_version(Some("INFO")));
    }

    #[test]
    fn the_introduction_names_file_and_version() {
        let text = introduction();
        assert!(text.contains("2.28.9") && text.contains('/'), "{text}");
    }
}
