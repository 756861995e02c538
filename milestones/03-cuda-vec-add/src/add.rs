//! The main job: every kernel at every length, checked and timed.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg};

use crate::cli::Options;
use crate::compile::{KERNELS, SOURCE, compile};
use crate::device::{Device, cuda};
use crate::measure::{median, seconds};
use crate::transfer;
use crate::values::{difference, input_a, input_b};

/// Bytes that an addition moves per element: it reads two values and writes one.
const ADD_BYTES: f64 = 12.0;
/// Bytes that a copy moves per element.
const COPY_BYTES: f64 = 8.0;

/// Three vectors on the device.
struct Vectors {
    a: CudaSlice<f32>,
    b: CudaSlice<f32>,
    c: CudaSlice<f32>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let device = Device::open(options.device)?;
    println!("{}", device.describe()?);
    let kernels = compile(&device.context, device.capability, SOURCE, &KERNELS)?;
    println!(
        "NVRTC {}.{}: {} lines of CUDA C -> {:.1} KiB of PTX for {} in {:.0} ms; the driver -> machine code in {:.1} ms",
        kernels.nvrtc.0,
        kernels.nvrtc.1,
        SOURCE.lines().count(),
        kernels.ptx_bytes as f64 / 1024.0,
        kernels.target,
        kernels.compiling.as_secs_f64() * 1e3,
        kernels.loading.as_secs_f64() * 1e3,
    );
    // One stream executes its work in order, so copy and kernel need no event between them.
    let stream = device.context.default_stream();
    let longest = options.elements.iter().copied().max().unwrap_or(1);
    let (free, _) = device.context.mem_get_info().map_err(|e| cuda("cannot ask for the free memory", e))?;
    if longest.saturating_mul(12) > free {
        bail!(
            "three vectors of {longest} elements need {} MiB, device {} has {} MiB free: ask for fewer elements",
            longest.saturating_mul(12) >> 20,
            options.device,
            free >> 20
        );
    }
    let host_a: Vec<f32> = (0..longest).map(input_a).collect();
    let host_b: Vec<f32> = (0..longest).map(input_b).collect();
    let upload = |host: &[f32]| stream.clone_htod(host).map_err(|e| cuda("cannot copy a vector to the device", e));
    let c = stream.alloc_zeros(longest).map_err(|e| cuda("cannot allocate the result", e))?;
    let mut vectors = Vectors { a: upload(&host_a)?, b: upload(&host_b)?, c };

    println!("\nGB/s of memory traffic, and the share of what a copy on the device reaches:");
    println!("{:>10} {:>10} | {:>9} | {}", "elements", "bytes", "copy", KERNELS.map(|k| format!("{k:>17}")).join(" "));
    for &n in &options.elements {
        let copy = time_copy(&stream, &mut vectors, n, options.repetitions)?;
        let copy_rate = COPY_BYTES * n as f64 / copy / 1e9;
        let mut cells = Vec::new();
        for (function, name) in kernels.functions.iter().zip(KERNELS) {
            let grid = grid(function, name, n, options.block, device.multiprocessors)?;
            log::debug!("{name}, {n} elements: {grid:?}");
            check(&stream, function, grid, &mut vectors, n, name)?;
            let time = seconds(&stream, options.repetitions, || add(&stream, function, grid, &mut vectors, n))?;
            let rate = ADD_BYTES * n as f64 / time / 1e9;
            cells.push(format!("{rate:>10.1} {:>5.0}%", 100.0 * rate / copy_rate));
        }
        println!("{n:>10} {:>10} | {copy_rate:>9.1} | {}", 12 * n, cells.join(" "));
    }
    println!("every element of every result was compared with the sum made on the CPU: all equal");

    let (enqueue, finish) = launch_cost(&stream, &kernels.functions[0], &mut vectors, options.repetitions)?;
    println!(
        "\none launch: {:.1} us until the call returns, {:.1} us until the result is there",
        enqueue * 1e6,
        finish * 1e6
    );
    transfer::run(&device, &stream, longest, options.repetitions)
}

/// The grid: one thread per element, or as many blocks as the device holds at once.
fn grid(function: &CudaFunction, name: &str, n: usize, block: u32, multiprocessors: u32) -> Result<LaunchConfig> {
    let needed = n.div_ceil(block as usize).min(i32::MAX as usize) as u32;
    let blocks = if name == "add_element" {
        needed
    } else {
        let resident = function
            .occupancy_max_active_blocks_per_multiprocessor(block, 0, None)
            .map_err(|e| cuda("cannot ask how many blocks fit", e))?;
        needed.min(resident.max(1) * multiprocessors)
    };
    Ok(LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (block, 1, 1), shared_mem_bytes: 0 })
}

/// Enqueues `c = a + b` for the first `n` elements.
fn add(
    stream: &CudaStream,
    function: &CudaFunction,
    grid: LaunchConfig,
    vectors: &mut Vectors,
    n: usize,
) -> Result<()> {
    let n = n as u64;
    let mut launch = stream.launch_builder(function);
    launch.arg(&vectors.a).arg(&vectors.b).arg(&mut vectors.c).arg(&n);
    // SAFETY: the arguments have the types of the kernel's parameters, and all vectors have at least n elements.
    unsafe { launch.launch(grid) }.map_err(|e| cuda("cannot launch", e))?;
    Ok(())
}

/// Runs once over a zeroed result and compares every element.
fn check(
    stream: &Arc<CudaStream>,
    function: &CudaFunction,
    grid: LaunchConfig,
    vectors: &mut Vectors,
    n: usize,
    name: &str,
) -> Result<()> {
    stream.memset_zeros(&mut vectors.c).map_err(|e| cuda("cannot clear the result", e))?;
    add(stream, function, grid, vectors, n)?;
    let result = stream.clone_dtoh(&vectors.c).map_err(|e| cuda(&format!("{name} with {n} elements failed"), e))?;
    if let Some(difference) = difference(&result[..n]) {
        bail!("{name} with {n} elements: {difference}");
    }
    if let Some(at) = result[n..].iter().position(|&c| c != 0.0) {
        bail!("{name} with {n} elements wrote behind its end, to c[{}]", n + at);
    }
    Ok(())
}

fn time_copy(stream: &Arc<CudaStream>, vectors: &mut Vectors, n: usize, repetitions: u32) -> Result<f64> {
    let Vectors { a, c, .. } = vectors;
    seconds(stream, repetitions, || {
        stream.memcpy_dtod(&a.slice(..n), &mut c.slice_mut(..n)).map_err(|e| cuda("cannot copy on the device", e))
    })
}

/// Seconds on the CPU's clock until the launch of a one-element kernel returns, and until its result is available.
fn launch_cost(
    stream: &CudaStream,
    function: &CudaFunction,
    vectors: &mut Vectors,
    repetitions: u32,
) -> Result<(f64, f64)> {
    let grid = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (32, 1, 1), shared_mem_bytes: 0 };
    let (mut enqueue, mut finish) = (Vec::new(), Vec::new());
    for _ in 0..repetitions.max(20) {
        stream.synchronize().map_err(|e| cuda("cannot wait for the stream", e))?;
        let start = Instant::now();
        add(stream, function, grid, vectors, 1)?;
        enqueue.push(start.elapsed().as_secs_f64());
        stream.synchronize().map_err(|e| cuda("cannot wait for the stream", e))?;
        finish.push(start.elapsed().as_secs_f64());
    }
    Ok((median(&mut enqueue), median(&mut finish)))
}
