//! Memory of other ranks: buffers that come and go, and an address that is given out again.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result};
use tinynccl::Comm;
use tinynccl::cuda::{Choice, DeviceComm, Protocol};

use super::{address, gather_in_place, without_ll128};
use crate::ranks::{contexts, in_processes, in_threads};

/// All ranks of `comm`, with a stream each; the body of the tests with processes and threads.
fn with_device(comm: &Comm, context: &Arc<CudaContext>) {
    let device = DeviceComm::new(comm, context).unwrap();
    let stream = context.new_stream().unwrap();
    memory_of_others(comm, &device, &stream);
    freed_and_allocated_again(comm, &device, &stream);
    comm.barrier().unwrap();
}

/// Gathers `base` and the number of each rank, in `count` elements at `at`.
fn numbers_of_ranks(device: &DeviceComm, stream: &Arc<CudaStream>, at: u64, count: usize, base: usize) {
    let (rank, n) = (device.rank(), device.size());
    let segment = count / n / 4 * 4;
    // SAFETY: the caller's memory of `count` elements.
    unsafe { result::memcpy_htod_async(at, &vec![(base + rank) as i32; count], stream.cu_stream()) }.unwrap();
    stream.synchronize().unwrap();
    let choice = Choice { protocol: Protocol::Direct, blocks: 16 };
    // SAFETY: as above; waited for below.
    unsafe { device.enqueue_as(stream, &gather_in_place(rank, segment, at), choice) }.unwrap();
    device.synchronize().unwrap();
    let mut got = vec![0i32; n * segment];
    // SAFETY: as above.
    unsafe { result::memcpy_dtoh_sync(&mut got, at) }.unwrap();
    let wrong = (0..got.len()).find(|&i| got[i] != (base + i / segment) as i32);
    assert_eq!(wrong.map(|i| (i, got[i])), None, "rank {rank}: of {base} and so on, segments of {segment}");
}

/// Buffers come and go, in different orders on the ranks.
fn memory_of_others(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>) {
    let count = 1 << 20;
    let mut kept = Vec::new();
    let before = device.direct_calls().unwrap();
    for round in 0..12 {
        let buffer = device.alloc::<i32>(stream, count).unwrap();
        assert!(buffer.is_registered(), "rank {}, round {round}", comm.rank());
        numbers_of_ranks(device, stream, address(&buffer, stream, 0), count, round + 1);
        kept.push(buffer);
        if round % 3 == 2 {
            // Another one on each rank: numbers differ from now on.
            drop(kept.remove(comm.rank() % kept.len()));
        }
        for (i, buffer) in kept.iter().enumerate() {
            numbers_of_ranks(device, stream, address(buffer, stream, 0), count, 100 * round + i);
        }
    }
    let calls = device.direct_calls().unwrap() - before;
    assert_eq!(calls, (0..12).map(|r| 2 + r as u64 - (r as u64 + 1) / 3).sum::<u64>(), "rank {}", comm.rank());
    drop(kept);
    device.release().unwrap();
    device.release().unwrap();
}

/// Memory that was freed and given out again at the same address is not what is registered.
fn freed_and_allocated_again(comm: &Comm, device: &DeviceComm, stream: &Arc<CudaStream>) {
    let count = 4 << 20;
    let context = device.context();
    context.bind_to_thread().unwrap();
    // SAFETY: allocates; freed below.
    let first = unsafe { result::malloc_sync(4 * count) }.unwrap();
    // SAFETY: freed before the registration is dropped, which is the mistake that is to be survived.
    let registration = unsafe { device.register(first, 4 * count) }.unwrap();
    assert!(registration.is_registered());
    let before = device.direct_calls().unwrap();
    numbers_of_ranks(device, stream, first, count, 3);
    assert_eq!(device.direct_calls().unwrap(), before + 1);
    comm.barrier().unwrap();
    // SAFETY: of malloc_sync; the calls were waited for.
    unsafe { result::free_sync(first) }.unwrap();
    // CUDA gives the address out again, at once or a little later. Should it not, the call below is an ordinary one.
    // SAFETY: allocates; freed below.
    let mut others: Vec<_> = (0..64).map(|_| unsafe { result::malloc_sync(4 * count) }.unwrap()).collect();
    let second = others.swap_remove(others.iter().position(|&at| at == first).unwrap_or(0));
    println!("rank {}: {first:#x}, then {second:#x}", comm.rank());
    // SAFETY: of malloc_sync, and not used.
    others.into_iter().for_each(|at| unsafe { result::free_sync(at) }.unwrap());
    if second != first {
        println!("SKIPPED memory at an address used again, rank {}: CUDA gave out others", comm.rank());
    }
    comm.barrier().unwrap();
    numbers_of_ranks(device, stream, second, count, 7);
    assert_eq!(device.direct_calls().unwrap(), before + 1, "rank {}: read through the old mapping", comm.rank());
    drop(registration);
    device.release().unwrap();
    // SAFETY: of malloc_sync; the calls were waited for.
    unsafe { result::free_sync(second) }.unwrap();
    // Memory of a stream's pool cannot be mapped by others; calls still work.
    let pool = stream.alloc_zeros::<i32>(count).unwrap();
    // SAFETY: dropped behind the registration.
    let registration = unsafe { device.register(address(&pool, stream, 0), 4 * count) }.unwrap();
    assert!(!registration.is_registered());
    numbers_of_ranks(device, stream, address(&pool, stream, 0), count, 5);
    assert_eq!(device.direct_calls().unwrap(), before + 1);
    // A host address is refused, on all ranks if on one.
    let host = [0u8; 64];
    // SAFETY: refused.
    let refused = unsafe { device.register(if comm.rank() == 0 { host.as_ptr() as u64 } else { second }, 64) };
    assert!(refused.is_err());
    drop(registration);
}

/// Ranks as threads: they reach each other's memory by address.
#[test]
fn ranks_as_threads() {
    let Some(contexts) = contexts() else { return };
    in_threads(&contexts, without_ll128(), |comm, context| with_device(&comm, context));
}

/// Ranks as processes: they map each other's memory.
#[test]
fn ranks_as_processes() {
    in_processes("registered::mapped::ranks_as_processes", &[&[("TINYNCCL_CUDA_LL128", "off")]], with_device);
}
