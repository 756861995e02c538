//! A network plugin that NCCL loads, in one file: what a plugin must do, and nothing that makes one fast.
//!
//! ```sh
//! cargo build -p tinynccl-nccl-net --example first_plugin
//! NCCL_NET_PLUGIN=$PWD/target/debug/examples/libfirst_plugin.so NCCL_DEBUG=INFO torchrun --nproc-per-node 2 train.py
//! ```
//!
//! A connection is one TCP socket that never blocks. No separate thread moves the data: NCCL tests again and again
//! whether a request is done, and each time the socket takes or gives what it can. Messages need no tags, because the
//! device announces that it takes one receive at a time, and sends and receives match in their order.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ptr;

/// `ncclResult_t`, as far as it is used.
const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
/// Bytes of a handle, which NCCL carries from the listener to the rank that connects.
const HANDLE: usize = 128;
/// Bytes in front of a message: its length.
const HEADER: usize = 8;

/// One direction of data between two ranks.
struct Connection {
    stream: TcpStream,
    /// Requests that are not done, in the order in which NCCL posted them.
    queue: VecDeque<*mut Request>,
}

/// A message under way.
struct Request {
    connection: *mut Connection,
    data: *mut u8,
    /// Bytes to send; for a receive the length of its buffer, and once the header is here, of the message.
    size: usize,
    header: [u8; HEADER],
    /// Bytes of the header and of the message that were moved.
    moved: usize,
    sends: bool,
}

impl Request {
    fn is_done(&self) -> bool {
        self.moved >= HEADER && self.moved == HEADER + self.size
    }

    /// Moves what the socket takes or has now.
    fn advance(&mut self, stream: &mut TcpStream) -> io::Result<()> {
        while !self.is_done() {
            let part = match self.moved.checked_sub(HEADER) {
                None => &mut self.header[self.moved..],
                // SAFETY: NCCL keeps `size` bytes at `data` for this request until it is done.
                Some(at) => unsafe { std::slice::from_raw_parts_mut(self.data.add(at), self.size - at) },
            };
            match if self.sends { stream.write(part) } else { stream.read(part) } {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.moved += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
            if !self.sends && self.moved == HEADER {
                let coming = u64::from_le_bytes(self.header) as usize;
                if coming > self.size {
                    return Err(ErrorKind::InvalidData.into());
                }
                self.size = coming;
            }
        }
        Ok(())
    }
}

/// NCCL's status of a result; the error goes to stderr, where a real plugin would use NCCL's logger.
fn status(what: &str, result: io::Result<()>) -> c_int {
    result.map_or_else(
        |e| {
            eprintln!("first_plugin: {what}: {e}");
            SYSTEM_ERROR
        },
        |()| SUCCESS,
    )
}

unsafe extern "C" fn init(_logger: *const c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    // SAFETY: NCCL's variable.
    unsafe { count.write(1) };
    SUCCESS
}

unsafe extern "C" fn get_properties(_device: c_int, properties: *mut Properties) -> c_int {
    let ours = Properties {
        name: c"first".as_ptr(),
        pci_path: ptr::null(),
        guid: 0,
        memory: 1, // the host's: NCCL copies a GPU's through it
        registration_is_global: 0,
        speed: 10_000, // Mbit/s
        port: 0,
        latency: 0.0,
        max_connections: 65_536,
        max_receives: 1, // of a group
        device_type: 0,
        device_version: 0,
    };
    // SAFETY: NCCL's variable.
    unsafe { properties.write(ours) };
    SUCCESS
}

/// The receiving side: opens a port, and writes into the handle how it is reached.
unsafe extern "C" fn listen(_device: c_int, handle: *mut c_char, comm: *mut *mut c_void) -> c_int {
    let open = || {
        let ip = std::env::var("FIRST_PLUGIN_IP").unwrap_or_else(|_| "127.0.0.1".to_owned());
        let listener = TcpListener::bind((ip, 0))?;
        listener.set_nonblocking(true)?;
        let address = format!("{}\0", listener.local_addr()?);
        // SAFETY: a handle has room for any address; `comm` is NCCL's variable.
        unsafe {
            ptr::copy_nonoverlapping(address.as_ptr().cast(), handle, address.len().min(HANDLE));
            comm.write(Box::into_raw(Box::new(listener)).cast());
        }
        Ok(())
    };
    status("listen", open())
}

/// The sending side. The peer's kernel answers, whether or not the peer has called `accept`.
unsafe extern "C" fn connect(
    _device: c_int,
    handle: *mut c_char,
    comm: *mut *mut c_void,
    _: *mut *mut c_void,
) -> c_int {
    let open = || {
        // SAFETY: a handle that `listen` filled.
        let address = unsafe { CStr::from_ptr(handle) }.to_string_lossy();
        let address: SocketAddr = address.parse().map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
        // SAFETY: NCCL's variable.
        unsafe { comm.write(connection(TcpStream::connect(address)?)?) };
        Ok(())
    };
    status("connect", open())
}

/// NULL until a peer has connected: NCCL calls again.
unsafe extern "C" fn accept(listener: *mut c_void, comm: *mut *mut c_void, _: *mut *mut c_void) -> c_int {
    let take = || {
        // SAFETY: from `listen`.
        let made = match unsafe { &*listener.cast::<TcpListener>() }.accept() {
            Ok((stream, _)) => connection(stream)?,
            Err(e) if e.kind() == ErrorKind::WouldBlock => ptr::null_mut(),
            Err(e) => return Err(e),
        };
        // SAFETY: NCCL's variable.
        unsafe { comm.write(made) };
        Ok(())
    };
    status("accept", take())
}

fn connection(stream: TcpStream) -> io::Result<*mut c_void> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(Box::into_raw(Box::new(Connection { stream, queue: VecDeque::new() })).cast())
}

