//! Leaks of closed communicators: after thousands of them the memory of a process is that after some.
//!
//! Counted by the allocator of this test program, in separate processes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicIsize, Ordering};

use tinynccl::bootstrap::Server;
use tinynccl::config::Tune;
use tinynccl::{Comm, Config, ReduceOp, Result};

const ROLE: &str = "TINYNCCL_TEST_FLAT";
const RANKS: usize = 2;
/// Communicators before the first count: buffers have grown by then.
const BEFORE: u32 = 300;
const MORE: u32 = 2000;
/// A handler and the progress of one communicator are 3 KiB.
const BYTES_EACH: isize = 64;

struct Counting;

/// Bytes in use.
static BYTES: AtomicIsize = AtomicIsize::new(0);

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size() as isize, Ordering::Relaxed);
        // SAFETY: by the caller.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn config() -> Config {
    let mut config = Config::from_env().expect("settings");
    config.tune = Tune::Off;
    config
}

/// Makes communicators, uses each, and closes it or drops it; every fifth has an asynchronous call.
fn make(comm: &Comm, number: u32) -> Result<()> {
    for i in 0..number {
        let child = comm.split(Some(0), 0)?.expect("every rank has a colour");
        let mut sum = [i];
        child.all_reduce_in_place(&mut sum, ReduceOp::Sum)?;
        assert_eq!(sum, [RANKS as u32 * i]);
        if i % 5 == 0 {
            child.all_reduce_in_place_async(vec![1u8; 100], ReduceOp::Sum)?.wait()?;
        }
        if i % 3 > 0 {
            child.close()?;
        }
    }
    // Every rank's last communicator is gone.
    comm.barrier()
}

fn counted(comm: &Comm) -> Result<()> {
    make(comm, BEFORE)?;
    let before = BYTES.load(Ordering::Relaxed);
    make(comm, MORE)?;
    let grown = BYTES.load(Ordering::Relaxed) - before;
    assert!(grown < MORE as isize * BYTES_EACH, "{grown} bytes more after {MORE} communicators");
    comm.barrier()
}

/// All ranks, or one of them. It does nothing unless it is started for that.
#[test]
fn ranks() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.split_once(' ') {
        None => std::thread::scope(|scope| {
            for comm in Comm::threads(RANKS, config()).expect("a world") {
                scope.spawn(move || counted(&comm).expect("nothing fails"));
            }
        }),
        Some((rank, id)) => {
            let (rank, id) = (rank.parse().expect("a rank"), id.parse().expect("an id"));
            counted(&Comm::init(&id, rank, RANKS, config()).expect("init")).expect("nothing fails");
        }
    }
}

fn start(role: String) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "flat::ranks", "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command.spawn().expect("a process")
}

#[test]
fn communicators_of_threads_leave_nothing() {
    assert!(start("threads".to_owned()).wait().expect("its end").success());
}

#[test]
fn communicators_of_processes_leave_nothing() {
    let bind = "127.0.0.1:0".parse().expect("an address");
    let server = Server::start(bind, RANKS, &config()).expect("server");
    let ranks: Vec<Child> = (0..RANKS).map(|rank| start(format!("{rank} {}", server.unique_id()))).collect();
    for mut rank in ranks {
        assert!(rank.wait().expect("its end").success());
    }
}
