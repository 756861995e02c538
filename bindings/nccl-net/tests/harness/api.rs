//! One interface over the tables of all versions.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use super::rdma;
use libloading::Library;
use nccl_net_tinynccl::abi::{CommConfig, PropertiesV8, PropertiesV9, Status};
use nccl_net_tinynccl::{v8, v9, v10, v11, v12};

pub(crate) type Comm = *mut c_void;
pub(crate) type Handle = [u8; 128];

/// Time after which a test fails, as it hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let program = std::env::current_exe().expect("this program");
    let built = program.with_file_name("libnccl_net_tinynccl.so");
    // SAFETY: our library; it has no constructors.
    unsafe { Library::new(&built) }.unwrap_or_else(|e| panic!("{}: {e}", built.display()))
});

/// Lines that the plugin has logged, each with its level.
pub(crate) static LOG: Mutex<String> = Mutex::new(String::new());

/// Memory that is registered until its connection is closed: the connection's address, and the registration's.
static REGISTERED: Mutex<Vec<[usize; 2]>> = Mutex::new(Vec::new());

/// True in a forked child, in which every call must fail.
pub(crate) static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Connections of a process with itself that should have queue pairs.
static PAIRS: AtomicUsize = AtomicUsize::new(0);

/// Logger in the place of NCCL's, for a format of one text. C passes the first of variable arguments as a named one of
/// that type.
unsafe extern "C" fn log(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: texts ended by a zero, as the plugin promises.
    let (format, text) = unsafe { (std::ffi::CStr::from_ptr(format), std::ffi::CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    LOG.lock().unwrap().push_str(&format!("{level} {}\n", text.to_str().unwrap()));
}

fn logger() -> Option<nccl_net_tinynccl::abi::Logger> {
    type Plain = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: on the targets that NCCL has, an argument of the variable part that is a pointer is passed as a named
    // one.
    Some(unsafe { std::mem::transmute::<Plain, nccl_net_tinynccl::abi::Logger>(log) })
}

/// A version of the table, initialised.
#[derive(Clone, Copy)]
pub(crate) struct Api {
    pub(crate) version: u32,
}

pub(crate) const VERSIONS: [u32; 5] = [8, 9, 10, 11, 12];

fn table<T>(name: &str) -> &'static T {
    // SAFETY: tables of these types; the library is never closed.
    unsafe { &**LIBRARY.get::<*const T>(name).unwrap_or_else(|e| panic!("{name}: {e}")) }
}

/// Calls a function of the version's table: the arguments of versions 8 and 9, of 10, and of 11 and 12.
macro_rules! call {
    ($api:expr, $function:ident, ($($all:expr),*)) => { call!($api, $function, ($($all),*), ($($all),*), ($($all),*)) };
    ($api:expr, $function:ident, ($($old:expr),*), ($($ten:expr),*), ($($new:expr),*)) => {
        // SAFETY: tests pass what NCCL would, or what must be refused.
        unsafe {
            match $api.version {
                8 => (table::<v8::Table>("ncclNetPlugin_v8").$function)($($old),*),
                9 => (table::<v9::Table>("ncclNetPlugin_v9").$function)($($old),*),
                10 => (table::<v10::Table>("ncclNetPlugin_v10").$function)($($ten),*),
                11 => (table::<v11::Table>("ncclNetPlugin_v11").$function)($($new),*),
                _ => (table::<v12::Table>("ncclNetPlugin_v12").$function)($($new),*),
            }
        }
    };
}

/// Device properties that NCCL reads, whatever the version.
#[derive(Debug)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) speed: c_int,
    pub(crate) ptr_support: c_int,
    pub(crate) max_recvs: c_int,
}

impl Api {
    /// Initialises the plugin, as NCCL does for each communicator.
    pub(crate) fn init(version: u32) -> Api {
        let api = Api { version };
        let mut config = CommConfig { traffic_class: -1 };
        let mut context = ptr::null_mut();
        let status = call!(api, init, (logger()), (logger(), None), (&mut context, 77, &mut config, logger(), None));
        ok(status);
        let mut count = 0;
        ok(call!(api, devices, (&mut count)));
        assert_eq!(count, 1);
        api
    }

