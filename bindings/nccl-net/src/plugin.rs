//! The functions behind all versions of the table.
//!
//! A process has one [`Net`], however many communicators it has: from the first `init` on, until as many `finalize`
//! have come (never under versions before 11, which have none). NCCL holds addresses of boxes: a [`Listener`], a
//! [`Sender`], a [`Receiver`], [`Memory`]; of requests, which belong to their connections; and [`DONE`].

use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tinynccl_plan::Error;
use tinynccl_sys::Config;
use tinynccl_transport::rails::{
    Connecting, Handle, Listener, MAX_GROUP, Memory, Net, Receiver, Request, Sender, forks,
};

use crate::abi::{Logger, PTR_HOST, Status};
use crate::{device, logger};

/// The name that `NCCL_NET` and a communicator's configuration choose it by.
pub(crate) const NAME: &CStr = c"tinynccl";

/// A request that was done when it was made: NCCL requests a flush where nothing has to be flushed.
static DONE: u8 = 0;

struct State {
    /// Connections that are being made, by the number that is kept in their handles. Dropped before their threads.
    connecting: HashMap<u64, Connecting>,
    net: Net,
    speed: c_int,
    users: usize,
    next: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The process that has a [`Net`], as [`forks`] counts them; [`NOBODY`] if none has. A child of it has none of its
/// threads, and locks that they held stay locked there.
static HOME: AtomicU32 = AtomicU32::new(NOBODY);
const NOBODY: u32 = u32::MAX;

/// Returns true in a forked child of the process that has the [`Net`]: nothing of that is touched here.
fn is_child() -> bool {
    let home = HOME.load(Ordering::Acquire);
    home != NOBODY && home != forks()
}

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Error of a call: its status for NCCL, and the text for the log.
pub(crate) struct Fault {
    status: Status,
    text: String,
}

impl Fault {
    #[cold]
    fn child() -> Fault {
        let text = format!(
            "process {} was forked from the one that uses this plugin: make the call there, or run a new program here",
            std::process::id()
        );
        Fault { status: Status::InvalidUsage, text }
    }

    fn argument(text: impl Into<String>) -> Fault {
        Fault { status: Status::InvalidArgument, text: text.into() }
    }
}

impl From<Error> for Fault {
    fn from(e: Error) -> Fault {
        let status = match e {
            Error::Connection { .. } | Error::PeerLost { .. } | Error::Timeout { .. } => Status::RemoteError,
            Error::Os { .. } => Status::SystemError,
            _ => Status::InvalidUsage,
        };
        Fault { status, text: e.to_string() }
    }
}

/// Runs the body of a function; in a forked child it fails instead. An error is logged, and nothing unwinds into C.
fn run(name: &str, body: impl FnOnce() -> Result<(), Fault>) -> Status {
    let body = || if is_child() { Err(Fault::child()) } else { body() };
    let fault = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return Status::Success,
        Ok(Err(fault)) => fault,
        Err(panic) => panicked(&*panic),
    };
    // Of NCCL's function, too.
    let _ = catch_unwind(AssertUnwindSafe(|| log::warn!("{name}: {}", fault.text)));
    fault.status
}

/// Runs the body of a function that closes something, as [`run`] does; in a forked child it does nothing and succeeds,
/// as its parent goes on.
fn end(name: &str, body: impl FnOnce() -> Result<(), Fault>) -> Status {
    if is_child() { Status::Success } else { run(name, body) }
}

fn panicked(panic: &(dyn Any + Send)) -> Fault {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = format!("panicked ({}): a fault of this library, please report it", text.unwrap_or("no message"));
    Fault { status: Status::InternalError, text }
}

/// Returns a reference to an argument that is to be written; an error for null.
///
/// # Safety
/// `pointer` is null, or valid for writes for as long as the call lasts.
unsafe fn out<'a, T>(name: &str, pointer: *mut T) -> Result<&'a mut T, Fault> {
    // SAFETY: by the caller's contract; NCCL passes its own memory, which nothing else uses during the call.
    unsafe { pointer.as_mut() }.ok_or_else(|| Fault::argument(format!("{name} is NULL")))
}

/// Returns the object that NCCL got from us and gives back; an error for null.
///
/// # Safety
/// `pointer` is null, or the address of a `T` that was not closed.
unsafe fn own<'a, T>(name: &str, pointer: *mut c_void) -> Result<&'a T, Fault> {
    // SAFETY: by the caller's contract.
    unsafe { pointer.cast::<T>().as_ref() }.ok_or_else(|| Fault::argument(format!("{name} is NULL")))
}

fn check_device(dev: c_int) -> Result<(), Fault> {
    if dev == 0 { Ok(()) } else { Err(Fault::argument(format!("device {dev}: expected 0, the only one"))) }
}

