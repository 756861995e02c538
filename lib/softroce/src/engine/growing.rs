//! A list that grows while others read it, without a lock on their side.

use std::sync::OnceLock;

/// A list with room for a number of entries, which are never taken out.
#[derive(Debug)]
pub(super) struct Growing<T>(Box<[OnceLock<T>]>);

impl<T> Growing<T> {
    pub(super) fn new(room: usize) -> Growing<T> {
        Growing((0..room).map(|_| OnceLock::new()).collect())
    }

    /// Adds an entry behind the others; returns its index, or the entry where the list is full.
    pub(super) fn push(&self, mut entry: T) -> Result<usize, T> {
        for (i, place) in self.0.iter().enumerate() {
            match place.set(entry) {
                Ok(()) => return Ok(i),
                Err(refused) => entry = refused,
            }
        }
        Err(entry)
    }

    pub(super) fn get(&self, index: usize) -> Option<&T> {
        self.0.get(index)?.get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map_while(OnceLock::get)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_keep_their_order() {
        let list = Growing::new(2);
        assert_eq!(list.iter().count(), 0);
        assert_eq!((list.push('a'), list.push('b'), list.push('c')), (Ok(0), Ok(1), Err('c')));
        assert_eq!(list.iter().collect::<String>(), "ab");
        assert_eq!((list.get(1), list.get(2)), (Some(&'b'), None));
    }
}