    pub(crate) fn finalize(self) {
        // SAFETY: initialised before.
        ok(unsafe {
            match self.version {
                11 => (table::<v11::Table>("ncclNetPlugin_v11").finalize)(ptr::null_mut()),
                12 => (table::<v12::Table>("ncclNetPlugin_v12").finalize)(ptr::null_mut()),
                _ => return,
            }
        });
    }

    pub(crate) fn properties(self, dev: c_int) -> Result<Properties, Status> {
        // SAFETY: the structures of each version; texts of the plugin's.
        unsafe {
            let words = |name: *const c_char| std::ffi::CStr::from_ptr(name).to_str().unwrap().to_owned();
            let from_8 = |p: PropertiesV8| Properties {
                name: words(p.name),
                speed: p.speed,
                ptr_support: p.ptr_support,
                max_recvs: p.max_recvs,
            };
            fn from_9<const N: usize>(p: PropertiesV9<N>, words: impl Fn(*const c_char) -> String) -> Properties {
                assert_eq!((p.v_props.ndevs, p.v_props.devs[0]), (1, 0));
                assert_eq!((p.max_p2p_bytes, p.max_coll_bytes), (1 << 40, 1 << 40));
                Properties { name: words(p.name), speed: p.speed, ptr_support: p.ptr_support, max_recvs: p.max_recvs }
            }
            macro_rules! get {
                ($module:ident, $name:literal, $ty:ty, $convert:expr) => {{
                    let mut p = std::mem::zeroed::<$ty>();
                    match (table::<$module::Table>($name).get_properties)(dev, &mut p) {
                        Status::Success => Ok($convert(p)),
                        other => Err(other),
                    }
                }};
            }
            match self.version {
                8 => get!(v8, "ncclNetPlugin_v8", PropertiesV8, from_8),
                9 => get!(v9, "ncclNetPlugin_v9", PropertiesV9<4>, |p| from_9(p, words)),
                10 => get!(v10, "ncclNetPlugin_v10", PropertiesV9<4>, |p| from_9(p, words)),
                11 => get!(v11, "ncclNetPlugin_v11", v11::Properties, |p: v11::Properties| {
                    assert_eq!(p.max_multi_request_size, 1);
                    from_9(p.common, words)
                }),
                _ => get!(v12, "ncclNetPlugin_v12", v12::Properties, |p: v12::Properties| {
                    assert_eq!((p.max_multi_request_size, p.rail_id, p.plane_id), (1, -1, -1));
                    from_9(p.common, words)
                }),
            }
        }
    }

    pub(crate) fn listen(self) -> (Handle, Comm) {
        let (mut handle, mut comm) = ([0u8; 128], ptr::null_mut());
        let to = handle.as_mut_ptr().cast();
        ok(call!(self, listen, (0, to, &mut comm), (0, to, &mut comm), (ptr::null_mut(), 0, to, &mut comm)));
        assert!(!comm.is_null());
        (handle, comm)
    }

    /// Calls connect once; NULL: call again.
    pub(crate) fn try_connect(self, handle: &mut Handle) -> Result<Comm, Status> {
        let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
        let mut config = CommConfig { traffic_class: -1 };
        let to: *mut c_void = handle.as_mut_ptr().cast();
        let status = call!(
            self,
            connect,
            (0, to, &mut comm, &mut device),
            (0, &mut config, to, &mut comm, &mut device),
            (ptr::null_mut(), 0, to, &mut comm, &mut device)
        );
        result(status, comm)
    }

    pub(crate) fn try_accept(self, listen: Comm) -> Result<Comm, Status> {
        let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
        result(call!(self, accept, (listen, &mut comm, &mut device)), comm)
    }

