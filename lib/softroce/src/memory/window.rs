//! Memory windows: parts of regions under separate keys, bound and invalidated by work requests (InfiniBand
//! specification, 10.6.7.2).
//!
//! Work requests bind and invalidate while other threads read the table, so each window has a separate lock. A peer's
//! access holds it for as long as it touches the bytes: when a request that invalidates has completed, no thread is at
//! work with the old key.

use std::sync::RwLock;

use super::{Access, Piece, Refusal, Table};
use crate::error::{Error, Result};
use crate::sync::{read, write};

/// Type of a memory window: its users, and the end of its key; with the numbers of `ibv_mw_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowKind {
    /// Type 1: any queue pair of the domain may use it; bound again, also to nothing, it gets another key.
    Any = 1,
    /// Type 2B: it belongs to the queue pair that binds it, and is invalidated before it is bound again.
    OneQp = 2,
}

/// Binding of a window to bytes of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The window's new key: the old one with another low byte.
    pub rkey: u32,
    /// Local key of the region.
    pub lkey: u32,
    /// Address of the first byte in the region.
    pub addr: u64,
    /// Bytes. None unbinds a window of [`WindowKind::Any`].
    pub len: u64,
    /// Rights of peers; with [`Access::ZERO_BASED`] their addresses begin at 0.
    pub access: Access,
}

/// The queue pair that accesses memory, with its domain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    pub(crate) pd: u32,
    pub(crate) qpn: u32,
}

#[derive(Debug)]
pub(super) struct Window {
    pd: u32,
    kind: WindowKind,
    state: RwLock<State>,
}

#[derive(Debug)]
struct State {
    key: u32,
    bound: Option<Bound>,
}

#[derive(Debug)]
struct Bound {
    to: Bind,
    /// The one queue pair that may use it; `None` for any of the domain.
    qpn: Option<u32>,
}

/// Keys of windows have the top bit set; 23 bits are left for the window.
const WINDOW: u32 = 1 << 31;
/// Windows of an RDMA device.
pub(crate) const MAX_WINDOWS: usize = 1 << 23;

pub(super) fn is_window(key: u32) -> bool {
    key & WINDOW != 0
}

fn index(key: u32) -> usize {
    ((key & !WINDOW) >> 8) as usize
}

impl Table {
    /// Adds a window that is bound to nothing; returns its key.
    pub(crate) fn add_window(&mut self, pd: u32, kind: WindowKind) -> Result<u32> {
        let at = self.free_windows.pop().unwrap_or(self.windows.len());
        if at >= MAX_WINDOWS {
            return Err(Error::full("a card has 2^23 memory windows at most"));
        }
        self.window_tag = self.window_tag.wrapping_add(37);
        let key = WINDOW | (at as u32) << 8 | u32::from(self.window_tag);
        let window = Some(Window { pd, kind, state: RwLock::new(State { key, bound: None }) });
        match self.windows.get_mut(at) {
            Some(place) => *place = window,
            None => self.windows.push(window),
        }
        Ok(key)
    }

    /// Takes a window out. No thread uses it, as the caller has the lock of the table for writing.
    pub(crate) fn remove_window(&mut self, key: u32) {
        let at = index(key);
        if self.windows.get_mut(at).and_then(Option::take).is_some() {
            self.free_windows.push(at);
        }
    }

    /// Returns true while a window is bound to the region.
    pub(crate) fn has_windows(&self, lkey: u32) -> bool {
        self.windows.iter().flatten().any(|w| read(&w.state).bound.as_ref().is_some_and(|b| b.to.lkey == lkey))
    }

    /// Ends bindings to a region that goes.
    pub(super) fn forget_region(&self, lkey: u32) {
        self.unbind(|bound| bound.to.lkey == lkey);
    }

    /// Ends bindings that a queue pair alone may use, which goes.
    pub(crate) fn forget_qp(&self, qpn: u32) {
        self.unbind(|bound| bound.qpn == Some(qpn));
    }

    fn unbind(&self, which: impl Fn(&Bound) -> bool) {
        for window in self.windows.iter().flatten() {
            let mut state = write(&window.state);
            if state.bound.as_ref().is_some_and(&which) {
                state.bound = None;
            }
        }
    }

    fn window(&self, key: u32) -> Result<&Window, Refusal> {
        self.windows.get(index(key)).and_then(Option::as_ref).ok_or(Refusal::Key(key))
    }

