//! Buffers: memory of the host or of a GPU, with its element type.

use std::fmt;
use std::marker::PhantomData;

use super::gpu::{Guard, Stream};
use tinynccl_comm::calls::memory::{Memory, MemoryMut};
use tinynccl_plan::dtype::{DType, Element};
use tinynccl_plan::error::{Error, Result};

/// Borrowed memory that a call reads. Slices, arrays and vectors convert implicitly; [`Buffer::device`] makes one of
/// device memory.
#[derive(Debug)]
pub struct Buffer<'a> {
    pub(super) span: Span,
    pub(super) place: Place<'a>,
}

/// Borrowed memory that a call writes, or reads and writes; as [`Buffer`].
#[derive(Debug)]
pub struct BufferMut<'a> {
    span: Span,
    pub(super) place: Place<'a>,
    _exclusive: PhantomData<&'a mut [u8]>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) address: *mut u8,
    pub(super) len: usize,
    pub(super) dtype: DType,
}

/// Location of a buffer.
#[derive(Debug)]
pub(super) enum Place<'a> {
    /// Nowhere: see [`Buffer::none`].
    Nowhere,
    Host,
    Device(
        Stream,
        #[allow(dead_code, reason = "tells cudarc, when it is dropped, that the call is in the stream")]
        Option<Guard<'a>>,
    ),
}

const NOWHERE: Span = Span { address: std::ptr::null_mut(), len: 0, dtype: DType::U8 };

impl<'a> Buffer<'a> {
    /// No memory: for ranks that have no input, such as all but the root of a scatter.
    pub fn none() -> Buffer<'a> {
        Buffer { span: NOWHERE, place: Place::Nowhere }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.span.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.span.len == 0
    }
}

impl<'a> BufferMut<'a> {
    /// No memory: for ranks that get no output, such as all but the root of a gather.
    pub fn none() -> BufferMut<'a> {
        BufferMut::of(NOWHERE, Place::Nowhere)
    }

    #[inline]
    pub(super) fn of(span: Span, place: Place<'a>) -> BufferMut<'a> {
        BufferMut { span, place, _exclusive: PhantomData }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.span.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.span.len
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.span.len == 0
    }
}

impl Place<'_> {
    /// The common location of a call's two buffers, one of which may have no memory.
    pub(super) fn joined<'p>(&'p self, other: &'p Place<'_>, op: &str) -> Result<Spot<'p>> {
        match (self, other) {
            (Place::Nowhere | Place::Host, Place::Nowhere | Place::Host) => Ok(Spot::Host),
            (Place::Device(one, _), Place::Device(other, _)) if one.handle() == other.handle() => Ok(Spot::Device(one)),
            (Place::Device(one, _), Place::Nowhere) | (Place::Nowhere, Place::Device(one, _)) => Ok(Spot::Device(one)),
            (Place::Device(..), Place::Device(..)) => {
                Err(Error::invalid(op, "the buffers come with two streams: expected the same for both"))
            }
            _ => {
                Err(Error::invalid(op, format!("the input is {self}, the output {other}: expected both in one place")))
            }
        }
    }

    pub(super) fn spot(&self) -> Spot<'_> {
        match self {
            Place::Nowhere | Place::Host => Spot::Host,
            Place::Device(stream, _) => Spot::Device(stream),
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Place::Nowhere => "nowhere",
            Place::Host => "host memory",
            Place::Device(..) => "device memory",
        })
    }
}

/// Location of a call.
#[derive(Debug, Clone, Copy)]
pub(super) enum Spot<'p> {
    Host,
    Device(&'p Stream),
}

// SAFETY: every constructor was given (or promised) memory of that length and type, borrowed for 'a.
unsafe impl Memory for Buffer<'_> {
    #[inline]
    fn dtype(&self) -> DType {
        self.span.dtype
    }
    #[inline]
    fn elements(&self) -> usize {
        self.span.len
    }
    #[inline]
    fn address(&self) -> *const u8 {
        self.span.address
    }
}

// SAFETY: as above.
unsafe impl Memory for BufferMut<'_> {
    #[inline]
    fn dtype(&self) -> DType {
        self.span.dtype
    }
    #[inline]
    fn elements(&self) -> usize {
        self.span.len
    }
    #[inline]
    fn address(&self) -> *const u8 {
        self.span.address
    }
}

// SAFETY: the memory was borrowed exclusively, or promised to be.
unsafe impl MemoryMut for BufferMut<'_> {
    #[inline]
    fn address_mut(&mut self) -> *mut u8 {
        self.span.address
    }
}

impl<'a, T: Element> From<&'a [T]> for Buffer<'a> {
    #[inline]
    fn from(slice: &'a [T]) -> Buffer<'a> {
        let span = Span { address: slice.as_ptr().cast_mut().cast(), len: slice.len(), dtype: T::DTYPE };
        Buffer { span, place: Place::Host }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for BufferMut<'a> {
    #[inline]
    fn from(slice: &'a mut [T]) -> BufferMut<'a> {
        let span = Span { address: slice.as_mut_ptr().cast(), len: slice.len(), dtype: T::DTYPE };
        BufferMut::of(span, Place::Host)
    }
}

macro_rules! as_slices {
    ($([$($generics:tt)*] $t:ty),*) => {$(
        impl<'a, T: Element, $($generics)*> From<&'a $t> for Buffer<'a> {
            #[inline]
            fn from(memory: &'a $t) -> Buffer<'a> {
                Buffer::from(&memory[..])
            }
        }
        impl<'a, T: Element, $($generics)*> From<&'a mut $t> for BufferMut<'a> {
            #[inline]
            fn from(memory: &'a mut $t) -> BufferMut<'a> {
                BufferMut::from(&mut memory[..])
            }
        }
    )*};
}
as_slices!([const N: usize] [T; N], [] Vec<T>, [] tinynccl_comm::SymmetricBuffer<T>, [] tinynccl_comm::Persistent<T>);