pub(crate) fn init(to: Option<Logger>) -> Status {
    run("init", || {
        let mut state = state();
        logger::set(to);
        if let Some(state) = &mut *state {
            state.users += 1;
            return Ok(());
        }
        let config = Config::from_env()?;
        // NCCL's own bootstrap carries the handles, in clear text.
        config.check_key("NCCL's bootstrap, which sends the handles in clear text,")?;
        let net = Net::new(&config)?;
        let speed = device::speed(&config, &net);
        log::info!("tinynccl {}: ports {}; {speed} Mbit/s", env!("CARGO_PKG_VERSION"), net.describe());
        *state = Some(State { net, speed, users: 1, connecting: HashMap::new(), next: 1 });
        HOME.store(forks(), Ordering::Release);
        Ok(())
    })
}

/// Undoes one `init`. With the last one the network ends: connections that are still open fail, and so does what is
/// posted on them.
pub(crate) unsafe extern "C" fn finalize(_ctx: *mut c_void) -> Status {
    end("finalize", || {
        let mut last = None;
        {
            let mut state = state();
            if let Some(users) = state.as_mut().map(|s| &mut s.users) {
                *users -= 1;
                if *users == 0 {
                    last = state.take();
                    HOME.store(NOBODY, Ordering::Release);
                }
            }
        }
        // Its threads end, without the lock: what they log goes to NCCL, for the last time if no init came meanwhile.
        if last.take().is_some() {
            let state = state();
            if state.is_none() {
                logger::set(None);
            }
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    run("devices", || {
        // SAFETY: NCCL's variable.
        *unsafe { out("the count", count) }? = 1;
        Ok(())
    })
}

/// Writes the device's properties, which `make` builds from its speed.
///
/// # Safety
/// `to` is null or valid for writes.
pub(crate) unsafe fn properties<T>(dev: c_int, to: *mut T, make: impl FnOnce(c_int) -> T) -> Status {
    run("getProperties", || {
        check_device(dev)?;
        let speed = state().as_ref().map(|s| s.speed).ok_or_else(|| Fault::argument("init was not called"))?;
        if to.is_null() {
            return Err(Fault::argument("props is NULL"));
        }
        // SAFETY: by the caller's contract; whatever was there is plain data.
        unsafe { to.write(make(speed)) };
        Ok(())
    })
}

/// # Safety
/// As NCCL calls it: `handle` has 128 bytes.
pub(crate) unsafe fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> Status {
    run("listen", || {
        check_device(dev)?;
        // SAFETY: NCCL's variables.
        let (handle, comm) =
            unsafe { (out("the handle", handle.cast::<[u8; Handle::BYTES]>())?, out("listenComm", listen_comm)?) };
        let state = state();
        let state = state.as_ref().ok_or_else(|| Fault::argument("init was not called"))?;
        let (text, listener) = state.net.listen()?;
        *handle = text.to_bytes();
        *comm = Box::into_raw(Box::new(listener)).cast();
        Ok(())
    })
}

/// NCCL calls this with the same handle until it gives a connection: the handle keeps the number of what was begun.
///
/// # Safety
/// As NCCL calls it: `handle` has 128 bytes.
pub(crate) unsafe fn connect(dev: c_int, handle: *mut c_void, send_comm: *mut *mut c_void) -> Status {
    run("connect", || {
        check_device(dev)?;
        // SAFETY: NCCL's variables.
        let (handle, comm) =
            unsafe { (out("the handle", handle.cast::<[u8; Handle::BYTES]>())?, out("sendComm", send_comm)?) };
        *comm = ptr::null_mut();
        let parsed = Handle::parse(handle)?;
        let mut state = state();
        let state = state.as_mut().ok_or_else(|| Fault::argument("init was not called"))?;
        let mut number = [0; 8];
        number.iter_mut().zip(&handle[Handle::OWN]).for_each(|(to, from)| *to = *from);
        let mut number = u64::from_le_bytes(number);
        if number == 0 {
            number = state.next;
            state.next += 1;
            state.connecting.insert(number, state.net.connect(&parsed)?);
            handle[Handle::OWN].copy_from_slice(&number.to_le_bytes());
        }
        let polled = state.connecting.get(&number).map(Connecting::poll);
        let made = polled.ok_or_else(|| Fault::argument("the handle belongs to a connection that is over"))?;
        if let Ok(None) = made {
            return Ok(());
        }
        state.connecting.remove(&number);
        handle[Handle::OWN].fill(0);
        if let Some(sender) = made? {
            *comm = Box::into_raw(Box::new(sender)).cast();
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _device_handle: *mut *mut c_void,
) -> Status {
    run("accept", || {
        // SAFETY: from `listen`; NCCL's variable.
        let (listener, comm) = unsafe { (own::<Listener>("listenComm", listen_comm)?, out("recvComm", recv_comm)?) };
        *comm = ptr::null_mut();
        if let Some(receiver) = listener.accept()? {
            *comm = Box::into_raw(Box::new(receiver)).cast();
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn reg_mr(
    _comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> Status {
    run("regMr", || {
        if kind != PTR_HOST {
            return Err(Fault::argument(format!("memory of kind {kind}: expected {PTR_HOST}, the host's")));
        }
        // SAFETY: NCCL's variable.
        let handle = unsafe { out("mhandle", mhandle) }?;
        let state = state();
        let state = state.as_ref().ok_or_else(|| Fault::argument("init was not called"))?;
        // SAFETY: NCCL keeps the memory until it has deregistered it.
        let memory = unsafe { state.net.register(data.cast(), size) };
        *handle = Box::into_raw(Box::new(memory)).cast();
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn reg_mr_dma_buf(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: usize,
    _kind: c_int,
    _offset: u64,
    _fd: c_int,
    _mhandle: *mut *mut c_void,
) -> Status {
    run("regMrDmaBuf", || Err(Fault::argument("sockets take no dmabuf, and the device does not say so")))
}

pub(crate) unsafe extern "C" fn dereg_mr(_comm: *mut c_void, mhandle: *mut c_void) -> Status {
    // SAFETY: from `regMr`.
    unsafe { close::<Memory>("deregMr", mhandle) }
}

/// # Safety
/// As NCCL calls it: the memory is valid until the request is done or the connection is closed.
pub(crate) unsafe fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    request: *mut *mut c_void,
) -> Status {
    run("isend", || {
        // SAFETY: from `connect`; NCCL's variable.
        let (sender, request) = unsafe { (own::<Sender>("sendComm", comm)?, out("request", request)?) };
        if data.is_null() && size > 0 {
            return Err(Fault::argument(format!("data is NULL, and size {size}")));
        }
        let data = if data.is_null() { ptr::NonNull::dangling().as_ptr() } else { data.cast::<u8>() };
        // SAFETY: by the caller's contract.
        *request = address(unsafe { sender.send(data, size, tag) }?);
        Ok(())
    })
}

/// # Safety
/// As NCCL calls it: the memory is valid until the request is done or the connection is closed.
pub(crate) unsafe fn irecv(
    comm: *mut c_void,
    group: impl Fn(usize) -> (*mut c_void, usize, c_int),
    n: c_int,
    request: *mut *mut c_void,
) -> Status {
    run("irecv", || {
        // SAFETY: from `accept`; NCCL's variable.
        let (receiver, request) = unsafe { (own::<Receiver>("recvComm", comm)?, out("request", request)?) };
        let n = usize::try_from(n).ok().filter(|n| (1..=MAX_GROUP).contains(n));
        let n = n.ok_or_else(|| Fault::argument(format!("expected 1 to {MAX_GROUP} receives in a group")))?;
        let mut posted = [(ptr::null_mut(), 0, 0); MAX_GROUP];
        for (i, posted) in posted.iter_mut().take(n).enumerate() {
            let (data, size, tag) = group(i);
            if data.is_null() && size > 0 {
                return Err(Fault::argument(format!("data of receive {i} is NULL, and its size {size}")));
            }
            *posted = (if data.is_null() { ptr::NonNull::dangling().as_ptr() } else { data.cast::<u8>() }, size, tag);
        }
        // SAFETY: by the caller's contract.
        *request = address(unsafe { receiver.receive(posted.get(..n).unwrap_or_default()) }?);
        Ok(())
    })
}

fn address(request: Option<&Request>) -> *mut c_void {
    request.map_or(ptr::null_mut(), |r| ptr::from_ref(r).cast_mut().cast())
}

pub(crate) unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> Status {
    run("iflush", || {
        // SAFETY: NCCL's variable.
        *unsafe { out("request", request) }? = (&raw const DONE).cast_mut().cast();
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> Status {
    run("test", || {
        // SAFETY: NCCL's variable.
        let done = unsafe { out("done", done) }?;
        *done = 0;
        if ptr::eq(request.cast_const().cast(), &raw const DONE) {
            *done = 1;
            return Ok(());
        }
        // SAFETY: from `isend` or `irecv` of a connection that is not closed.
        let request = unsafe { own::<Request>("request", request) }?;
        let mut lengths = [0; MAX_GROUP];
        let Some(count) = request.test(&mut lengths)? else { return Ok(()) };
        if !sizes.is_null() {
            for (i, len) in lengths.iter().take(count).enumerate() {
                // SAFETY: NCCL passes as many as it has posted. Lengths beyond 2 GiB do not fit its type.
                unsafe { sizes.add(i).write(c_int::try_from(*len).unwrap_or(c_int::MAX)) };
            }
        }
        *done = 1;
        Ok(())
    })
}

/// Closes what `pointer` is the address of.
///
/// # Safety
/// `pointer` is null, or from `Box::into_raw` of a `T`, and not closed yet.
unsafe fn close<T>(name: &str, pointer: *mut c_void) -> Status {
    end(name, || {
        if pointer.is_null() {
            return Err(Fault::argument("what is to be closed is NULL"));
        }
        // SAFETY: by the caller's contract.
        drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_send(comm: *mut c_void) -> Status {
    // SAFETY: from `connect`.
    unsafe { close::<Sender>("closeSend", comm) }
}

pub(crate) unsafe extern "C" fn close_recv(comm: *mut c_void) -> Status {
    // SAFETY: from `accept`.
    unsafe { close::<Receiver>("closeRecv", comm) }
}

pub(crate) unsafe extern "C" fn close_listen(comm: *mut c_void) -> Status {
    // SAFETY: from `listen`.
    unsafe { close::<Listener>("closeListen", comm) }
}
