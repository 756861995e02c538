//! Processes that have an RDMA device of the same interface and do not run: packets for others pass them by. In a
//! separate network namespace; the test program starts itself there, and as each such process.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use softroce::{Device, SendOp, Service, Status};

use crate::end::{End, pattern};

const ROLE: &str = "SOFTROCE_TEST_STOPPED";
/// Processes that do not run: without care, the kernel would pick another one for some direction almost surely.
const COUNT: usize = 6;

fn ip(arguments: &str) {
    assert!(Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success()), "{arguments}");
}

fn again(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "stopped::a_role", "--nocapture"]).env(ROLE, role);
    command
}

/// A process that has the RDMA device open and was stopped.
struct Stopped(Child);

impl Stopped {
    fn start() -> Stopped {
        let mut child = again("stops").stdout(Stdio::piped()).spawn().expect("started");
        let mut text = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        while !text.contains("OPEN") {
            let mut byte = [0];
            assert_eq!(stdout.read(&mut byte).expect("read"), 1, "it ended: {text}");
            text.push(byte[0] as char);
        }
        let stopped = Stopped(child);
        stopped.stop();
        stopped
    }

    fn stop(&self) {
        let mut status = 0;
        // SAFETY: a child of ours; waits until it is stopped.
        unsafe {
            assert_eq!(libc::kill(self.0.id() as libc::pid_t, libc::SIGSTOP), 0);
            libc::waitpid(self.0.id() as libc::pid_t, &raw mut status, libc::WUNTRACED);
        }
        assert!(libc::WIFSTOPPED(status));
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn card() -> std::sync::Arc<softroce::Context> {
    let devices = Device::list().expect("interfaces");
    devices.iter().find(|d| d.interface() == "lo").expect("it is up").open().expect("opened")
}

/// Two ends that reach each other as RDMA devices of different hosts do, and a message in each direction.
fn transfer(context: &std::sync::Arc<softroce::Context>) {
    let (a, b) = (End::at(context, Service::Rc, 1), End::at(context, Service::Rc, 2));
    for (from, to) in [(&a, &b), (&b, &a)] {
        from.connect_with(&to.card(), |attr| {
            if let Some(path) = &mut attr.path {
                path.local = false;
            }
        });
    }
    for (from, to, seed) in [(&a, &b, 1), (&b, &a, 2)] {
        from.write(0, &pattern(100_000, seed));
        from.send(1, SendOp::Write(to.card().remote), 0, 100_000);
        assert_eq!(from.wait().status, Status::Success);
        assert_eq!(to.read(0, 100_000), pattern(100_000, seed));
    }
}

fn run() {
    ip("link set lo up");
    for address in ["192.0.2.1/32", "192.0.2.2/32"] {
        ip(&format!("address add {address} dev lo"));
    }
    // Stopped before the RDMA device is opened.
    let before: Vec<_> = (0..COUNT).map(|_| Stopped::start()).collect();
    let context = card();
    transfer(&context);
    // After: these took all packets over as they opened.
    let after: Vec<_> = (0..COUNT).map(|_| Stopped::start()).collect();
    transfer(&context);
    // Some go, so that others have other indexes.
    drop(before);
    transfer(&context);
    drop(after);
    transfer(&context);
}

#[test]
fn a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("stops") => {
            let _context = card();
            println!("OPEN");
            // Until it is killed.
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
        Ok(_) => run(),
        Err(_) => {}
    }
}

#[test]
fn stopped_processes_take_no_packets_of_others() {
    let works = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    if !works(Command::new("unshare").args(["-rn", "true"])) {
        return eprintln!("SKIPPED: `unshare -rn` makes no user and network namespace here");
    }
    if !works(Command::new("ip").arg("-V")) {
        return eprintln!("SKIPPED: no `ip` here (package iproute2)");
    }
    let inner = again("runs");
    let mut outer = Command::new("unshare");
    outer.args(["-rn", "--"]).arg(inner.get_program()).args(inner.get_args()).env(ROLE, "runs");
    let output = outer.output().expect("ran");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
