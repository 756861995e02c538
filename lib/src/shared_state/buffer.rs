//! A buffer of the shared state, as bytes in chunks.

use twox_hash::XxHash3_128;

use tinynccl_plan::dtype::DType;

/// Bytes of a chunk: what is compared, fetched and proven at once. Its hash (16 bytes) and the cost of its message
/// (some microseconds) are far below its own, and a wrong bit costs no more than one chunk.
pub(super) const CHUNK: usize = 256 << 10;

pub(super) fn hash(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

#[derive(Debug)]
enum Memory<'a> {
    Slice(&'a mut [u8]),
    Vec(&'a mut Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Buffer<'a> {
    pub(super) name: String,
    dtype: DType,
    memory: Memory<'a>,
}

impl<'a> Buffer<'a> {
    pub(super) fn slice(name: &str, dtype: DType, bytes: &'a mut [u8]) -> Buffer<'a> {
        Buffer { name: name.to_owned(), dtype, memory: Memory::Slice(bytes) }
    }

    pub(super) fn vec(name: &str, bytes: &'a mut Vec<u8>) -> Buffer<'a> {
        Buffer { name: name.to_owned(), dtype: DType::U8, memory: Memory::Vec(bytes) }
    }

    /// Declaration, which must be the same on all ranks.
    pub(super) fn declaration(&self) -> String {
        let (name, dtype) = (&self.name, self.dtype);
        match &self.memory {
            Memory::Slice(bytes) => format!("'{name}' of {} {dtype}", bytes.len() / dtype.size()),
            Memory::Vec(_) => format!("'{name}', a vector of {dtype}"),
        }
    }

    pub(super) fn len(&self) -> usize {
        match &self.memory {
            Memory::Slice(bytes) => bytes.len(),
            Memory::Vec(bytes) => bytes.len(),
        }
    }

    /// Gives a vector this length. True if that is another one.
    pub(super) fn resize(&mut self, len: usize) -> bool {
        match &mut self.memory {
            Memory::Vec(bytes) if bytes.len() != len => {
                bytes.resize(len, 0);
                true
            }
            _ => false,
        }
    }

    pub(super) fn chunks(&mut self) -> impl Iterator<Item = &mut [u8]> {
        let bytes: &mut [u8] = match &mut self.memory {
            Memory::Slice(bytes) => bytes,
            Memory::Vec(bytes) => bytes,
        };
        bytes.chunks_mut(CHUNK)
    }
}
