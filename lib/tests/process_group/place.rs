//! Location of a test's buffers: on the host or on the group's GPU.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use tinynccl::process_group::{Buffer, BufferMut, OnDevice, Owned, ProcessGroup};

use super::common::values::Number;

/// Location of buffers.
pub(crate) enum Site {
    Host,
    Gpu(Arc<CudaStream>),
}

/// Elements that a GPU can hold too.
pub(crate) trait Datum: Number {}
impl<T: Number> Datum for T {}

/// A buffer at a site.
pub(crate) enum Held<T: Datum> {
    Host(Vec<T>),
    Gpu(OnDevice<T>),
}

impl Site {
    pub(crate) fn gpu(group: &ProcessGroup) -> Site {
        Site::Gpu(group.device().expect("a GPU").new_stream().expect("a stream"))
    }

    pub(crate) fn put<T: Datum>(&self, values: Vec<T>) -> Held<T> {
        match self {
            Site::Host => Held::Host(values),
            Site::Gpu(stream) => {
                // As bytes: cudarc does not know the 8-bit floats.
                let bytes = stream.clone_htod(bytemuck::cast_slice::<T, u8>(&values)).expect("copying to the GPU");
                // SAFETY: memory of cudarc's that is owned by nothing else now, with the bytes of these elements.
                let data = unsafe { stream.upgrade_device_ptr::<T>(bytes.leak(), values.len()) };
                Held::Gpu(OnDevice { stream: stream.clone(), data })
            }
        }
    }
}

impl<T: Datum> Held<T> {
    pub(crate) fn values(&self) -> Vec<T> {
        match self {
            Held::Host(values) => values.clone(),
            Held::Gpu(OnDevice { stream, data }) => {
                let len = data.len() * size_of::<T>();
                // SAFETY: every element is plain bytes.
                let bytes = unsafe { data.transmute::<u8>(len) }.expect("the bytes of the elements");
                let bytes = stream.clone_dtoh(&bytes).expect("copying from the GPU");
                bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
            }
        }
    }
}

impl<T: Datum> Owned for Held<T> {
    fn input(&self) -> Buffer<'_> {
        match self {
            Held::Host(values) => Buffer::from(values),
            Held::Gpu(device) => device.input(),
        }
    }
    fn output(&mut self) -> BufferMut<'_> {
        match self {
            Held::Host(values) => BufferMut::from(values),
            Held::Gpu(device) => device.output(),
        }
    }
}

impl<'a, T: Datum> From<&'a Held<T>> for Buffer<'a> {
    fn from(held: &'a Held<T>) -> Buffer<'a> {
        held.input()
    }
}

impl<'a, T: Datum> From<&'a mut Held<T>> for BufferMut<'a> {
    fn from(held: &'a mut Held<T>) -> BufferMut<'a> {
        held.output()
    }
}