unsafe extern "C" fn reg_mr(
    _comm: *mut c_void,
    data: *mut c_void,
    _size: usize,
    _kind: c_int,
    mhandle: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL's variable. Sockets need no registration, but NULL would mean none.
    unsafe { mhandle.write(data) };
    SUCCESS
}

unsafe extern "C" fn dereg_mr(_comm: *mut c_void, _mhandle: *mut c_void) -> c_int {
    SUCCESS
}

unsafe extern "C" fn isend(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    _tag: c_int,
    _mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: `comm` is from `connect`, `request` NCCL's variable.
    unsafe { request.write(post(comm, data, size, true)) };
    SUCCESS
}

unsafe extern "C" fn irecv(
    comm: *mut c_void,
    _n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _tags: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: `comm` is from `accept`, the others have one element each, as `max_receives` says.
    unsafe { request.write(post(comm, data.read(), sizes.read(), false)) };
    SUCCESS
}

/// # Safety
/// `comm` is a connection.
unsafe fn post(comm: *mut c_void, data: *mut c_void, size: c_int, sends: bool) -> *mut c_void {
    let size = usize::try_from(size).unwrap_or(0);
    let connection = comm.cast::<Connection>();
    let header = (size as u64).to_le_bytes();
    let request = Box::into_raw(Box::new(Request { connection, data: data.cast(), size, header, moved: 0, sends }));
    // SAFETY: by the caller; NCCL uses a connection from one thread at a time.
    unsafe { (*connection).queue.push_back(request) };
    request.cast()
}

/// A socket has nothing to flush: what was received is in memory. NULL means that there is nothing to wait for.
unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _n: c_int,
    _data: *mut *mut c_void,
    _sizes: *mut c_int,
    _mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> c_int {
    // SAFETY: NCCL's variable.
    unsafe { request.write(ptr::null_mut()) };
    SUCCESS
}

