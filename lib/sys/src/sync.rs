//! Operations on shared memory, in links and in the shared region of `symmetric`: the processor's atomics, or those of
//! the model checker `loom` under `--cfg loom`. The code is the same in both, so the orderings that are checked are the
//! orderings that run.
//!
//! # What the model stands for
//! - **Fences** are loom's own. A full fence per message could hide a missing acquire or release elsewhere; so the
//!   models that do not sleep run without any fence ([`Step::WakerFence`] left out).
//! - **Payloads** are [`Words`], and memory that a model [watches](touches): plain memory, in which loom reports an
//!   unordered read and write as an error.
//! - **The doorbell** (an eventfd) is a flag under a lock: the kernel writes, reads and polls its counter under a lock,
//!   too.
//! - **A futex** is a word and a queue under a lock: the kernel compares the word and queues the sleeper under the lock
//!   of its hash bucket, and takes it to wake. No wait ends by time: what only a timeout would mend is a deadlock in
//!   the model.

pub use imp::{AtomicU32, AtomicU64, Futex, Words, copy, fence, order, touches, yield_now};

#[cfg(loom)]
#[cfg_attr(not(test), allow(unused_imports))]
pub use imp::{Bell, forget, watch, weaken};

/// The steps of the protocols whose ordering matters. The models weaken them one at a time and must notice each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The writer of a line stores its number.
    Publish,
    /// A reader sees it.
    SeePublished,
    /// The receiver stores what it has freed.
    Free,
    /// The sender sees it.
    SeeFreed,
    /// An end announces that it is gone.
    Close,
    /// The other sees it.
    SeeClosed,
    /// A rank stores the last call that it is done with.
    Finish,
    /// The others see it.
    SeeFinished,
    /// Between making an announcement's number odd and its words.
    Announcing,
    /// The number is even again.
    Announce,
    /// The others see it.
    SeeAnnounced,
    /// Between reading the words and looking at the number again.
    LookTwice,
    /// Changes of the bit, or of the words, that ask to be woken.
    Wake,
    /// Between a message (or freed line) and the look at the peer's state.
    WakerFence,
    /// Between asking to be woken and the look for a message (or credit).
    SleeperFence,
}

#[cfg(not(loom))]
mod imp {
    pub use std::ptr::copy_nonoverlapping as copy;
    pub use std::sync::atomic::{AtomicU32, AtomicU64, fence};
    pub use std::thread::yield_now;

    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use rustix::thread::futex;

    use super::Step;

    /// The ordering of a step.
    #[inline(always)]
    pub const fn order(_step: Step, ordering: Ordering) -> Ordering {
        ordering
    }

    /// Words of a message. They are ordered by other words; atomics because a misbehaving peer may write them at any
    /// time.
    #[repr(transparent)]
    #[derive(Debug)]
    pub struct Words<const N: usize>([AtomicU64; N]);

    impl<const N: usize> Words<N> {
        /// Writes the words one after the other, in no order that others may count on.
        #[inline(always)]
        pub fn store(&self, words: [u64; N]) {
            for (to, word) in self.0.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
        }

        /// Reads the words one after the other, in no order that others may count on.
        #[inline(always)]
        pub fn load(&self) -> [u64; N] {
            let mut words = [0; N];
            for (word, from) in words.iter_mut().zip(&self.0) {
                *word = from.load(Ordering::Relaxed);
            }
            words
        }
    }

    /// Tells a model that `bytes` bytes are written (or read) here. Does nothing outside of a model.
    #[inline(always)]
    pub fn touches(_at: *const u8, _bytes: usize, _writing: bool) {}

    /// A word to sleep on. Between processes: it may lie in shared memory.
    #[repr(transparent)]
    #[derive(Debug, Default)]
    pub struct Futex(AtomicU32);

    impl Futex {
        /// Returns the word that is slept on.
        #[inline(always)]
        pub fn word(&self) -> &AtomicU32 {
            &self.0
        }

        /// Sleeps while the word is `value`, at most for `slice`; may wake for no reason.
        pub fn wait(&self, value: u32, slice: Duration) {
            let timeout = futex::Timespec { tv_sec: slice.as_secs() as _, tv_nsec: slice.subsec_nanos() as _ };
            // Woken, too late to sleep (the word has changed), interrupted, or the slice is over: the caller looks
            // again.
            let _ = futex::wait(&self.0, futex::Flags::empty(), value, Some(&timeout));
        }

        /// Wakes one thread that sleeps on the word, which was changed before.
        pub fn wake(&self) {
            // The word lies in mapped memory: this can only fail for an address that is not.
            let _ = futex::wake(&self.0, futex::Flags::empty(), 1);
        }
    }
}

#[cfg(loom)]
#[allow(missing_docs, reason = "as outside of a model")]
mod imp {
    pub use loom::sync::atomic::{AtomicU32, AtomicU64};
    pub use loom::thread::yield_now;