    /// Binds a window, as a request of queue pair `by` asks.
    pub(crate) fn bind(&self, by: Asker, to: Bind) -> Result<(), Refusal> {
        if !is_window(to.rkey) {
            return Err(Refusal::Key(to.rkey));
        }
        let window = self.window(to.rkey)?;
        let mut state = write(&window.state);
        // C10-72.
        if window.pd != by.pd {
            return Err(Refusal::Domain);
        }
        let qpn = match window.kind {
            // o10-36.2.2.
            WindowKind::Any if to.access.contains(Access::ZERO_BASED) => return Err(Refusal::Rights),
            WindowKind::Any if to.len == 0 => {
                *state = State { key: to.rkey, bound: None };
                return Ok(());
            }
            WindowKind::Any => None,
            // o10-37.2.30.
            WindowKind::OneQp if state.bound.is_some() => return Err(Refusal::Bound),
            // o10-37.2.40.
            WindowKind::OneQp if to.len == 0 => return Err(Refusal::Bounds),
            WindowKind::OneQp => Some(by.qpn),
        };
        // C10-73, C10-74: a window gives separate rights, as far as its region lets it.
        let writes = Access::REMOTE_WRITE.bits() | Access::REMOTE_ATOMIC.bits();
        let needs =
            if to.access.bits() & writes == 0 { Access::MW_BIND } else { Access::MW_BIND | Access::LOCAL_WRITE };
        let len = usize::try_from(to.len).map_err(|_| Refusal::Bounds)?;
        // C10-75.
        let region = self.region(to.lkey, by.pd, to.addr, len, needs)?.0;
        if region.access.contains(Access::ZERO_BASED) {
            return Err(Refusal::Rights);
        }
        *state = State { key: to.rkey, bound: Some(Bound { to, qpn }) };
        Ok(())
    }

    /// Ends the binding of a window of one queue pair (o10-37.2.26: of no other).
    pub(super) fn invalidate_window(&self, key: u32, by: Asker) -> Result<(), Refusal> {
        let mut state = write(&self.window(key)?.state);
        match &state.bound {
            Some(bound) if state.key == key && bound.qpn == Some(by.qpn) => {
                state.bound = None;
                Ok(())
            }
            _ => Err(Refusal::Key(key)),
        }
    }