/// Moves data, and reports whether this request is done. It is NCCL's last use of it then.
unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> c_int {
    let request = request.cast::<Request>();
    // SAFETY: a request that was not done yet, of a connection that is open.
    let connection = unsafe { &mut *(*request).connection };
    while let Some(&first) = connection.queue.front() {
        // SAFETY: posted, and taken out of the queue before it is freed.
        let first = unsafe { &mut *first };
        if let Err(e) = first.advance(&mut connection.stream) {
            // SAFETY: as above. One that was done before the connection failed is done.
            if unsafe { (*request).is_done() } {
                break;
            }
            return status("test", Err(e));
        }
        if !first.is_done() {
            break;
        }
        connection.queue.pop_front();
    }
    // SAFETY: as above; NCCL's variables, of which `sizes` may be NULL.
    unsafe {
        let finished = (*request).is_done();
        done.write(c_int::from(finished));
        if finished {
            if !sizes.is_null() {
                sizes.write((*request).size as c_int);
            }
            drop(Box::from_raw(request));
        }
    }
    SUCCESS
}

unsafe extern "C" fn close(comm: *mut c_void) -> c_int {
    // SAFETY: from `connect` or `accept`.
    let mut connection = unsafe { Box::from_raw(comm.cast::<Connection>()) };
    for request in connection.queue.drain(..) {
        // SAFETY: posted and not done; NCCL tests no request of a closed connection.
        drop(unsafe { Box::from_raw(request) });
    }
    SUCCESS
}

unsafe extern "C" fn close_listen(listener: *mut c_void) -> c_int {
    // SAFETY: from `listen`.
    drop(unsafe { Box::from_raw(listener.cast::<TcpListener>()) });
    SUCCESS
}

/// `ncclNetProperties_v8_t`.
#[repr(C)]
struct Properties {
    name: *const c_char,
    pci_path: *const c_char,
    guid: u64,
    memory: c_int,
    registration_is_global: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_connections: c_int,
    max_receives: c_int,
    device_type: c_int,
    device_version: c_int,
}

type Pointers = *mut *mut c_void;

/// `ncclNet_v8_t`: the functions that NCCL calls, in this order.
#[repr(C)]
pub struct Table {
    name: *const c_char,
    init: unsafe extern "C" fn(*const c_void) -> c_int,
    devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_properties: unsafe extern "C" fn(c_int, *mut Properties) -> c_int,
    listen: unsafe extern "C" fn(c_int, *mut c_char, Pointers) -> c_int,
    connect: unsafe extern "C" fn(c_int, *mut c_char, Pointers, Pointers) -> c_int,
    accept: unsafe extern "C" fn(*mut c_void, Pointers, Pointers) -> c_int,
    reg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, Pointers) -> c_int,
    reg_mr_dma_buf: Option<unsafe extern "C" fn()>,
    dereg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    isend: unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, Pointers) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, Pointers, *mut c_int, *mut c_int, Pointers, Pointers) -> c_int,
    iflush: unsafe extern "C" fn(*mut c_void, c_int, Pointers, *mut c_int, Pointers, Pointers) -> c_int,
    test: unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> c_int,
    close_send: unsafe extern "C" fn(*mut c_void) -> c_int,
    close_recv: unsafe extern "C" fn(*mut c_void) -> c_int,
    close_listen: unsafe extern "C" fn(*mut c_void) -> c_int,
    get_device_mr: Option<unsafe extern "C" fn()>,
    irecv_consumed: Option<unsafe extern "C" fn()>,
}

// SAFETY: addresses of functions, and of a text that does not change.
unsafe impl Sync for Table {}

/// NCCL looks for the newest version that it knows, down to version 6; 2.28 finds this one as its third.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v8: Table = Table {
    name: c"first".as_ptr(),
    init,
    devices,
    get_properties,
    listen,
    connect,
    accept,
    reg_mr,
    reg_mr_dma_buf: None,
    dereg_mr,
    isend,
    irecv,
    iflush,
    test,
    close_send: close,
    close_recv: close,
    close_listen,
    get_device_mr: None,
    irecv_consumed: None,
};
