//! Memory of a cell's buffers: symmetric memory when the algorithm is the one for it, else the heap.

use std::ops::{Deref, DerefMut};

use tinynccl::Comm;
use tinynccl::comm::SymmetricBuffer;
use tinynccl::wire::Algorithm;

use super::values::{Number, blank, vector};

/// Makes buffers of up to `most` elements; every rank makes as many, of lengths that may differ.
pub struct Memory<'a> {
    pub comm: &'a Comm,
    pub most: usize,
}

/// A buffer.
pub enum Buffer<T: Number> {
    Heap(Vec<T>),
    Symmetric(SymmetricBuffer<T>, usize),
}

impl Memory<'_> {
    pub fn blank<T: Number>(&self, len: usize) -> Buffer<T> {
        self.place(blank(len))
    }

    pub fn vector<T: Number>(&self, len: usize, f: impl Fn(usize) -> T) -> Buffer<T> {
        self.place(vector(len, f))
    }

    fn place<T: Number>(&self, values: Vec<T>) -> Buffer<T> {
        if self.comm.config().algorithm != Some(Algorithm::TwoShot) {
            return Buffer::Heap(values);
        }
        let mut buffer = self.comm.alloc(self.most).expect("alloc");
        buffer[..values.len()].copy_from_slice(&values);
        Buffer::Symmetric(buffer, values.len())
    }
}

impl<T: Number> Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        match self {
            Buffer::Heap(values) => values,
            Buffer::Symmetric(buffer, len) => &buffer[..*len],
        }
    }
}

impl<T: Number> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Buffer::Heap(values) => values,
            Buffer::Symmetric(buffer, len) => &mut buffer[..*len],
        }
    }
}
