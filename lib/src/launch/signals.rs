//! The signals that a launcher passes on, and the end of ranks.

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::SigId;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};

use super::OP;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::doorbell::Doorbell;

const PASSED_ON: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// Launchers that run in this process.
static ACTIVE: AtomicUsize = AtomicUsize::new(0);

/// A signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Came {
    pub(super) signal: i32,
    /// The kernel sent it: for SIGINT a Ctrl-C at the terminal, which goes to the whole foreground group.
    pub(super) from_kernel: bool,
}

/// Watches signals until dropped.
#[derive(Debug)]
pub(super) struct Signals {
    state: Arc<State>,
    ids: Vec<SigId>,
    _mask: Unblocked,
}

#[derive(Debug)]
struct State {
    bell: Arc<Doorbell>,
    /// Signals of [`PASSED_ON`] so far, each from a process and from the kernel.
    counts: [[AtomicU32; 2]; PASSED_ON.len()],
}

impl Signals {
    pub(super) fn watch() -> Result<Signals> {
        let watched = keep_default()?;
        let bell = Doorbell::new()?;
        ACTIVE.fetch_add(1, Ordering::SeqCst);
        let mut signals = Signals {
            state: Arc::new(State { bell, counts: Default::default() }),
            ids: Vec::new(),
            _mask: Unblocked::here(watched),
        };
        let failed = |e: std::io::Error| Error::io(OP, "installing a signal handler", &e);
        for (index, &signal) in PASSED_ON.iter().enumerate().filter(|(_, s)| watched.contains(s)) {
            let state = Arc::clone(&signals.state);
            let action = move |info: &libc::siginfo_t| {
                if let Some(counts) = state.counts.get(index) {
                    // Positive codes are the kernel's, others those of kill(2) and its kin.
                    let [process, kernel] = counts;
                    if info.si_code > 0 { kernel } else { process }.fetch_add(1, Ordering::SeqCst);
                }
                state.bell.ring();
            };
            // SAFETY: the action does what is allowed in a signal handler: atomics and one raw write(2) that does not
            // touch errno; it does not allocate, lock or panic.
            let id = unsafe { signal_hook_registry::register_sigaction(signal, action) }.map_err(failed)?;
            signals.ids.push(id);
        }
        let state = Arc::clone(&signals.state);
        // SAFETY: as above.
        let id = unsafe { signal_hook_registry::register(SIGCHLD, move || state.bell.ring()) }.map_err(failed)?;
        signals.ids.push(id);
        Ok(signals)
    }

    /// The signals since the last call.
    pub(super) fn take(&self) -> Vec<Came> {
        self.state.bell.drain();
        let mut came = Vec::new();
        for (&signal, counts) in PASSED_ON.iter().zip(&self.state.counts) {
            for (from_kernel, count) in [false, true].into_iter().zip(counts) {
                for _ in 0..count.swap(0, Ordering::SeqCst) {
                    came.push(Came { signal, from_kernel });
                }
            }
        }
        came
    }

    /// Becomes readable when a signal came or a child ended.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.state.bell.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook_registry::unregister(id);
        }
        ACTIVE.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The watched signals reach this thread, also where who started this process has blocked them, until dropped.
#[derive(Debug)]
struct Unblocked {
    before: libc::sigset_t,
    /// The mask is a thread's own.
    _here: PhantomData<*const ()>,
}

impl Unblocked {
    fn here(watched: &[i32]) -> Unblocked {
        let mut sets = [std::mem::MaybeUninit::<libc::sigset_t>::zeroed(); 2];
        let [ours, before] = &mut sets;
        // SAFETY: sets of ours, which the calls fill; the numbers are those of signals, and only this thread's mask is
        // changed. Zeros are a valid value if a call fails.
        let before = unsafe {
            libc::sigemptyset(ours.as_mut_ptr());
            for &signal in watched.iter().chain(&[SIGCHLD]) {
                libc::sigaddset(ours.as_mut_ptr(), signal);
            }
            libc::pthread_sigmask(libc::SIG_UNBLOCK, ours.as_ptr(), before.as_mut_ptr());
            before.assume_init()
        };
        Unblocked { before, _here: PhantomData }
    }
}

impl Drop for Unblocked {
    fn drop(&mut self) {
        // SAFETY: the mask is the one that this thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// The registry keeps its handler installed for good, which would leave this process deaf to Ctrl-C once no launcher
/// runs. So one more action, also for good, does what the signal does by default. Returns the signals that may be
/// watched: not those that were ignored when we came (`nohup`).
fn keep_default() -> Result<&'static [i32]> {
    static WATCHED: OnceLock<Result<Vec<i32>>> = OnceLock::new();
    let watched = WATCHED.get_or_init(|| {
        let mut watched = Vec::new();
        for signal in PASSED_ON {
            if is_ignored(signal) {
                continue;
            }
            let action = move || {
                if ACTIVE.load(Ordering::SeqCst) == 0 {
                    // It fails for signals that do not exist only.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            };
            // SAFETY: an atomic load, and a function that is made for signal handlers.
            unsafe { signal_hook_registry::register(signal, action) }
                .map_err(|e| Error::io(OP, "installing a signal handler", &e))?;
            watched.push(signal);
        }
        Ok(watched)
    });
    watched.as_deref().map_err(Clone::clone)
}

fn is_ignored(signal: i32) -> bool {
    let mut old = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: queries only, no new action; `old` is as large as the call needs; zeroes are a valid value if it fails.
    let old = unsafe {
        libc::sigaction(signal, std::ptr::null(), old.as_mut_ptr());
        old.assume_init()
    };
    old.sa_sigaction == libc::SIG_IGN
}
