//! Four mistakes and CUDA's reports of them. Each must fail: one that succeeds is itself an error.

use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use cudarc::driver::{DriverError, LaunchConfig, PushKernelArg};

use crate::cli::{Fault, Options};
use crate::compile::{KERNELS, SOURCE, compile};
use crate::device::{Device, cuda};
use crate::unavailable::EXIT_UNAVAILABLE;

/// Runs each mistake in a separate process, because some leave the process without a usable device.
pub(crate) fn all(options: &Options) -> Result<()> {
    // If nothing can run here, this reports it in one line instead of four.
    let device = Device::open(options.device)?;
    println!("{}\n", device.describe()?);
    drop(device);
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    for fault in Fault::value_variants() {
        let name = fault.to_possible_value().map(|v| v.get_name().to_owned()).unwrap_or_default();
        let output = Command::new(&program)
            .args(["fault", &name, "--device", &options.device.to_string()])
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        println!("{name}:");
        for line in said.lines() {
            println!("    {line}");
        }
        match output.status.code() {
            Some(0) => {}
            Some(code) if code == i32::from(EXIT_UNAVAILABLE) => {
                bail!("{name}: the device went away between two processes")
            }
            _ => bail!("{name}: ended with {} where the mistake should have been reported", output.status),
        }
    }
    Ok(())
}

/// Makes one mistake. Fails if CUDA does not notice.
pub(crate) fn one(fault: Fault, options: &Options) -> Result<()> {
    let device = Device::open(options.device)?;
    if fault == Fault::Source {
        let source = SOURCE.replace("c[i] = a[i] + b[i];", "c[i] = a[i] + d[i];");
        return match compile(&device.context, device.capability, &source, &KERNELS) {
            Ok(_) => bail!("the compiler took a kernel that reads a vector which is not there"),
            Err(error) if error.downcast_ref::<crate::unavailable::Unavailable>().is_some() => Err(error),
            Err(error) => {
                println!("a name that does not exist, found when the program runs: {error:#}");
                Ok(())
            }
        };
    }
    let kernels = compile(&device.context, device.capability, SOURCE, &KERNELS)?;
    let stream = device.context.default_stream();
    let buffer = stream.alloc_zeros::<f32>(1024).map_err(|e| cuda("cannot allocate", e))?;
    let address = {
        use cudarc::driver::DevicePtr;
        buffer.device_ptr(&stream).0
    };
    let (kernel, threads, a) = match fault {
        Fault::Launch => (0, 2048, address),
        Fault::Address => (0, 256, 0),
        _ => (2, 256, address + 4),
    };
    let (n, output) = (256u64, address + 2048);
    let mut launch = stream.launch_builder(&kernels.functions[kernel]);
    launch.arg(&a).arg(&address).arg(&output).arg(&n);
    let grid = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: wrong on purpose. The kernel can only damage this process's device memory, which holds nothing.
    let launched = unsafe { launch.launch(grid) };
    let told = |result: std::result::Result<(), DriverError>| match result {
        Ok(()) => "fine".to_owned(),
        Err(e) => cuda("refused", e).to_string(),
    };
    let waited = stream.synchronize();
    if launched.is_ok() && waited.is_ok() {
        bail!("CUDA did not notice the mistake");
    }
    println!("the launch:       {}", told(launched.map(|_| ())));
    println!("waiting for it:   {}", told(waited));
    println!("the next call:    {}", told(stream.alloc_zeros::<f32>(1).map(|_| ())));
    // A lost context cannot free the buffer.
    std::mem::forget(buffer);
    Ok(())
}