    use std::cell::{Cell, RefCell};
    use std::ops::Range;
    use std::rc::Rc;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use loom::cell::UnsafeCell;
    use loom::sync::{Condvar, Mutex};

    use super::Step;

    thread_local! {
        // loom runs all threads of a model as coroutines on the thread of its caller.
        static WEAKENED: Cell<&'static [Step]> = const { Cell::new(&[]) };
        static WATCHED: RefCell<Vec<Watched>> = const { RefCell::new(Vec::new()) };
    }

    /// Runs `body` with some steps weakened to `Relaxed`; a weakened fence is left out.
    pub fn weaken<T>(steps: &'static [Step], body: impl FnOnce() -> T) -> T {
        struct Restore;
        impl Drop for Restore {
            fn drop(&mut self) {
                WEAKENED.set(&[]);
            }
        }
        WEAKENED.set(steps);
        let _restore = Restore;
        body()
    }

    pub fn order(step: Step, ordering: Ordering) -> Ordering {
        if WEAKENED.get().contains(&step) { Ordering::Relaxed } else { ordering }
    }

    pub fn fence(ordering: Ordering) {
        if ordering != Ordering::Relaxed {
            loom::sync::atomic::fence(ordering);
        }
    }

    #[derive(Debug)]
    pub struct Words<const N: usize>(UnsafeCell<[u64; N]>);

    // SAFETY: loom runs one thread at a time, and reports accesses that the protocol does not order.
    unsafe impl<const N: usize> Sync for Words<N> {}

    impl<const N: usize> Words<N> {
        pub fn new() -> Self {
            Words(UnsafeCell::new([0; N]))
        }

        pub fn store(&self, words: [u64; N]) {
            // SAFETY: as for `Sync`.
            self.0.with_mut(|cell| unsafe { *cell = words });
        }

        pub fn load(&self) -> [u64; N] {
            // SAFETY: as for `Sync`.
            self.0.with(|cell| unsafe { *cell })
        }
    }

    /// Memory that is accessed through pointers, and the cell which stands for it.
    #[derive(Clone)]
    struct Watched(Range<usize>, Rc<UnsafeCell<()>>);

    /// Reports each access ([touches]) to these bytes to loom from now on. An access to some of them counts as one to
    /// all.
    pub fn watch(at: *const u8, bytes: usize) {
        let range = at as usize..at as usize + bytes;
        WATCHED.with_borrow_mut(|all| all.push(Watched(range, Rc::new(UnsafeCell::new(())))));
    }

    /// Stops watching all memory. Called at the beginning of every execution.
    pub fn forget() {
        WATCHED.take();
    }

    /// Reports to loom that `bytes` bytes are written (or read).
    pub fn touches(at: *const u8, bytes: usize, writing: bool) {
        let (start, end) = (at as usize, at as usize + bytes);
        let touched = |w: &&Watched| w.0.start < end && start < w.0.end;
        let touched: Vec<Watched> = WATCHED.with_borrow(|all| all.iter().filter(touched).cloned().collect());
        for Watched(_, cell) in touched {
            if writing { cell.with_mut(drop) } else { cell.with(drop) }
        }
    }

    /// # Safety
    /// As `std::ptr::copy_nonoverlapping`.
    pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        touches(from, bytes, false);
        touches(to, bytes, true);
        // SAFETY: by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }

    /// A word, and the threads that sleep on it.
    #[derive(Debug)]
    pub struct Futex {
        word: AtomicU32,
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Default for Futex {
        fn default() -> Self {
            Futex { word: AtomicU32::new(0), queue: Mutex::new(()), woken: Condvar::new() }
        }
    }

    impl Futex {
        pub fn word(&self) -> &AtomicU32 {
            &self.word
        }

        /// Sleeps until woken. loom reports a model in which every thread sleeps.
        pub fn wait(&self, value: u32, _slice: Duration) {
            let Ok(queue) = self.queue.lock() else { return };
            if self.word.load(Ordering::Relaxed) == value {
                drop(self.woken.wait(queue));
            }
        }

        pub fn wake(&self) {
            let Ok(_queue) = self.queue.lock() else { return };
            self.woken.notify_one();
        }
    }

    /// A doorbell that can be waited for within a model.
    #[derive(Debug)]
    pub struct Bell {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Bell {
        pub fn new() -> Self {
            Bell { rung: Mutex::new(false), changed: Condvar::new() }
        }

        pub fn ring(&self) {
            if let Ok(mut rung) = self.rung.lock() {
                *rung = true;
                self.changed.notify_all();
            }
        }

        pub fn drain(&self) {
            if let Ok(mut rung) = self.rung.lock() {
                *rung = false;
            }
        }

        /// Sleeps until it has been rung. loom reports a model in which every thread sleeps.
        pub fn wait(&self) {
            let Ok(mut rung) = self.rung.lock() else { return };
            while !*rung {
                let Ok(woken) = self.changed.wait(rung) else { return };
                rung = woken;
            }
        }
    }
}
