//! Buffers in memory of a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use crate::process_group::Owned;
use crate::process_group::buffer::{Buffer, BufferMut, Place, Span};
use tinynccl_cuda::Stream;
use tinynccl_plan::dtype::{DType, Element};

impl<'a> Buffer<'a> {
    /// Device memory of cudarc. The call is enqueued on `stream`, after its earlier and before its later work.
    pub fn device<T: Element>(stream: &'a Arc<CudaStream>, slice: &'a impl DevicePtr<T>) -> Buffer<'a> {
        let len = slice.len();
        let (address, guard) = slice.device_ptr(stream);
        let span = Span { address: address as *mut u8, len, dtype: T::DTYPE };
        Buffer { span, place: Place::Device(stream.into(), Some(guard)) }
    }

    /// Device memory by its address, read in the order of `stream`.
    ///
    /// # Safety
    /// `len` elements of `dtype` must lie there, on the device of the group, until the stream has passed the call;
    /// `stream` must be of that device and stay until the group's next call.
    pub unsafe fn from_address(stream: impl Into<Stream>, dtype: DType, address: u64, len: usize) -> Buffer<'a> {
        Buffer { span: Span { address: address as *mut u8, len, dtype }, place: Place::Device(stream.into(), None) }
    }
}

impl<'a> BufferMut<'a> {
    /// As [`Buffer::device`], to write to.
    pub fn device<T: Element>(stream: &'a Arc<CudaStream>, slice: &'a mut impl DevicePtrMut<T>) -> BufferMut<'a> {
        let len = slice.len();
        let (address, guard) = slice.device_ptr_mut(stream);
        let span = Span { address: address as *mut u8, len, dtype: T::DTYPE };
        BufferMut::of(span, Place::Device(stream.into(), Some(guard)))
    }

    /// As [`Buffer::from_address`], to write to.
    ///
    /// # Safety
    /// As [`Buffer::from_address`], and nothing else may access the memory until the stream has completed the call.
    pub unsafe fn from_address(stream: impl Into<Stream>, dtype: DType, address: u64, len: usize) -> BufferMut<'a> {
        BufferMut::of(Span { address: address as *mut u8, len, dtype }, Place::Device(stream.into(), None))
    }
}

/// Device memory and the stream in whose order it is used.
#[derive(Debug)]
pub struct OnDevice<T> {
    /// The call runs after its earlier work.
    pub stream: Arc<CudaStream>,
    /// The memory.
    pub data: CudaSlice<T>,
}

impl<T: Element> Owned for OnDevice<T> {
    fn input(&self) -> Buffer<'_> {
        Buffer::device(&self.stream, &self.data)
    }
    fn output(&mut self) -> BufferMut<'_> {
        BufferMut::device(&self.stream, &mut self.data)
    }
}
