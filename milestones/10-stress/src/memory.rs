//! Input and output of a call, each between two guards that nobody may write.

use crate::pattern::{Number, poison};

/// Bytes of a guard; the memory between the guards begins at a multiple of it, too.
const GUARD: usize = 256;

/// A stretch of elements with a guard before and after it.
#[derive(Debug)]
struct Guarded<T> {
    all: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Number> Guarded<T> {
    fn new(len: usize) -> Guarded<T> {
        let guard = GUARD / size_of::<T>();
        let all = vec![poison::<T>(); len + 3 * guard];
        let misaligned = all.as_ptr().addr() % GUARD / size_of::<T>();
        // One guard, and what is missing to the next multiple of its size: at least one guard is left behind.
        let start = guard + (guard - misaligned) % guard;
        Guarded { all, start, len }
    }

    fn get(&mut self) -> &mut [T] {
        &mut self.all[self.start..self.start + self.len]
    }

    /// Elements of the guards that are not what they were.
    fn damage(&self) -> usize {
        let poison = poison::<T>();
        let intact = |v: &&T| bytemuck::bytes_of(*v) == bytemuck::bytes_of(&poison);
        let guards = self.all[..self.start].iter().chain(&self.all[self.start + self.len..]);
        guards.filter(|v| !intact(v)).count()
    }
}

/// The memory of one row.
#[derive(Debug)]
pub(crate) struct Memory<T> {
    input: Guarded<T>,
    output: Guarded<T>,
}

impl<T: Number> Memory<T> {
    /// For this many elements in and out.
    pub(crate) fn new(input: usize, output: usize) -> Memory<T> {
        Memory { input: Guarded::new(input), output: Guarded::new(output) }
    }

    pub(crate) fn input(&mut self) -> &mut [T] {
        self.input.get()
    }

    pub(crate) fn output(&mut self) -> &mut [T] {
        self.output.get()
    }

    /// Both, for a call out of place.
    pub(crate) fn both(&mut self) -> (&[T], &mut [T]) {
        (self.input.get(), self.output.get())
    }

    /// Elements outside input and output that were written.
    pub(crate) fn damage(&self) -> usize {
        self.input.damage() + self.output.damage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_notice_writes_on_both_sides() {
        for len in [0, 1, 7, 1000] {
            let mut memory = Memory::<f32>::new(len, len);
            memory.input().fill(1.0);
            memory.output().fill(2.0);
            assert_eq!((memory.input().len(), memory.output().len(), memory.damage()), (len, len, 0));
            assert!(memory.input().as_ptr().addr().is_multiple_of(GUARD));
            let (start, end) = (memory.output.start, memory.output.start + len);
            memory.output.all[start - 1] = 0.0;
            memory.output.all[end] = 0.0;
            assert_eq!(memory.damage(), 2);
            assert!(memory.output.all.len() - end >= GUARD / 4, "the guard behind is whole");
        }
    }
}
