//! MPI itself: started once, ended with the last group that uses it. Also a group's MPI communicator.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use mpi::environment::Universe;
use mpi::{Threading, ffi};

use crate::process_group::backend::{Backend, BackendType, not_carried};
use crate::process_group::gpu::{CudaContext, Stream};
use tinynccl_comm::RawCall;
use tinynccl_comm::{Comm, Inner};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// MPI, started; ends when it is dropped, unless the program had started it.
struct World {
    _universe: Option<Universe>,
}

/// Kept between [`find`] and [`make`], so that MPI does not end in between.
static WORLD: Mutex<(Weak<World>, Option<Arc<World>>)> = Mutex::new((Weak::new(), None));

const MPI_SUCCESS: c_int = 0;

/// A status as text.
pub(super) fn done(what: &str, status: c_int) -> Result<()> {
    if status == MPI_SUCCESS {
        return Ok(());
    }
    let mut text = [0u8; 1024];
    let mut length = 0;
    // SAFETY: longer than MPI_MAX_ERROR_STRING of every library (256 to 512).
    unsafe { ffi::MPI_Error_string(status, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    Err(Error::invalid(what, format!("MPI: {} ({status})", String::from_utf8_lossy(&text[..length]))))
}

fn start() -> Result<Arc<World>> {
    let unsupported = |detail: String| Error::Unsupported { what: "MPI".to_owned(), detail };
    let mut kept = lock(&WORLD);
    if let Some(world) = kept.0.upgrade() {
        return Ok(world);
    }
    let (mut initialized, mut finalized) = (0, 0);
    // SAFETY: both may be called at any time.
    unsafe {
        done("MPI_Initialized", ffi::MPI_Initialized(&mut initialized))?;
        done("MPI_Finalized", ffi::MPI_Finalized(&mut finalized))?;
    }
    if finalized != 0 {
        return Err(unsupported(
            "it has ended with the last group that used it, and MPI cannot be started twice in a process: keep one group until the end"
                .to_owned(),
        ));
    }
    let (universe, level) = match initialized {
        0 => match mpi::initialize_with_threading(Threading::Multiple) {
            Some((universe, level)) => (Some(universe), level),
            None => return Err(unsupported("another thread has just started it".to_owned())),
        },
        _ => (None, mpi::environment::threading_support()),
    };
    if level < Threading::Multiple {
        return Err(unsupported(format!(
            "the library gives thread level {level:?}; asynchronous calls run on a thread of their own, which needs MPI_THREAD_MULTIPLE"
        )));
    }
    let world = Arc::new(World { _universe: universe });
    *kept = (Arc::downgrade(&world), Some(world.clone()));
    Ok(world)
}

/// Starts MPI and returns the library's version, if its ranks are ours.
pub(in crate::process_group) fn find(comm: &Comm) -> Result<String> {
    start()?;
    let (mut rank, mut size) = (0, 0);
    // SAFETY: MPI has been started.
    unsafe {
        done("MPI_Comm_rank", ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank))?;
        done("MPI_Comm_size", ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size))?;
    }
    let members = &comm.inner().state().members;
    let ours = members[comm.rank()];
    if usize::try_from(rank) != Ok(ours) || members.iter().any(|&m| usize::try_from(size).is_ok_and(|size| m >= size)) {
        return Err(Error::Unsupported {
            what: "MPI".to_owned(),
            detail: format!(
                "its world has {size} ranks, of which we are {rank}; ours has {} or more, of which we are {ours}: start the ranks by mpirun (one process each)",
                members.iter().max().map_or(0, |m| m + 1)
            ),
        });
    }
    let library = mpi::environment::library_version().unwrap_or_default();
    let first = library.split([',', '\n']).next().unwrap_or_default().trim().trim_end_matches('\0');
    Ok(format!("{first}, {size} ranks"))
}

/// Our rank's part of a group of the ranks of `comm`.
pub(in crate::process_group) fn make(comm: &Comm) -> Result<Arc<dyn Backend>> {
    let world = start()?;
    lock(&WORLD).1 = None;
    let state = comm.inner().state();
    let ranks: Vec<c_int> = state.members.iter().map(|&m| m as c_int).collect();
    let mut handle = MaybeUninit::<ffi::MPI_Comm>::uninit();
    let (mut all, mut some) = (MaybeUninit::<ffi::MPI_Group>::uninit(), MaybeUninit::<ffi::MPI_Group>::uninit());
    // Tags go up to 32767 at least; groups that have ranks in common are made one after the other.
    let tag = (state.id % 32_767) as c_int;
    // SAFETY: each call fills what the next one uses; every rank of the group makes them.
    let handle = unsafe {
        done("MPI_Comm_group", ffi::MPI_Comm_group(ffi::RSMPI_COMM_WORLD, all.as_mut_ptr()))?;
        let included = ffi::MPI_Group_incl(all.assume_init(), ranks.len() as c_int, ranks.as_ptr(), some.as_mut_ptr());
        done("MPI_Group_incl", included)?;
        let made = ffi::MPI_Comm_create_group(ffi::RSMPI_COMM_WORLD, some.assume_init(), tag, handle.as_mut_ptr());
        done("MPI_Comm_create_group", made)?;
        done("MPI_Group_free", ffi::MPI_Group_free(some.as_mut_ptr()))?;
        done("MPI_Group_free", ffi::MPI_Group_free(all.as_mut_ptr()))?;
        handle.assume_init()
    };
    // SAFETY: the communicator is ours.
    done("MPI_Comm_set_errhandler", unsafe { ffi::MPI_Comm_set_errhandler(handle, ffi::RSMPI_ERRORS_RETURN) })?;
    let timeout = comm.config().timeout;
    Ok(Arc::new(Mpi {
        comm: handle,
        rank: comm.rank(),
        size: comm.size(),
        timeout,
        origin: state.origin,
        _world: world,
    }))
}

/// A group's MPI communicator.
pub(super) struct Mpi {
    pub(super) comm: ffi::MPI_Comm,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) timeout: Duration,
    origin: Origin,
    // Dropped last.
    _world: Arc<World>,
}

// SAFETY: MPI was started for several threads.
unsafe impl Send for Mpi {}
// SAFETY: as above; the group makes its calls one after the other.
unsafe impl Sync for Mpi {}

impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mpi (rank {} of {})", self.rank, self.size)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            // MPI ends with its last user.
            return std::mem::forget(self._world.clone());
        }
        // SAFETY: ours, and used for the last time.
        if let Err(error) = done("MPI_Comm_free", unsafe { ffi::MPI_Comm_free(&mut self.comm) }) {
            log::debug!("rank {}: {error}", self.rank);
        }
    }
}

const DEVICE: &str = "copy it to the host, or ask for backend tinynccl or nccl";

impl Backend for Mpi {
    fn kind(&self) -> BackendType {
        BackendType::Mpi
    }

    unsafe fn run(&self, comm: &Inner, call: &RawCall, background: bool) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { self.call(comm, call, background) }
    }

    unsafe fn run_batch(&self, comm: &Inner, calls: &[RawCall]) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { self.calls(comm, calls) }
    }

    unsafe fn enqueue(&self, calls: &[RawCall], _stream: &Stream) -> Result<()> {
        match calls.first() {
            None => Ok(()),
            Some(call) => Err(not_carried(BackendType::Mpi, call.collective, "device memory", DEVICE)),
        }
    }

    fn device(&self) -> Option<&Arc<CudaContext>> {
        None
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn overdue(&self, op: &str, _waited: Duration) -> Error {
        Error::invalid(op, "backend mpi has no streams")
    }

    fn abort(&self, _reason: &str) {}
}
