//! Operations of a stream, and their execution.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUresult, CUstream};

use crate::calls::{Answer, lock};
use crate::context::Context;
use crate::handles;
use crate::memory::{self, Allocation, Place};
use crate::settings;
use crate::stream::Point;

/// One operation.
pub(crate) enum Work {
    Copy {
        to: Place,
        from: Place,
        bytes: usize,
    },
    Fill {
        to: Place,
        pattern: Pattern,
        count: usize,
    },
    /// Waits for a word of memory.
    Wait {
        at: Place,
        word: Word,
        until: Comparison,
    },
    /// Writes a word of memory, behind all that this stream did before.
    Write {
        at: Place,
        word: Word,
    },
    /// Waits for another stream, or for this one's past.
    Reach(Point),
    /// Notes the time.
    Stamp(Arc<Stamp>),
    Host(unsafe extern "C" fn(*mut c_void), Data),
    Callback(unsafe extern "C" fn(CUstream, CUresult, *mut c_void), usize, Data),
    /// Gives memory back.
    Free(Arc<Allocation>),
    /// A launch of a graph.
    Graph(Arc<Vec<Work>>),
    Nothing,
}

/// Argument that a program passes to its own function.
#[derive(Clone, Copy)]
pub(crate) struct Data(pub(crate) *mut c_void);

// SAFETY: only handed back to the program's function, which the program gave us for another thread to call.
unsafe impl Send for Data {}
// SAFETY: as above.
unsafe impl Sync for Data {}

/// Time at which a stream last reached the recording of an event; `None` before.
#[derive(Default)]
pub(crate) struct Stamp(Mutex<Option<Instant>>);

impl Stamp {
    pub(crate) fn time(&self) -> Option<Instant> {
        *lock(&self.0)
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Pattern {
    U8(u8),
    U16(u16),
    U32(u32),
}

#[derive(Clone, Copy)]
pub(crate) enum Word {
    U32(u32),
    U64(u64),
}

impl Word {
    pub(crate) fn bytes(self) -> usize {
        match self {
            Word::U32(_) => 4,
            Word::U64(_) => 8,
        }
    }

    /// Returns true if the memory at `at` ends a wait for this word.
    fn is_met(self, at: *mut u8, until: Comparison) -> bool {
        match self {
            // SAFETY: a live, aligned word of that size (`memory_operations`); others may write it at any time.
            Word::U32(value) => until.holds32(unsafe { AtomicU32::from_ptr(at.cast()) }.load(Ordering::Acquire), value),
            // SAFETY: as above.
            Word::U64(value) => until.holds64(unsafe { AtomicU64::from_ptr(at.cast()) }.load(Ordering::Acquire), value),
        }
    }

    fn write(self, at: *mut u8) {
        match self {
            // SAFETY: as in `is_met`.
            Word::U32(value) => unsafe { AtomicU32::from_ptr(at.cast()) }.store(value, Ordering::Release),
            // SAFETY: as above.
            Word::U64(value) => unsafe { AtomicU64::from_ptr(at.cast()) }.store(value, Ordering::Release),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    /// At least, as counters that wrap compare.
    GreaterOrEqual,
    Equal,
    And,
    Nor,
}

impl Comparison {
    fn holds32(self, found: u32, value: u32) -> bool {
        match self {
            Comparison::GreaterOrEqual => found.wrapping_sub(value) as i32 >= 0,
            Comparison::Equal => found == value,
            Comparison::And => found & value != 0,
            Comparison::Nor => !(found | value) != 0,
        }
    }

    fn holds64(self, found: u64, value: u64) -> bool {
        match self {
            Comparison::GreaterOrEqual => found.wrapping_sub(value) as i64 >= 0,
            Comparison::Equal => found == value,
            Comparison::And => found & value != 0,
            Comparison::Nor => !(found | value) != 0,
        }
    }
}

impl Work {
    /// Executes the operation, in the stream's thread.
    pub(crate) fn run(&self, context: &Context) -> Answer {
        match self {
            Work::Copy { to, from, bytes } => {
                to.check()?;
                from.check()?;
                // SAFETY: both were checked to have `bytes` bytes when this was enqueued, and their owners are alive.
                // They may overlap, and programs may use them meanwhile, at their own risk.
                unsafe { std::ptr::copy(from.at(), to.at(), *bytes) };
            }
            Work::Fill { to, pattern, count } => {
                to.check()?;
                // SAFETY: as above; aligned, as `memory::copies` checks.
                unsafe {
                    match *pattern {
                        Pattern::U8(value) => to.at().write_bytes(value, *count),
                        Pattern::U16(value) => std::slice::from_raw_parts_mut(to.at().cast(), *count).fill(value),
                        Pattern::U32(value) => std::slice::from_raw_parts_mut(to.at().cast(), *count).fill(value),
                    }
                }
            }
            Work::Wait { at, word, until } => wait(context, || {
                at.check()?;
                Ok(word.is_met(at.at(), *until))
            })?,
            Work::Write { at, word } => {
                at.check()?;
                word.write(at.at());
            }
            Work::Reach(point) => point.wait(),
            Work::Stamp(stamp) => *lock(&stamp.0) = Some(Instant::now()),
            // SAFETY: the program's function, with its own argument, called once per launch.
            Work::Host(function, data) => unsafe { function(data.0) },
            Work::Callback(function, stream, data) => {
                // SAFETY: as above.
                unsafe { function(handles::pointer(*stream), CUresult::CUDA_SUCCESS, data.0) };
            }
            Work::Free(allocation) => memory::release(allocation),
            Work::Graph(work) => work.iter().try_for_each(|one| one.run(context))?,
            Work::Nothing => {}
        }
        Ok(())
    }

    /// Finishes the operation in a lost context: calls back with `error`, frees memory, and drops all else.
    pub(crate) fn skip(&self, error: CUresult) {
        match self {
            // SAFETY: as in `run`.
            Work::Callback(function, stream, data) => unsafe { function(handles::pointer(*stream), error, data.0) },
            Work::Free(allocation) => memory::release(allocation),
            _ => {}
        }
    }
}

/// Polls, as a device does. Little of a core is taken, as there may be more streams than cores.
fn wait(context: &Context, mut met: impl FnMut() -> Answer<bool>) -> Answer {
    let end = Instant::now() + *settings::PATIENCE;
    for turn in 0u32.. {
        if met()? {
            break;
        }
        context.check()?;
        match turn {
            0..50 => std::hint::spin_loop(),
            50..100 => std::thread::yield_now(),
            _ if Instant::now() > end => return Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT),
            _ => std::thread::sleep(Duration::from_micros(20)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_are_cuda_s() {
        use Comparison::*;
        assert!(GreaterOrEqual.holds32(5, 5) && GreaterOrEqual.holds32(2, u32::MAX) && !GreaterOrEqual.holds32(4, 5));
        assert!(GreaterOrEqual.holds64(2, u64::MAX) && !GreaterOrEqual.holds64(4, 5));
        assert!(Equal.holds32(7, 7) && !Equal.holds64(8, 7));
        assert!(And.holds32(6, 2) && !And.holds32(4, 2) && And.holds64(1 << 40, 1 << 40));
        assert!(Nor.holds32(0, 1) && !Nor.holds32(u32::MAX - 1, 1) && Nor.holds64(0, 1));
    }
}
