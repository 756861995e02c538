//! Copies between the CPU's memory and the GPU's: far slower than either memory, and slower still from ordinary pages.

use std::sync::Arc;

use anyhow::{Result, bail};
use cudarc::driver::{CudaStream, DriverError};

use crate::device::{Device, cuda};
use crate::measure::median;
use crate::values::input_a;

/// Longest vector to copy: longer ones give the same rates.
const MOST: usize = 16 << 20;

/// Times `n` elements in both directions, with ordinary and with page-locked memory, and checks that they came back.
pub(crate) fn run(device: &Device, stream: &Arc<CudaStream>, n: usize, repetitions: u32) -> Result<()> {
    let n = n.min(MOST);
    let values: Vec<f32> = (0..n).map(input_a).collect();
    let failed = |e: DriverError| cuda("cannot copy between host and device", e);
    let mut on_device = stream.alloc_zeros::<f32>(n).map_err(|e| cuda("cannot allocate on the device", e))?;
    let timed = |work: &mut dyn FnMut() -> Result<(), DriverError>| -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..repetitions.min(20) + 2 {
            let start = std::time::Instant::now();
            work().map_err(failed)?;
            stream.synchronize().map_err(failed)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(4.0 * n as f64 / median(&mut times[2..]) / 1e9)
    };

    let mut pageable = vec![0.0f32; n];
    let up = timed(&mut || stream.memcpy_htod(&values, &mut on_device))?;
    let down = timed(&mut || stream.memcpy_dtoh(&on_device, &mut pageable))?;
    println!("host memory, {n} elements: {up:.1} GB/s to the device, {down:.1} GB/s back");

    // SAFETY: the code below writes all of it before reading. Flags 0: cached by the CPU, so that reading it is fast.
    let mut pinned = unsafe { device.context.alloc_pinned_with_flags::<f32>(n, 0) }
        .map_err(|e| cuda("cannot allocate page-locked memory (is RLIMIT_MEMLOCK too low?)", e))?;
    pinned.as_mut_slice().map_err(failed)?.copy_from_slice(&values);
    let up = timed(&mut || stream.memcpy_htod(&pinned, &mut on_device))?;
    pinned.as_mut_slice().map_err(failed)?.fill(-1.0);
    let down = timed(&mut || stream.memcpy_dtoh(&on_device, &mut pinned))?;
    println!("page-locked memory:        {up:.1} GB/s to the device, {down:.1} GB/s back");

    if pageable != values || pinned.as_slice().map_err(failed)? != values {
        bail!("a vector of {n} elements came back from the device with other values");
    }
    Ok(())
}
