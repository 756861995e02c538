//! SIGUSR1 as a request: a doorbell rings, and a thread of the library does what was asked for.
//!
//! A library takes a signal only where the program has no use for it: while its disposition is the default one, which
//! ends the process. A handler that the program installs later replaces ours. In a forked child nothing happens.

use std::sync::Arc;
use std::sync::OnceLock;

use crate::doorbell::Doorbell;
use crate::fork::Origin;
use tinynccl_plan::error::{Error, Result};

/// The doorbell, and the process that has it. Never taken away, as the handler may run at any time.
static BELL: OnceLock<(Arc<Doorbell>, Origin)> = OnceLock::new();

/// Rings `bell` at each SIGUSR1 from here on. Returns false, and changes nothing, where the program handles or ignores
/// the signal, or where another bell was given before.
///
/// # Errors
/// The system refuses.
pub fn ring(bell: &Arc<Doorbell>) -> Result<bool> {
    let failed = || Error::io("SIGUSR1", "sigaction", &std::io::Error::last_os_error());
    // SAFETY: all zeros are a valid sigaction, which the call then fills.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a question alone, into a variable of ours.
    if unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), &mut found) } != 0 {
        return Err(failed());
    }
    if found.sa_sigaction != libc::SIG_DFL || BELL.set((bell.clone(), Origin::here())).is_err() {
        return Ok(false);
    }
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int) = rung;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the mask is empty, and `rung` calls only what a handler may call.
    if unsafe { libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()) } != 0 {
        return Err(failed());
    }
    Ok(true)
}

/// Writes to the eventfd and nothing else.
extern "C" fn rung(_: libc::c_int) {
    let Some((bell, origin)) = BELL.get() else { return };
    if !origin.is_here() {
        return;
    }
    // SAFETY: errno belongs to this thread, whose code may be about to read it; write(2) is async-signal-safe, and the
    // descriptor stays open as `BELL` keeps it.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        libc::write(bell.fd(), (&raw const ONE).cast(), size_of_val(&ONE));
        *errno = before;
    }
}

static ONE: u64 = 1;
