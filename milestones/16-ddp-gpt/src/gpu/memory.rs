//! Device memory.

use anyhow::Result;
use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, ValidAsZeroBits};

use super::device::Gpu;
use super::error::cuda;

/// An array in device memory. Kernels and cuBLAS get its address; who enqueues them keeps the order.
#[derive(Debug)]
pub struct Array<T> {
    slice: CudaSlice<T>,
    at: u64,
}

impl<T: DeviceRepr + ValidAsZeroBits> Array<T> {
    /// `len` zeroes.
    pub fn new(gpu: &Gpu, len: usize) -> Result<Self> {
        let mib = (len * size_of::<T>()) >> 20;
        let slice = gpu
            .stream
            .alloc_zeros::<T>(len.max(1))
            .map_err(|e| cuda(&format!("cannot allocate {mib} MiB on GPU {}", gpu.context.ordinal()), e))?;
        let at = slice.device_ptr(&gpu.stream).0;
        Ok(Array { slice, at })
    }

    /// The values of `host`.
    pub fn of(gpu: &Gpu, host: &[T]) -> Result<Self> {
        let mut array = Self::new(gpu, host.len())?;
        array.write(gpu, host)?;
        Ok(array)
    }

    /// Overwrites the first values.
    pub fn write(&mut self, gpu: &Gpu, host: &[T]) -> Result<()> {
        gpu.stream.memcpy_htod(host, &mut self.slice).map_err(|e| cuda("cannot copy to the GPU", e))?;
        gpu.stream.synchronize().map_err(|e| cuda("cannot copy to the GPU", e))
    }

    /// Values number `from` to `to`, after everything that was enqueued.
    pub fn read(&self, gpu: &Gpu, from: usize, to: usize) -> Result<Vec<T>>
    where
        T: Clone + Default,
    {
        let mut host = vec![T::default(); to - from];
        gpu.synchronize()?;
        gpu.stream
            .memcpy_dtoh(&self.slice.slice(from..to), &mut host)
            .map_err(|e| cuda("cannot copy from the GPU", e))?;
        gpu.stream.synchronize().map_err(|e| cuda("cannot copy from the GPU", e))?;
        Ok(host)
    }

    /// Its address.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// The address of value `i`.
    pub fn place(&self, i: usize) -> u64 {
        self.at + (i * size_of::<T>()) as u64
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}
