//! What the links in shared memory are made of: the processor's atomics, or those of the model checker [loom] under
//! `--cfg loom`. The ring's code is the same in both, so the orderings that are checked are the orderings that run.
//!
//! # What the model stands for
//! - **Fences.** loom knows no `membarrier(2)`, so [`compiler_fence`] is a full fence there, and both kinds of
//!   [`Fence`](super::fence::Fence) are the same. That is sound for what the fence is for. `membarrier` makes every other
//!   core execute a full fence at *some* point between its call and its return. On the core of the side that runs often
//!   (`store A; compiler_fence; load B`), that point is before `load B` or after `store A`, or both. Before `load B`: the
//!   load sees what the sleeper stored before the call. After `store A`: the sleeper sees A after the call. That is the
//!   disjunction which two full fences give, and no more is used. A full fence per message could hide a missing
//!   acquire or release elsewhere; so the models that do not sleep run without any fence ([`Step::LightFence`] left out).
//! - **Payloads** are [`Words`] and areas: plain memory, in which loom reports an unordered read and write as an error.
//! - **The doorbell** (an eventfd) is a flag under a lock: the kernel writes, reads and polls its counter under a lock, too.

pub(super) use imp::{AtomicU32, AtomicU64, Words, compiler_fence, fence, order};

#[cfg(loom)]
#[cfg_attr(not(test), allow(unused_imports))]
pub(super) use imp::{Area, Bell, weaken};

/// The steps of the protocol whose ordering matters. The model weakens them one at a time and must notice each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The sender stores a line's sequence number.
    Publish,
    /// The receiver sees it.
    SeePublished,
    /// The receiver stores what it has freed.
    Free,
    /// The sender sees it.
    SeeFreed,
    /// An end says that it is gone.
    Close,
    /// The other sees it.
    SeeClosed,
    /// Changes of the bit that asks to be woken.
    Wake,
    /// Between a message (or freed line) and the look at the peer's state.
    LightFence,
    /// Between asking to be woken and the look for a message (or credit).
    HeavyFence,
}

#[cfg(not(loom))]
mod imp {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, compiler_fence, fence};

    use std::sync::atomic::Ordering;

    use super::Step;

    /// The ordering of a step.
    #[inline(always)]
    pub(crate) const fn order(_step: Step, ordering: Ordering) -> Ordering {
        ordering
    }

    /// Words of a message. They are ordered by other words; atomics because a misbehaving peer may write them at any time.
    #[repr(transparent)]
    #[derive(Debug)]
    pub(crate) struct Words<const N: usize>([AtomicU64; N]);

    impl<const N: usize> Words<N> {
        #[inline(always)]
        pub(crate) fn store(&self, words: [u64; N]) {
            for (to, word) in self.0.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
        }

        #[inline(always)]
        pub(crate) fn load(&self) -> [u64; N] {
            let mut words = [0; N];
            for (word, from) in words.iter_mut().zip(&self.0) {
                *word = from.load(Ordering::Relaxed);
            }
            words
        }
    }
}

#[cfg(loom)]
#[cfg_attr(not(test), allow(dead_code))] // only the models use all of it
mod imp {
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};

    use std::cell::Cell;
    use std::sync::atomic::Ordering;

    use loom::cell::UnsafeCell;
    use loom::sync::{Condvar, Mutex};

    use super::Step;

    thread_local! {
        // loom runs all threads of a model as coroutines on the thread of its caller.
        static WEAKENED: Cell<&'static [Step]> = const { Cell::new(&[]) };
    }

    /// Runs `body` with some steps weakened to `Relaxed`; of a fence, that it is left out.
    pub(crate) fn weaken<T>(steps: &'static [Step], body: impl FnOnce() -> T) -> T {
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

    pub(crate) fn order(step: Step, ordering: Ordering) -> Ordering {
        if WEAKENED.get().contains(&step) { Ordering::Relaxed } else { ordering }
    }

    pub(crate) fn fence(ordering: Ordering) {
        if ordering != Ordering::Relaxed {
            loom::sync::atomic::fence(ordering);
        }
    }

    pub(crate) fn compiler_fence(ordering: Ordering) {
        fence(ordering);
    }

    #[derive(Debug)]
    pub(crate) struct Words<const N: usize>(UnsafeCell<[u64; N]>);

    // SAFETY: loom runs one thread at a time, and reports accesses that the protocol does not order.
    unsafe impl<const N: usize> Sync for Words<N> {}

    impl<const N: usize> Words<N> {
        pub(crate) fn new() -> Self {
            Words(UnsafeCell::new([0; N]))
        }

        pub(crate) fn store(&self, words: [u64; N]) {
            // SAFETY: as for `Sync`.
            self.0.with_mut(|cell| unsafe { *cell = words });
        }

        pub(crate) fn load(&self) -> [u64; N] {
            // SAFETY: as for `Sync`.
            self.0.with(|cell| unsafe { *cell })
        }
    }

    /// Stands for the bytes of a payload area, which are accessed through pointers.
    #[derive(Debug)]
    pub(crate) struct Area(UnsafeCell<()>);

    // SAFETY: as for `Words`.
    unsafe impl Sync for Area {}

    impl Area {
        pub(crate) fn new() -> Self {
            Area(UnsafeCell::new(()))
        }

        pub(crate) fn write(&self) {
            self.0.with_mut(drop);
        }

        pub(crate) fn read(&self) {
            self.0.with(drop);
        }
    }

    /// A doorbell that can be waited for within a model.
    #[derive(Debug)]
    pub(crate) struct Bell {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Bell {
        pub(crate) fn new() -> Self {
            Bell { rung: Mutex::new(false), changed: Condvar::new() }
        }

        pub(crate) fn ring(&self) {
            if let Ok(mut rung) = self.rung.lock() {
                *rung = true;
                self.changed.notify_all();
            }
        }

        pub(crate) fn drain(&self) {
            if let Ok(mut rung) = self.rung.lock() {
                *rung = false;
            }
        }

        /// Sleeps until it has been rung. loom reports a model in which every thread sleeps.
        pub(crate) fn wait(&self) {
            let Ok(mut rung) = self.rung.lock() else { return };
            while !*rung {
                let Ok(woken) = self.changed.wait(rung) else { return };
                rung = woken;
            }
        }
    }
}