    /// A connection to `handle` and one from `listen`, each polled without waiting for the other.
    #[track_caller]
    pub(crate) fn meet(self, mut handle: Handle, listen: Comm) -> (Comm, Comm) {
        let (mut send, mut recv): (Comm, Comm) = (ptr::null_mut(), ptr::null_mut());
        until("both connections", || {
            if send.is_null() {
                send = self.try_connect(&mut handle).unwrap_or_else(failed);
            }
            if recv.is_null() {
                recv = self.try_accept(listen).unwrap_or_else(failed);
            }
            (!send.is_null() && !recv.is_null()).then_some(())
        });
        (send, recv)
    }

    /// Both ends of a connection, polled in turn as NCCL's thread does.
    pub(crate) fn pair(self) -> Pair {
        let (handle, listen) = self.listen();
        let (send, recv) = self.meet(handle, listen);
        self.close_listen(listen);
        if std::env::var("TINYNCCL_NET_RDMA").is_ok_and(|set| set == "1") {
            // Nearly always those of this pair: other tests make some, too.
            let joined = PAIRS.fetch_add(1, Ordering::Relaxed) + 1;
            until("its queue pairs", || (rdma::joined() >= 2 * joined).then_some(()));
        }
        Pair { api: self, send, recv }
    }

    fn register(self, comm: Comm, at: *mut c_void, len: usize) -> Comm {
        let mut mhandle = ptr::null_mut();
        if IS_CHILD.load(Ordering::Relaxed) {
            assert_eq!(call!(self, reg_mr, (comm, at, len, 1, &mut mhandle)), Status::InvalidUsage);
            return mhandle;
        }
        ok(call!(self, reg_mr, (comm, at, len, 1, &mut mhandle)));
        REGISTERED.lock().unwrap().push([comm.addr(), mhandle.expose_provenance()]);
        mhandle
    }

    /// Deregisters the memory of a connection before it is closed, as NCCL does.
    fn deregister(self, comm: Comm) {
        let ours: Vec<[usize; 2]> = REGISTERED.lock().unwrap().extract_if(.., |r| r[0] == comm.addr()).collect();
        for [_, mhandle] in ours {
            ok(call!(self, dereg_mr, (comm, ptr::with_exposed_provenance_mut(mhandle))));
        }
    }

    /// Posts a send; NULL when too many are open.
    pub(crate) fn isend(self, comm: Comm, data: &[u8], tag: c_int) -> Result<Comm, Status> {
        let mut request = ptr::null_mut();
        let at = data.as_ptr().cast_mut().cast();
        let mhandle = self.register(comm, at, data.len());
        let (len, none) = (data.len(), ptr::null_mut());
        // SAFETY: as above.
        let status = unsafe {
            match self.version {
                8 => (table::<v8::Table>("ncclNetPlugin_v8").isend)(comm, at, len as c_int, tag, mhandle, &mut request),
                9 => (table::<v9::Table>("ncclNetPlugin_v9").isend)(comm, at, len, tag, mhandle, &mut request),
                10 => (table::<v10::Table>("ncclNetPlugin_v10").isend)(comm, at, len, tag, mhandle, none, &mut request),
                11 => (table::<v11::Table>("ncclNetPlugin_v11").isend)(comm, at, len, tag, mhandle, none, &mut request),
                _ => (table::<v12::Table>("ncclNetPlugin_v12").isend)(comm, at, len, tag, mhandle, none, &mut request),
            }
        };
        result(status, request)
    }

