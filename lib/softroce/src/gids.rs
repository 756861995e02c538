//! The table of a port's addresses.

use std::net::IpAddr;
use std::sync::{Arc, RwLock};

use crate::sync::{read, write};

/// Entries at most: as many as an index of 8 bits tells apart.
const MOST: usize = 256;

/// Addresses by their index. An address keeps its index for as long as it is there; one that went leaves an empty
/// entry, which the next new one takes, as the kernel's tables do. Clones are the same table.
#[derive(Debug, Clone, Default)]
pub(crate) struct GidTable(Arc<RwLock<Vec<Option<IpAddr>>>>);

impl GidTable {
    pub(crate) fn new(addresses: impl IntoIterator<Item = IpAddr>) -> GidTable {
        GidTable(Arc::new(RwLock::new(addresses.into_iter().map(Some).take(MOST).collect())))
    }

    /// All entries now.
    pub(crate) fn entries(&self) -> Vec<Option<IpAddr>> {
        read(&self.0).clone()
    }

    /// Adds an address; `false` where it is there, or has no room.
    pub(crate) fn add(&self, ip: IpAddr) -> bool {
        let mut entries = write(&self.0);
        if entries.contains(&Some(ip)) {
            return false;
        }
        if let Some(empty) = entries.iter_mut().find(|entry| entry.is_none()) {
            *empty = Some(ip);
            return true;
        }
        let fits = entries.len() < MOST;
        if fits {
            entries.push(Some(ip));
        }
        fits
    }

    /// Takes an address out; `false` where it is not there.
    pub(crate) fn remove(&self, ip: IpAddr) -> bool {
        let mut entries = write(&self.0);
        let found = entries.iter_mut().find(|entry| **entry == Some(ip));
        found.is_some_and(|entry| entry.take().is_some())
    }
}

impl PartialEq for GidTable {
    fn eq(&self, other: &GidTable) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.entries() == other.entries()
    }
}

impl Eq for GidTable {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_keep_their_index() {
        let ip = |n: u8| IpAddr::from([192, 0, 2, n]);
        let table = GidTable::new([ip(1), ip(2), ip(3)]);
        let same = table.clone();
        assert!(table.remove(ip(2)) && !table.remove(ip(2)));
        assert_eq!(same.entries(), [Some(ip(1)), None, Some(ip(3))]);
        assert!(table.add(ip(4)) && !table.add(ip(4)) && table.add(ip(5)));
        assert_eq!(same.entries(), [Some(ip(1)), Some(ip(4)), Some(ip(3)), Some(ip(5))]);
        let full = GidTable::new((0..=255).map(ip));
        assert!(!full.add([198, 51, 100, 1].into()));
    }
}
