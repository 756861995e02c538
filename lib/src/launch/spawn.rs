//! Starts the processes.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

use super::output::Relays;
use super::{Launcher, OP};
use tinynccl_plan::error::{Error, Result};
use tinynccl_transport::bootstrap::{OF_TORCHRUN, UniqueId};

/// The path of this program: as `/proc` says it or, where there is none, as it was when this program was started.
pub(super) fn own_path(from_proc: std::io::Result<PathBuf>) -> Result<PathBuf> {
    from_proc.or_else(|e| {
        // SAFETY: the kernel gives every program a string with that address, or 0; it lies above the stack and stays.
        let name = unsafe {
            match libc::getauxval(libc::AT_EXECFN) as *const std::ffi::c_char {
                name if name.is_null() => None,
                name => Some(CStr::from_ptr(name)),
            }
        };
        let path = name.map(|name| Path::new(OsStr::from_bytes(name.to_bytes())));
        // Relative to the folder of that time, which may not be ours any more.
        match path.and_then(|path| std::path::absolute(path).ok()).filter(|path| path.is_file()) {
            Some(path) => Ok(path),
            None => Err(Error::io(OP, "finding this program's own path; name it with Launcher::program", &e)),
        }
    })
}

/// One process per rank, in rank order. If one cannot be started, those before it are killed.
pub(super) fn all(launcher: &Launcher, id: &UniqueId, relays: &mut Relays) -> Result<Vec<Child>> {
    let mut children = Vec::with_capacity(launcher.ranks);
    for rank in 0..launcher.ranks {
        match one(launcher, id, rank, relays) {
            Ok(child) => children.push(child),
            Err(e) => {
                for mut child in children {
                    // Both fail only for a child that has been waited for.
                    let _ = child.kill();
                    let _ = child.wait();
                }
                return Err(e);
            }
        }
    }
    Ok(children)
}

fn one(launcher: &Launcher, id: &UniqueId, rank: usize, relays: &mut Relays) -> Result<Child> {
    let Some(program) = &launcher.program else { return Err(Error::invalid(OP, "no program given")) };
    let mut command = Command::new(program);
    // Of a torchrun whose rank we are.
    for name in OF_TORCHRUN {
        command.env_remove(name);
    }
    command
        .args(&launcher.args)
        .envs(launcher.env.iter().map(|(name, value)| (name, value)))
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", launcher.ranks.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("LOCAL_WORLD_SIZE", launcher.ranks.to_string())
        .env("TINYNCCL_UNIQUE_ID", id.to_string());
    if rank > 0 {
        command.stdin(Stdio::null());
    }
    if rank > 0 || !launcher.plain_rank0 {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    die_with_us(&mut command);
    let mut child =
        command.spawn().map_err(|e| Error::io(OP, format!("starting rank {rank}: {}", program.display()), &e))?;
    let piped = relay(launcher, rank, &mut child, relays);
    if let Err(e) = piped {
        let _ = child.kill();
        let _ = child.wait();
        return Err(e);
    }
    Ok(child)
}

fn relay(launcher: &Launcher, rank: usize, child: &mut Child, relays: &mut Relays) -> Result<()> {
    if let Some(pipe) = child.stdout.take() {
        relays.start(rank, pipe, launcher.stdout.clone())?;
    }
    if let Some(pipe) = child.stderr.take() {
        relays.start(rank, pipe, launcher.stderr.clone())?;
    }
    Ok(())
}

/// Has the kernel kill the child when we die.
fn die_with_us(command: &mut Command) {
    let launcher: Pid = getpid();
    let before_exec = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // We may have died before that call.
        if getppid() == Some(launcher) { Ok(()) } else { Err(std::io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: between fork and exec only two plain system calls are made and nothing is allocated.
    unsafe {
        command.pre_exec(before_exec);
    }
}
