//! Memory: attributes of addresses, what is refused, copies.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUpointer_attribute as Attribute, CUresult::*};

use super::*;

/// Kind (0: unknown, 1: host, 2: device), device, first address and bytes of the allocation, address for this device.
fn asked(at: u64) -> (u32, i32, u64, usize, u64) {
    let (mut kind, mut device, mut begin, mut bytes, mut seen) = (77u32, 77i32, 77u64, 77usize, 77u64);
    let mut attributes = [
        Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        Attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ];
    let mut places: [*mut c_void; 5] = [
        (&raw mut kind).cast(),
        (&raw mut device).cast(),
        (&raw mut begin).cast(),
        (&raw mut bytes).cast(),
        (&raw mut seen).cast(),
    ];
    // SAFETY: a variable of the attribute's type for each.
    ok(unsafe { sys::cuPointerGetAttributes(5, attributes.as_mut_ptr(), places.as_mut_ptr(), at) });
    (kind, device, begin, bytes, seen)
}

fn buffer_id(at: u64) -> (CUresult, u64) {
    let (mut id, attribute) = (0u64, Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID);
    // SAFETY: writes the number.
    (unsafe { sys::cuPointerGetAttribute((&raw mut id).cast(), attribute, at) }, id)
}

#[test]
fn addresses_say_what_they_are() {
    if !here() {
        return;
    }
    let device = alloc(3_000_000);
    assert_eq!(asked(device), (2, 0, device, 3_000_000, device));
    assert_eq!(asked(device + 2_999_999), (2, 0, device, 3_000_000, device + 2_999_999));
    let mut begin = 0;
    let mut bytes = 0;
    // SAFETY: writes both.
    ok(unsafe { sys::cuMemGetAddressRange_v2(&mut begin, &mut bytes, device + 5) });
    assert_eq!((begin, bytes), (device, 3_000_000));
    let host = words(1000);
    let (kind, _, _, _, seen) = asked(address(&host[3]));
    assert_eq!((kind, seen), (1, address(&host[3])));
    let pageable = [0u8; 64];
    assert_eq!((asked(pageable.as_ptr() as u64).0, asked(pageable.as_ptr() as u64).1), (0, -2));
    fails(buffer_id(pageable.as_ptr() as u64).0, CUDA_ERROR_INVALID_VALUE);
    let (first, again) = (buffer_id(device), buffer_id(device + 100));
    assert_eq!(first, again);
    ok(free(device));
    assert_eq!(asked(device).0, 0);
    fails(buffer_id(device).0, CUDA_ERROR_INVALID_VALUE);
    let next = alloc(3_000_000);
    assert_ne!(buffer_id(next).1, first.1, "numbers are not used again");
    ok(free(next));
}

#[test]
fn wrong_sizes_and_addresses_are_refused() {
    if !here() {
        return;
    }
    let mut at = 0;
    // SAFETY: writes the address.
    fails(unsafe { sys::cuMemAlloc_v2(&mut at, 0) }, CUDA_ERROR_INVALID_VALUE);
    // SAFETY: as above.
    fails(unsafe { sys::cuMemAlloc_v2(&mut at, 1 << 50) }, CUDA_ERROR_OUT_OF_MEMORY);
    ok(free(0));
    let memory = alloc(1000);
    ok(free(memory));
    fails(free(memory), CUDA_ERROR_INVALID_VALUE);
    let memory = alloc(4 << 20);
    fails(free(memory + 512), CUDA_ERROR_INVALID_VALUE);
    let mut bytes = [0u8; 16];
    // SAFETY: refused: it would read beyond the end.
    let beyond = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory + (4 << 20) - 8, 16) };
    fails(beyond, CUDA_ERROR_INVALID_VALUE);
    fails(fill(stream(), memory + 2, 1, 1), CUDA_ERROR_INVALID_VALUE);
    ok(free(memory));
    // SAFETY: not memory of cuMemHostAlloc.
    fails(unsafe { sys::cuMemFreeHost(bytes.as_mut_ptr().cast()) }, CUDA_ERROR_INVALID_VALUE);
}

#[test]
fn memory_that_is_taken_is_counted() {
    if !here() {
        return;
    }
    let info = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes both.
        ok(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        (free, total)
    };
    // More than what other tests take meanwhile.
    let large = 1 << 30;
    let (before, total) = info();
    let memory = alloc(large);
    assert!(info().0 + large / 2 < before && info().1 == total);
    ok(free(memory));
    assert!(info().0 + large / 2 > before);
}

