//! Input and output of the calls: mapped once for a whole run, each between two guards that no call may write.
//!
//! A reused buffer stays in the caches if it fits. `fresh` cycles through a set of buffers twice as large as the
//! last-level cache, so every call finds its data in memory.

use std::fs;
use std::ptr::NonNull;

use anyhow::{Context as _, Result, bail};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use tinynccl::Comm;
use tinynccl::comm::{Persistent, SymmetricBuffer};

use crate::pattern::{Number, poison};

/// Bytes of a guard. Data begins one guard after a multiple of [`HUGE`], so at the start of a small page.
const GUARD: usize = 4096;
/// Bytes of a huge page.
const HUGE: usize = 2 << 20;
/// Buffers of a cycle begin at multiples of a cache line.
const LINE: usize = 64;

/// The memory of the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Buffers {
    /// One set of buffers for all calls.
    Reused,
    /// Different buffers at every call, in turn.
    Fresh,
    /// One set of buffers for all calls, allocated by the library so that every rank can reach them.
    Symmetric,
    /// One set of buffers for all calls, registered with the RDMA devices (--transport verbs).
    Registered,
}

/// Memory of one direction, initially zero.
#[derive(Debug)]
enum Region {
    /// Our own.
    Mapped(Mapped),
    /// The library's.
    Symmetric(SymmetricBuffer<u8>),
    /// Registered, with the offset of the data's first byte: at the start of a page, as in the other kinds.
    Registered(Persistent<u8>, usize),
}

impl Region {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Region::Mapped(mapped) => mapped.bytes(),
            Region::Symmetric(buffer) => buffer,
            Region::Registered(buffer, skip) => &mut buffer[*skip..],
        }
    }
}

/// A private mapping.
#[derive(Debug)]
struct Mapped {
    base: NonNull<u8>,
    len: usize,
    map: NonNull<u8>,
    map_len: usize,
}

impl Mapped {
    /// `len` bytes at a multiple of [`HUGE`], on huge pages if requested (and if the kernel has some), else on small
    /// ones.
    fn new(len: usize, huge_pages: bool) -> Result<Mapped> {
        let len = len.next_multiple_of(HUGE);
        let map_len = len + HUGE;
        let words = || format!("cannot map {len} bytes for the buffers");
        // SAFETY: a new private mapping at an address the kernel chooses touches no memory in use.
        let map = unsafe {
            mmap_anonymous(std::ptr::null_mut(), map_len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let Some(map) = NonNull::new(map.with_context(words)?.cast::<u8>()) else { bail!(words()) };
        let skip = map.addr().get().next_multiple_of(HUGE) - map.addr().get();
        // SAFETY: skip < HUGE, so the pointer and `len` bytes behind it are within the mapping of len + HUGE bytes.
        let base = unsafe { map.add(skip) };
        let advice = if huge_pages { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        // SAFETY: within our mapping, and this advice does not change its contents. A kernel without huge pages refuses
        // it: then all pages are small.
        let _ = unsafe { madvise(base.as_ptr().cast(), len, advice) };
        Ok(Mapped { base, len, map, map_len })
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes from `base` are mapped, readable, writable, zeroed and ours alone until drop; the borrow
        // is unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; borrows of it ended before.
        let _ = unsafe { munmap(self.map.as_ptr().cast(), self.map_len) };
    }
}

/// The memory of a run: enough for its largest row.
#[derive(Debug)]
pub(crate) struct Arena {
    input: Region,
    output: Region,
    fresh: bool,
}

impl Arena {
    /// For rows of up to `most` bytes in each direction.
    pub(crate) fn new(comm: &Comm, most: usize, buffers: Buffers, huge_pages: bool) -> Result<Arena> {
        let len = match buffers {
            Buffers::Reused | Buffers::Symmetric | Buffers::Registered => most,
            Buffers::Fresh => most.max(2 * last_level_cache()),
        } + 2 * GUARD;
        let region = || match buffers {
            Buffers::Symmetric => Ok(Region::Symmetric(comm.alloc(len.next_multiple_of(HUGE))?)),
            Buffers::Registered => {
                let buffer = comm.register_persistent(vec![0u8; len.next_multiple_of(HUGE) + GUARD])?;
                let skip = buffer.as_ptr().addr().next_multiple_of(GUARD) - buffer.as_ptr().addr();
                Ok(Region::Registered(buffer, skip))
            }
            Buffers::Reused | Buffers::Fresh => Mapped::new(len, huge_pages).map(Region::Mapped),
        };
        Ok(Arena { input: region()?, output: region()?, fresh: buffers == Buffers::Fresh })
    }

    /// The memory of one row, with this many elements in and out.
    pub(crate) fn memory<T: Number>(&mut self, input: usize, output: usize) -> Result<Memory<'_, T>> {
        let step = |len: usize| (len * size_of::<T>()).next_multiple_of(LINE);
        let room = self.input.bytes().len() - 2 * GUARD;
        let places = match step(input).max(step(output)) {
            0 => 1,
            largest if self.fresh => (room / largest).max(1),
            _ => 1,
        };
        let stretch = |region, len| Stretch::new(region, len, step(len) / size_of::<T>(), places);
        Ok(Memory {
            input: stretch(&mut self.input, input)?,
            output: stretch(&mut self.output, output)?,
            places,
            at: 0,
        })
    }
}

/// Bytes of a run's memory that its rows write: up to `input` in and `output` out, in regions for rows of `most` bytes.
pub(crate) fn touched([input, output]: [u64; 2], most: usize, buffers: Buffers) -> u64 {
    match buffers {
        Buffers::Reused | Buffers::Symmetric => input + output,
        Buffers::Fresh => 2 * most.max(2 * last_level_cache()) as u64,
        Buffers::Registered => 2 * most as u64,
    }
}

/// Bytes of the last-level cache as the kernel reports it, or else a typical server's.
fn last_level_cache() -> usize {
    let text = fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size");
    text.ok().and_then(|text| program_kit::size::parse(text.trim()).ok()).filter(|&bytes| bytes > 0).unwrap_or(32 << 20)
}

/// Buffers of one direction, side by side, with a guard before and after all of them.
#[derive(Debug)]
struct Stretch<'a, T> {
    before: &'a mut [T],
    data: &'a mut [T],
    after: &'a mut [T],
    len: usize,
    step: usize,
}

impl<'a, T: Number> Stretch<'a, T> {
    fn new(region: &'a mut Region, len: usize, step: usize, places: usize) -> Result<Stretch<'a, T>> {
        let guard = GUARD / size_of::<T>();
        let Ok(all) = bytemuck::try_cast_slice_mut::<u8, T>(region.bytes()) else {
            bail!("the buffers' memory does not fit elements of {} bytes", size_of::<T>());
        };
        let used = (places - 1) * step + len;
        if all.len() < used + 2 * guard {
            bail!("a row needs {used} elements, the run's memory has {}", all.len() - 2 * guard);
        }
        let (before, rest) = all.split_at_mut(guard);
        let (data, rest) = rest.split_at_mut(used);
        let (after, _) = rest.split_at_mut(guard);
        before.fill(poison());
        after.fill(poison());
        Ok(Stretch { before, data, after, len, step })
    }

    fn get(&mut self, place: usize) -> &mut [T] {
        &mut self.data[place * self.step..][..self.len]
    }

    /// Elements of the guards that have changed.
    fn damage(&self) -> usize {
        let poison = poison::<T>();
        let intact = |v: &&T| bytemuck::bytes_of(*v) == bytemuck::bytes_of(&poison);
        self.before.iter().chain(&*self.after).filter(|v| !intact(v)).count()
    }
}

/// The memory of one row: one buffer each for input and output, or several that calls use in turn.
#[derive(Debug)]
pub(crate) struct Memory<'a, T> {
    input: Stretch<'a, T>,
    output: Stretch<'a, T>,
    places: usize,
    at: usize,
}

impl<T: Number> Memory<'_, T> {
    pub(crate) fn input(&mut self) -> &mut [T] {
        self.input.get(self.at)
    }

