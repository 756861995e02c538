//! Callers' memory that a device may send from, or write to, by address.
//!
//! The table is looked up by address, which is what a cache of registrations does wrong: freed memory leaves its entry
//! behind, and other memory that gets the same address is taken for it. Here an entry's life is that of a
//! [`Registered`](super::registered::Registered), which the owner of the memory holds and drops before it frees the
//! memory. So at any time an address in the table is that of memory which is allocated, with the pages that the device
//! knows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

/// A stretch of a caller's memory that one device knows.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    /// For our own device, and for the peer.
    pub(crate) keys: (u32, u32),
}

/// Memory registered now.
#[derive(Debug, Default)]
pub(crate) struct Table {
    entries: RwLock<Vec<Entry>>,
    /// True while anything is registered: only then does a lookup lock.
    any: AtomicBool,
}

impl Table {
    /// The key to send `data` from where it is; `None` unless all of it lies in one registered stretch.
    #[inline]
    pub(crate) fn lkey(&self, data: &[u8]) -> Option<u32> {
        self.keys(data.as_ptr(), data.len()).map(|(lkey, _)| lkey)
    }

    /// As [`Table::lkey`], with the key for the peer: the pair of the stretch that was registered last.
    #[inline]
    pub(crate) fn keys(&self, data: *const u8, len: usize) -> Option<(u32, u32)> {
        // A caller registers before it calls, in an order that both calls' locks make known to this thread.
        if !self.any.load(Ordering::Relaxed) {
            return None;
        }
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let start = data.addr();
        let holds =
            |e: &&Entry| start.checked_sub(e.start).is_some_and(|skip| skip <= e.bytes && len <= e.bytes - skip);
        entries.iter().rev().find(holds).map(|e| e.keys)
    }

    pub(crate) fn add(&self, entry: Entry) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.push(entry);
        self.any.store(true, Ordering::Relaxed);
    }

    /// Takes out the entry with this key for our own device.
    pub(crate) fn remove(&self, lkey: u32) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.retain(|e| e.keys.0 != lkey);
        self.any.store(!entries.is_empty(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_found_only_while_it_is_registered_and_only_whole() {
        let memory = [0u8; 100];
        let table = Table::default();
        assert_eq!(table.lkey(&memory), None);
        let start = memory.as_ptr().addr();
        table.add(Entry { start: start + 10, bytes: 50, keys: (7, 17) });
        table.add(Entry { start: start + 60, bytes: 20, keys: (8, 18) });
        for (range, expected) in [
            (10..60, Some(7)),
            (10..11, Some(7)),
            (59..60, Some(7)),
            (60..80, Some(8)),
            (9..12, None),
            (55..65, None),
            (79..81, None),
            (0..100, None),
        ] {
            assert_eq!(memory.get(range.clone()).map(|data| table.lkey(data)), Some(expected), "{range:?}");
        }
        assert_eq!(table.keys(memory[60..].as_ptr(), 20), Some((8, 18)));
        table.remove(7);
        assert_eq!((table.lkey(&memory[10..60]), table.lkey(&memory[60..80])), (None, Some(8)));
        table.remove(8);
        assert_eq!(table.lkey(&memory[60..80]), None);
    }
}