#[test]
fn the_programs_memory_is_locked_once() {
    if !here() {
        return;
    }
    let mut memory = vec![0u8; 1 << 20];
    let at: *mut c_void = memory.as_mut_ptr().cast();
    // SAFETY: our memory, unlocked below.
    ok(unsafe { sys::cuMemHostRegister_v2(at, 1 << 20, sys::CU_MEMHOSTREGISTER_PORTABLE) });
    // SAFETY: refused.
    let again = unsafe { sys::cuMemHostRegister_v2(at, 1 << 20, sys::CU_MEMHOSTREGISTER_PORTABLE) };
    fails(again, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!(asked(at as u64 + 99).0, 1);
    // SAFETY: locked above.
    ok(unsafe { sys::cuMemHostUnregister(at) });
    // SAFETY: refused.
    fails(unsafe { sys::cuMemHostUnregister(at) }, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    assert_eq!(asked(at as u64 + 99).0, 0);
}

/// The caller may write over what it gave, as soon as a copy from pageable memory returns; it finds the result when a
/// copy to it returns.
#[test]
fn pageable_memory_is_the_callers_again_when_a_copy_returns() {
    if !here() {
        return;
    }
    let (stream, gate, memory) = (stream(), &words(1)[0], alloc(64));
    ok(wait(stream, gate, 1));
    let mut bytes = [7u8; 64];
    std::thread::scope(|scope| {
        // NVIDIA's driver may wait for the stream here; the stand-in does not.
        if !is_standin() {
            scope.spawn(|| release(gate));
        }
        // SAFETY: 64 bytes on both sides.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(memory, bytes.as_ptr().cast(), 64, stream) });
    });
    bytes.fill(9);
    release(gate);
    let mut back = [0u8; 64];
    // SAFETY: as above.
    ok(unsafe { sys::cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), memory, 64, stream) });
    assert_eq!(back, [7; 64]);
    ok(free(memory));
}

#[test]
fn copies_of_every_kind() {
    if !here() {
        return;
    }
    let (stream, one, two) = (stream(), alloc(4000), alloc(4000));
    let numbers: Vec<u32> = (0..1000).collect();
    // SAFETY: 4000 bytes everywhere, until the stream is waited for.
    unsafe {
        ok(sys::cuMemcpyHtoD_v2(one, numbers.as_ptr().cast(), 4000));
        ok(sys::cuMemcpyDtoDAsync_v2(two, one, 4000, stream));
    }
    assert_eq!(read(stream, two, 1000), numbers);
    let mut back = vec![0u32; 1000];
    // SAFETY: as above.
    unsafe {
        ok(sys::cuMemsetD32_v2(one, 5, 500));
        ok(sys::cuMemsetD8_v2(one + 2000, 1, 1000));
        ok(sys::cuMemsetD16_v2(one + 3000, 2, 500));
        ok(sys::cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), one, 4000));
    }
    assert!(back[..500].iter().all(|&x| x == 5) && back[500..750].iter().all(|&x| x == 0x0101_0101));
    assert!(back[750..].iter().all(|&x| x == 0x0002_0002));
    // SAFETY: as above; unified addresses identify their memory.
    unsafe {
        ok(sys::cuMemcpy(two, one, 4000));
        ok(sys::cuMemcpyAsync(back.as_mut_ptr() as u64, two, 4000, stream));
    }
    ok(synchronize(stream));
    assert_eq!(back[999], 0x0002_0002);
    ok(free(one));
    ok(free(two));
}

#[test]
fn memory_of_a_stream_comes_and_goes_in_its_order() {
    if !here() {
        return;
    }
    let stream = stream();
    let mut at = 77;
    // SAFETY: writes the address.
    ok(unsafe { sys::cuMemAllocAsync(&mut at, 0, stream) });
    assert_eq!(at, 0, "nothing is at 0");
    // SAFETY: as above.
    ok(unsafe { sys::cuMemAllocAsync(&mut at, 4000, stream) });
    ok(fill(stream, at, 3, 1000));
    assert_eq!(read(stream, at, 1000), [3; 1000]);
    assert_eq!(asked(at).0, 2);
    // SAFETY: no one uses it.
    ok(unsafe { sys::cuMemFreeAsync(at, stream) });
    ok(synchronize(stream));
}

/// Freeing waits for what is enqueued: no stream writes into memory that is gone.
#[test]
fn freeing_waits_for_the_streams() {
    if !here() {
        return;
    }
    let (stream, memory) = (stream(), alloc(1000));
    let [gate, done] = words(2) else { panic!("two words") };
    ok(wait(stream, gate, 1));
    ok(write(stream, done, 1));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            context(0);
            ok(free(memory));
            assert_eq!(done.load(Ordering::Acquire), 1);
        });
        let_others_run();
        release(gate);
    });
}
