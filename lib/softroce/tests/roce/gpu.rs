//! A GPU's memory, over the stand-in for CUDA's driver; with `TINYNCCL_TEST_DRIVER=nvidia` over NVIDIA's, on a machine
//! with a GPU.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use softroce::{Access, Pd, RecvRequest, Remote, SendFlags, SendOp, SendRequest, Service, Sge, Status};

use crate::end::{End, loopback, pattern};
use crate::services::datagram_end;

const BYTES: usize = 4 << 20;

fn driver() -> &'static Library {
    static DRIVER: OnceLock<Library> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let nvidia = std::env::var("TINYNCCL_TEST_DRIVER").is_ok_and(|driver| driver == "nvidia");
        let folder = || cuda_standin::folder().expect("built with these tests");
        let path = if nvidia { "libcuda.so.1".into() } else { folder().join("libcuda.so.1") };
        // SAFETY: a driver, which may be loaded at any time.
        unsafe { Library::new(path) }.expect("a driver")
    })
}

/// Calls a function of the driver, whose arguments are all integers or pointers.
macro_rules! cuda {
    ($name:literal, $($arg:expr => $type:ty),*) => {{
        type Function = unsafe extern "C" fn($($type),*) -> c_int;
        // SAFETY: the types are those of cuda.h, and what pointers name lives until the call returns.
        let code = unsafe { (driver().get::<Function>($name).expect("a function"))($($arg),*) };
        assert_eq!(code, 0, "{:?}", std::str::from_utf8($name));
    }};
}

/// Nothing is allocated while this is held: memory that was freed is not used again.
fn no_allocations() -> MutexGuard<'static, ()> {
    static ALLOCATING: Mutex<()> = Mutex::new(());
    ALLOCATING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of GPU 0, whose context is current in this thread.
struct Gpu(u64);

impl Gpu {
    fn new(bytes: usize) -> Gpu {
        let (mut device, mut context, mut at) = (0, std::ptr::null_mut(), 0);
        cuda!(b"cuInit", 0 => u32);
        cuda!(b"cuDeviceGet", &mut device => &mut c_int, 0 => c_int);
        cuda!(b"cuDevicePrimaryCtxRetain", &mut context => &mut *mut c_void, device => c_int);
        cuda!(b"cuCtxSetCurrent", context => *mut c_void);
        let _alone = no_allocations();
        cuda!(b"cuMemAlloc_v2", &mut at => &mut u64, bytes => usize);
        Gpu(at)
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        cuda!(b"cuMemcpyHtoD_v2", self.0 + at as u64 => u64, bytes.as_ptr() => *const u8, bytes.len() => usize);
        cuda!(b"cuCtxSynchronize",);
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        cuda!(b"cuMemcpyDtoH_v2", bytes.as_mut_ptr() => *mut u8, self.0 + at as u64 => u64, len => usize);
        bytes
    }

    fn free(&self) {
        cuda!(b"cuMemFree_v2", self.0 => u64);
    }
}

fn register(pd: &std::sync::Arc<Pd>, at: u64, len: usize) -> softroce::Result<softroce::Mr> {
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    // SAFETY: of the driver, freed after the last transfer or in a test of that.
    unsafe { pd.reg_mr(at as *mut u8, len, at, all) }
}

/// An end whose memory is a GPU's.
fn gpu_end(service: Service) -> (End, Gpu) {
    let mut end = if service == Service::Ud { datagram_end(0) } else { End::new(&loopback(), service) };
    let gpu = Gpu::new(BYTES);
    end.mr = register(&end.pd, gpu.0, BYTES).expect("registered");
    (end, gpu)
}

fn connected() -> ((End, Gpu), (End, Gpu)) {
    let (a, b) = (gpu_end(Service::Rc), gpu_end(Service::Rc));
    a.0.connect(&b.0.card());
    b.0.connect(&a.0.card());
    (a, b)
}