    /// Works with bytes of a window, whose binding stays meanwhile.
    pub(super) fn through_window<R>(
        &self,
        key: u32,
        by: Asker,
        va: u64,
        len: usize,
        access: Access,
        f: impl FnOnce(Piece) -> R,
    ) -> Result<R, Refusal> {
        let window = self.window(key)?;
        let state = read(&window.state);
        let Some(Bound { to, qpn }) = state.bound.as_ref().filter(|_| state.key == key) else {
            return Err(Refusal::Key(key));
        };
        if window.pd != by.pd || qpn.is_some_and(|qpn| qpn != by.qpn) {
            return Err(Refusal::Domain);
        }
        if !to.access.contains(access) {
            return Err(Refusal::Rights);
        }
        let base = if to.access.contains(Access::ZERO_BASED) { 0 } else { to.addr };
        let offset = va.checked_sub(base).ok_or(Refusal::Bounds)?;
        if offset.checked_add(len as u64).is_none_or(|end| end > to.len) {
            return Err(Refusal::Bounds);
        }
        // The region's own rights for peers do not matter.
        let at = to.addr.checked_add(offset).ok_or(Refusal::Bounds)?;
        Ok(f(self.region(to.lkey, by.pd, at, len, Access::default())?.1))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::super::{Backing, Region, copy_in};
    use super::*;

    const BY: Asker = Asker { pd: 1, qpn: 7 };
    const ALL: Access = Access::from_bits(0x1f);
    const WRITE: Access = Access::REMOTE_WRITE;

    fn table(bytes: &mut [u8], access: Access) -> (Table, u32) {
        let mut table = Table::default();
        let region =
            Region { pd: 1, at: bytes.as_mut_ptr(), len: bytes.len(), iova: 1000, access, backing: Backing::Host };
        let key = table.insert(region).expect("room");
        (table, key)
    }

    fn bind(rkey: u32, lkey: u32, addr: u64, len: u64) -> Bind {
        Bind { rkey, lkey, addr, len, access: WRITE }
    }

    /// Another key of the same window.
    fn next(key: u32) -> u32 {
        key & !0xff | (key + 1) & 0xff
    }

    fn check(table: &Table, key: u32, by: Asker, va: u64) -> Result<usize, Refusal> {
        table.remote(key, by, va, 1, WRITE, |piece| piece.len())
    }

    proptest! {
        /// No address and length give a byte outside what is bound; nor is more bound than there is.
        #[test]
        fn pieces_are_within_what_is_bound(
            from in 990u64..1025, bound in 0u64..30, va in 0u64..1030, len in 1usize..40, zero: bool, one_qp: bool
        ) {
            let mut bytes = [0u8; 20];
            let start = bytes.as_mut_ptr() as usize;
            let (mut table, lkey) = table(&mut bytes, ALL);
            let kind = if one_qp { WindowKind::OneQp } else { WindowKind::Any };
            let rkey = table.add_window(1, kind).expect("room");
            let access = if zero { WRITE | Access::ZERO_BASED } else { WRITE };
            let fits = bound > 0 && from >= 1000 && from + bound <= 1020 && (one_qp || !zero);
            let done = table.bind(BY, Bind { access, ..bind(rkey, lkey, from, bound) });
            prop_assert_eq!(done.is_ok(), fits || (bound == 0 && !one_qp && !zero));
            let base = if zero { 0 } else { from };
            match table.remote(rkey, BY, va, len, WRITE, |piece| (piece.addr() as usize, piece.len())) {
                Ok((at, n)) => {
                    prop_assert!(fits && n == len);
                    let (low, high) = ((from - 1000) as usize, (from - 1000 + bound) as usize);
                    prop_assert!(at >= start + low && at + n <= start + high);
                    prop_assert_eq!((at - start - low) as u64, va - base);
                }
                Err(_) => prop_assert!(!fits || va < base || va + len as u64 > base + bound),
            }
        }
    }

    #[test]
    fn a_window_of_type_1_is_bound_again_and_again() {
        let mut bytes = [0u8; 20];
        let (mut table, lkey) = table(&mut bytes, ALL);
        let first = table.add_window(1, WindowKind::Any).expect("room");
        assert_eq!(check(&table, first, BY, 1000), Err(Refusal::Key(first)), "bound to nothing");
        let (second, third) = (next(first), next(next(first)));
        assert_eq!(table.bind(BY, bind(second, lkey, 1000, 10)), Ok(()));
        assert_eq!(check(&table, first, BY, 1000), Err(Refusal::Key(first)), "an old key");
        assert_eq!(check(&table, second, Asker { qpn: 8, ..BY }, 1009), Ok(1), "any queue pair of the domain");
        assert_eq!(check(&table, second, Asker { pd: 2, ..BY }, 1009), Err(Refusal::Domain));
        assert_eq!(table.invalidate(second, BY), Err(Refusal::Key(second)), "type 2 alone");
        assert_eq!(table.bind(BY, bind(third, lkey, 1010, 10)), Ok(()));
        assert_eq!(check(&table, second, BY, 1010), Err(Refusal::Key(second)));
        assert_eq!((check(&table, third, BY, 1009), check(&table, third, BY, 1010)), (Err(Refusal::Bounds), Ok(1)));
        assert_eq!(table.bind(BY, bind(next(third), 0, 0, 0)), Ok(()), "to nothing");
        assert_eq!(check(&table, third, BY, 1010), Err(Refusal::Key(third)));
        assert!(!table.has_windows(lkey));
    }

    #[test]
    fn a_window_of_type_2_is_its_queue_pairs_until_it_is_invalidated() {
        let mut bytes = [0u8; 20];
        let (mut table, lkey) = table(&mut bytes, ALL);
        let key = table.add_window(1, WindowKind::OneQp).expect("room");
        let other = Asker { qpn: 8, ..BY };
        assert_eq!(table.bind(BY, bind(key, lkey, 1000, 10)), Ok(()));
        assert_eq!((check(&table, key, BY, 1000), check(&table, key, other, 1000)), (Ok(1), Err(Refusal::Domain)));
        assert_eq!(table.bind(BY, bind(next(key), lkey, 1000, 10)), Err(Refusal::Bound));
        assert_eq!(table.invalidate(key, other), Err(Refusal::Key(key)));
        assert!(table.has_windows(lkey));
        assert_eq!(table.invalidate(key, BY), Ok(()));
        assert_eq!(check(&table, key, BY, 1000), Err(Refusal::Key(key)));
        assert_eq!(table.invalidate(key, BY), Err(Refusal::Key(key)), "twice");
        let key = next(key);
        assert_eq!(table.bind(BY, bind(key, lkey, 1000, 10)), Ok(()));
        table.forget_qp(7);
        assert_eq!(check(&table, key, BY, 1000), Err(Refusal::Key(key)), "the queue pair is gone");
    }

    #[test]
    fn rights_and_domains_are_those_of_the_specification() {
        let mut bytes = [0u8; 20];
        let refusal = |region: Access, pd: u32, access: Access| {
            let (mut table, lkey) = table(&mut [0u8; 20], region);
            let key = table.add_window(pd, WindowKind::OneQp).expect("room");
            table.bind(BY, Bind { access, ..bind(key, lkey, 1000, 5) }).err()
        };
        let lets = Access::LOCAL_WRITE | Access::MW_BIND;
        assert_eq!(refusal(lets, 1, WRITE), None);
        assert_eq!(refusal(lets, 2, WRITE), Some(Refusal::Domain));
        assert_eq!(refusal(Access::LOCAL_WRITE, 1, WRITE), Some(Refusal::Rights), "the region is not to be bound to");
        assert_eq!(refusal(Access::MW_BIND, 1, WRITE), Some(Refusal::Rights), "writing to what is read alone");
        assert_eq!(refusal(Access::MW_BIND, 1, Access::REMOTE_ATOMIC), Some(Refusal::Rights));
        assert_eq!(refusal(Access::MW_BIND, 1, Access::REMOTE_READ), None);
        assert_eq!(refusal(lets | Access::ZERO_BASED, 1, WRITE), Some(Refusal::Rights));
        // A region that goes takes its windows' bindings with it, also where its slot is used again.
        let (mut table, lkey) = table(&mut bytes, ALL);
        let key = table.add_window(1, WindowKind::Any).expect("room");
        assert_eq!(table.bind(BY, bind(key, lkey, 1000, 20)), Ok(()));
        assert_eq!(table.remote(key, BY, 1000, 1, Access::REMOTE_READ, |_| ()), Err(Refusal::Rights));
        table.remove(lkey);
        assert_eq!(check(&table, key, BY, 1000), Err(Refusal::Key(key)));
        // A window that goes takes its key with it.
        table.remove_window(key);
        let again = table.add_window(1, WindowKind::Any).expect("room");
        assert!(again != key && again >> 8 == key >> 8);
    }

    /// No thread is at work with the old key once a request that takes a window back has completed, however it came in
    /// between.
    #[test]
    fn nobody_is_at_work_with_a_key_that_was_taken_back() {
        const ROUNDS: u32 = 300;
        let mut bytes = vec![0u8; 4096];
        let at = bytes.as_mut_ptr();
        let mut table = Table::default();
        let region = Region { pd: 1, at, len: 4096, iova: 0, access: ALL, backing: Backing::Host };
        let lkey = table.insert(region).expect("room");
        let mut key = table.add_window(1, WindowKind::Any).expect("room");
        let (table, shown, begun) = (&table, &AtomicU32::new(key), &AtomicU32::new(0));
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while shown.load(Ordering::Acquire) != 0 {
                    let write = |piece| {
                        begun.fetch_add(1, Ordering::Relaxed);
                        // SAFETY: the reference to the table is the lock; the window is bound for writing.
                        unsafe { copy_in(piece, &[7; 4096], true) }.expect("memory of the host");
                    };
                    let _ = table.remote(shown.load(Ordering::Acquire), BY, 0, 4096, WRITE, write);
                }
            });
            for _ in 0..ROUNDS {
                let before = begun.load(Ordering::Relaxed);
                key = next(key);
                table.bind(BY, bind(key, lkey, 0, 4096)).expect("it fits");
                shown.store(key, Ordering::Release);
                while begun.load(Ordering::Relaxed) == before && Instant::now() < deadline {
                    std::thread::yield_now();
                }
                let wrote = begun.load(Ordering::Relaxed) != before;
                key = next(key);
                table.bind(BY, bind(key, 0, 0, 0)).expect("to nothing");
                // SAFETY: no other thread is at the region's bytes, which is what this test is about.
                let zeros = unsafe {
                    std::ptr::write_bytes(at, 0, 4096);
                    std::thread::yield_now();
                    std::slice::from_raw_parts(at, 4096).iter().all(|byte| *byte == 0)
                };
                if !wrote || !zeros {
                    // Before anything panics: the other thread ends.
                    shown.store(0, Ordering::Release);
                    panic!("wrote while bound: {wrote}; nothing after: {zeros}");
                }
            }
            shown.store(0, Ordering::Release);
        });
    }
}
