//! Element-wise reduction of two buffers, with the instruction set found at run time.

/// `out[i] = a[i] op b[i]` for `n` elements. `out` may be exactly `a` or exactly `b`; no other overlap.
pub type ReduceFn = unsafe fn(a: *const u8, b: *const u8, out: *mut u8, n: usize);

/// As [`ReduceFn`] with the result written to two places.
pub type ReduceDualFn = unsafe fn(a: *const u8, b: *const u8, out: *mut u8, copy: *mut u8, n: usize);

/// `buf[i] = buf[i] / divisor` for `n` elements (`avg`'s last step).
pub type DivideFn = unsafe fn(buf: *mut u8, n: usize, divisor: usize);

/// The functions of one (dtype, op) on this machine.
#[derive(Debug, Clone, Copy)]
pub struct Kernels {
    /// One result.
    pub reduce: ReduceFn,
    /// The same result in two places.
    pub reduce_dual: ReduceDualFn,
    /// Division by the world size.
    pub divide: DivideFn,
}