    pub(crate) fn output(&mut self) -> &mut [T] {
        self.output.get(self.at)
    }

    /// Both, for a call out of place.
    pub(crate) fn both(&mut self) -> (&[T], &mut [T]) {
        (self.input.get(self.at), self.output.get(self.at))
    }

    /// Moves to the next buffers.
    pub(crate) fn advance(&mut self) {
        self.at += 1;
        if self.at == self.places {
            self.at = 0;
        }
    }

    /// Goes back to the buffers of the last call.
    pub(crate) fn back(&mut self) {
        self.at = if self.at == 0 { self.places } else { self.at } - 1;
    }

    /// Prepares all buffers alike, then returns to the first.
    pub(crate) fn each(&mut self, mut prepare: impl FnMut(&mut Self)) {
        for place in 0..self.places {
            self.at = place;
            prepare(self);
        }
        self.at = 0;
    }

    /// Elements outside input and output that were written.
    pub(crate) fn damage(&self) -> usize {
        self.input.damage() + self.output.damage()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena(most: usize, fresh: bool) -> Arena {
        let region = || Region::Mapped(Mapped::new(most + 2 * GUARD, false).unwrap());
        Arena { input: region(), output: region(), fresh }
    }

    #[test]
    fn guards_notice_writes_on_both_sides() {
        let mut arena = arena(4000, false);
        for len in [0, 1, 7, 1000] {
            let mut memory = arena.memory::<f32>(len, len).unwrap();
            memory.input().fill(1.0);
            memory.output().fill(2.0);
            assert_eq!((memory.input().len(), memory.output().len(), memory.damage()), (len, len, 0));
            assert!(memory.input().as_ptr().addr().is_multiple_of(GUARD));
            *memory.output.before.last_mut().unwrap() = 0.0;
            *memory.output.after.first_mut().unwrap() = 0.0;
            assert_eq!(memory.damage(), 2);
        }
        assert!(arena.memory::<f32>(HUGE, 1).is_err(), "more than the run has");
    }

    #[test]
    fn fresh_buffers_do_not_overlap_and_come_round() {
        let mut arena = arena(HUGE - 2 * GUARD, true);
        for (input, output) in [(1, 1), (17, 34), (100_000, 50_000), (0, 0)] {
            let mut memory = arena.memory::<u32>(input, output).unwrap();
            let mut next = 0u32;
            memory.each(|m| {
                next += 1;
                m.input().fill(next);
                m.output().fill(next);
            });
            let places = memory.places;
            assert!(places == 1 || places * input.max(output) * 4 <= HUGE, "{places}");
            assert!(input == 0 || places > 1, "{input}");
            for place in 0..places {
                let expected = (place + 1) as u32;
                assert!(memory.input().iter().all(|&v| v == expected), "{place}");
                assert!(memory.output().iter().all(|&v| v == expected), "{place}");
                memory.advance();
            }
            assert_eq!(memory.at, 0);
            memory.back();
            assert_eq!((memory.at, memory.damage()), (places - 1, 0));
        }
    }
}