#[test]
fn every_operation_moves_a_gpus_memory() {
    let ((a, of_a), (b, of_b)) = connected();
    for (seed, len) in [(1, 1usize), (2, 60), (3, 4096), (4, 300_001), (5, 1 << 20)] {
        let bytes = pattern(len, seed);
        of_a.write(0, &bytes);
        b.recv(1, 5, 1 << 20);
        a.send(1, SendOp::Send, 0, len);
        assert_eq!((b.wait().status, a.wait().status), (Status::Success, Status::Success), "{len}");
        assert_eq!(of_b.read(5, len), bytes);
        b.recv(2, 0, 0);
        let to = Remote { addr: of_b.0 + (2 << 20), ..b.card().remote };
        a.send(2, SendOp::WriteImm(to, [1; 4]), 0, len);
        assert_eq!((b.wait().status, a.wait().status), (Status::Success, Status::Success), "{len}");
        assert_eq!(of_b.read(2 << 20, len), bytes);
        a.send(3, SendOp::Read(to), 3 << 20, len);
        assert_eq!(a.wait().status, Status::Success);
        assert_eq!(of_a.read(3 << 20, len), bytes);
    }
    of_b.write(0, &7u64.to_ne_bytes());
    a.send(4, SendOp::FetchAdd { remote: b.card().remote, add: 5 }, 8, 8);
    assert_eq!(a.wait().status, Status::Success);
    a.send(5, SendOp::CompareSwap { remote: b.card().remote, compare: 12, swap: 99 }, 16, 8);
    assert_eq!(a.wait().status, Status::Success);
    assert_eq!(of_a.read(8, 16), [7u64.to_ne_bytes(), 12u64.to_ne_bytes()].concat());
    assert_eq!(of_b.read(0, 8), 99u64.to_ne_bytes());
}

#[test]
fn a_list_names_memory_of_both_kinds() {
    let ((a, of_a), (b, of_b)) = connected();
    let mut memory = pattern(10_000, 6);
    let mr = register(&a.pd, memory.as_mut_ptr() as u64, memory.len()).expect("registered");
    let bytes = pattern(10_000, 7);
    of_a.write(0, &bytes);
    let sges = [Sge { addr: memory.as_ptr() as u64, len: 10_000, lkey: mr.lkey() }, a.sge(0, 10_000)];
    b.recv(1, 0, 1 << 20);
    let flags = SendFlags { signaled: true, ..SendFlags::default() };
    // SAFETY: the memory lives until the request has completed.
    unsafe { a.qp.post_send(&[SendRequest { id: 1, op: SendOp::Send, sges: &sges, flags, to: None }]) }
        .expect("posted");
    assert_eq!((b.wait().status, a.wait().status), (Status::Success, Status::Success));
    assert_eq!(of_b.read(0, 20_000), [memory.clone(), bytes].concat());
    // And back: one message to both.
    // SAFETY: as above.
    unsafe { a.qp.post_recv(&[RecvRequest { id: 2, sges: &sges }]) }.expect("posted");
    of_b.write(0, &pattern(20_000, 8));
    b.send(2, SendOp::Send, 0, 20_000);
    assert_eq!((a.wait().status, b.wait().status), (Status::Success, Status::Success));
    assert_eq!([memory.clone(), of_a.read(0, 10_000)].concat(), pattern(20_000, 8));
    drop(mr);
}

#[test]
fn datagrams_come_to_a_gpus_memory() {
    let ((a, of_a), (b, of_b)) = (gpu_end(Service::Ud), gpu_end(Service::Ud));
    of_a.write(0, &pattern(300, 9));
    b.recv(1, 0, 340);
    crate::services::send_datagram(&a, &b, 0x1111, 0);
    assert_eq!(b.wait().status, Status::Success);
    assert_eq!(of_b.read(40, 300), pattern(300, 9));
}

#[test]
fn addresses_that_no_driver_knows_are_refused() {
    let (end, gpu) = gpu_end(Service::Rc);
    for (at, len) in [(1u64, 1usize), (gpu.0, 1 << 40)] {
        let error = register(&end.pd, at, len).expect_err("not all of it is memory");
        assert_eq!(error.errno(), libc::EFAULT);
        assert!(error.to_string().contains("does not know all of it as a GPU's memory"), "{error}");
    }
}

#[test]
fn memory_that_is_gone_fails_its_request_and_no_other() {
    let ((a, of_a), (b, _of_b)) = connected();
    {
        let _none = no_allocations();
        of_a.free();
        a.send(1, SendOp::Write(b.card().remote), 0, 100_000);
        assert_eq!(a.wait().status, Status::LocalProtection);
    }
    // The receiving end.
    let ((a, _of_a), (b, of_b)) = connected();
    let _none = no_allocations();
    of_b.free();
    a.send(1, SendOp::Write(b.card().remote), 0, 100_000);
    assert_eq!(a.wait().status, Status::RemoteOperation);
}
