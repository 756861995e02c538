//! Copies that go around the cache.
//!
//! An ordinary store first reads the line that it overwrites, and pushes other lines out of the cache. A non-temporal
//! one does neither, which wins when the destination is not read soon and is larger than the cache, and loses when it
//! would have fitted.

/// Copies `bytes` bytes with non-temporal stores where the processor has them.
///
/// The stores are ordered before everything that the calling thread stores later.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`] for bytes.
pub unsafe fn copy(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe { copy_unordered(dst, src, bytes) };
    fence();
}

/// As [`copy`], but later stores may overtake these until [`fence`]. For many short pieces.
///
/// # Safety
/// As [`copy`]. No other thread may be notified that the bytes are there before [`fence`].
pub unsafe fn copy_unordered(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        copy_non_temporal(dst, src, bytes);
        #[cfg(not(target_arch = "x86_64"))]
        src.copy_to_nonoverlapping(dst, bytes);
    }
}

/// Orders [`copy_unordered`]'s stores before everything that the calling thread stores later.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of the target.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Whole cache lines with SSE2's streaming stores; the ends, up to the alignment, as usual.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_non_temporal(dst: *mut u8, src: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(bytes);
    let body = (bytes - head) / LINE * LINE;
    // SAFETY: `head + body <= bytes`; the streamed destinations are aligned to a line.
    unsafe {
        src.copy_to_nonoverlapping(dst, head);
        let (to, from) = (dst.add(head), src.add(head));
        for at in (0..body).step_by(LINE) {
            let from = from.add(at).cast::<__m128i>();
            let to = to.add(at).cast::<__m128i>();
            let line = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            for (i, part) in line.into_iter().enumerate() {
                _mm_stream_si128(to.add(i), part);
            }
        }
        let done = head + body;
        src.add(done).copy_to_nonoverlapping(dst.add(done), bytes - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_exactly_the_range_asked_for() {
        let src: Vec<u8> = (0..700u32).map(|i| (i * 7) as u8).collect();
        for from in [0, 1, 13] {
            for to in [0, 1, 31, 63] {
                for bytes in (0..200).chain([255, 256, 511, 600]) {
                    let mut dst = vec![0xee; 700];
                    // SAFETY: both ranges end below 700.
                    unsafe { copy(dst.as_mut_ptr().add(to), src.as_ptr().add(from), bytes) };
                    assert_eq!(dst[to..to + bytes], src[from..from + bytes]);
                    assert!(dst[..to].iter().chain(&dst[to + bytes..]).all(|&x| x == 0xee));
                }
            }
        }
    }
}