    /// Posts one group of receives; NULL when too many are open.
    pub(crate) fn irecv(self, comm: Comm, group: &mut [(&mut [u8], c_int)]) -> Result<Comm, Status> {
        let n = group.len() as c_int;
        let mut data: Vec<*mut c_void> = group.iter_mut().map(|(d, _)| d.as_mut_ptr().cast()).collect();
        let mut sizes: Vec<usize> = group.iter().map(|(d, _)| d.len()).collect();
        let mut short: Vec<c_int> = sizes.iter().map(|s| *s as c_int).collect();
        let mut tags: Vec<c_int> = group.iter().map(|(_, t)| *t).collect();
        let mut handles: Vec<Comm> = data.iter().zip(&sizes).map(|(at, len)| self.register(comm, *at, *len)).collect();
        let (d, s, t, m) = (data.as_mut_ptr(), sizes.as_mut_ptr(), tags.as_mut_ptr(), handles.as_mut_ptr());
        let mut request = ptr::null_mut();
        let none = ptr::null_mut();
        // SAFETY: as above.
        let status = unsafe {
            match self.version {
                8 => (table::<v8::Table>("ncclNetPlugin_v8").irecv)(comm, n, d, short.as_mut_ptr(), t, m, &mut request),
                9 => (table::<v9::Table>("ncclNetPlugin_v9").irecv)(comm, n, d, s, t, m, &mut request),
                10 => (table::<v10::Table>("ncclNetPlugin_v10").irecv)(comm, n, d, s, t, m, none, &mut request),
                11 => (table::<v11::Table>("ncclNetPlugin_v11").irecv)(comm, n, d, s, t, m, none, &mut request),
                _ => (table::<v12::Table>("ncclNetPlugin_v12").irecv)(comm, n, d, s, t, m, none, &mut request),
            }
        };
        result(status, request)
    }

    /// Returns the sizes of `n` messages, once all are done.
    pub(crate) fn test(self, request: Comm, n: usize) -> Result<Option<Vec<usize>>, Status> {
        let (mut done, mut sizes) = (-1, [-1; 8]);
        match call!(self, test, (request, &mut done, sizes.as_mut_ptr())) {
            Status::Success if done == 1 => Ok(Some(sizes[..n].iter().map(|s| *s as usize).collect())),
            Status::Success => Ok(None),
            other => Err(other),
        }
    }

    /// Polls until it is done.
    #[track_caller]
    pub(crate) fn wait(self, request: Comm, n: usize) -> Vec<usize> {
        until("a request", || self.test(request, n).unwrap_or_else(|e| panic!("test: {e:?}\n{}", LOG.lock().unwrap())))
    }

    /// Polls until it fails.
    pub(crate) fn fails(self, request: Comm) -> Status {
        until("a failure", || self.test(request, 1).err())
    }

    pub(crate) fn flush(self, comm: Comm) {
        let (mut data, mut size, mut handle, mut request) = (ptr::null_mut(), 0, ptr::null_mut(), ptr::null_mut());
        ok(call!(self, iflush, (comm, 1, &mut data, &mut size, &mut handle, &mut request)));
        if !request.is_null() {
            self.wait(request, 0);
        }
    }

    pub(crate) fn close_send(self, comm: Comm) {
        self.deregister(comm);
        ok(call!(self, close_send, (comm)));
    }

    pub(crate) fn close_recv(self, comm: Comm) {
        self.deregister(comm);
        ok(call!(self, close_recv, (comm)));
    }

    pub(crate) fn close_listen(self, comm: Comm) {
        ok(call!(self, close_listen, (comm)));
    }
}

/// A connection of this process with itself.
pub(crate) struct Pair {
    pub(crate) api: Api,
    pub(crate) send: Comm,
    pub(crate) recv: Comm,
}

impl Pair {
    pub(crate) fn close(self) {
        self.api.close_send(self.send);
        self.api.close_recv(self.recv);
    }
}

#[track_caller]
pub(crate) fn ok(status: Status) {
    assert_eq!(status, Status::Success, "{}", LOG.lock().unwrap());
}

fn result(status: Status, pointer: Comm) -> Result<Comm, Status> {
    if status == Status::Success { Ok(pointer) } else { Err(status) }
}

/// Ends a test whose connection failed.
#[track_caller]
pub(crate) fn failed(status: Status) -> Comm {
    panic!("{status:?}: {}", LOG.lock().unwrap())
}

/// Polls `ask` until it returns something, as NCCL's threads do.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "{what} did not come\n{}", LOG.lock().unwrap());
        std::thread::yield_now();
    }
}

/// Returns bytes that differ from message to message, and from offset to offset.
pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9e37_79b9) >> 7) as u8 ^ (seed * 37) as u8).collect()
}

/// Returns true if a message is the [`pattern`] of `seed`.
pub(crate) fn is_pattern(got: &[u8], seed: usize) -> bool {
    got == pattern(got.len(), seed)
}
