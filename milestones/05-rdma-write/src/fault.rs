//! Four requests that the peer's device must refuse.

use verbs_kit::endpoint::field;

use crate::region::Region;

/// The fault of a WRITE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The rkey is not the announced one.
    WrongKey,
    /// The last bytes are beyond the memory region.
    OutOfBounds,
    /// The memory region was registered without REMOTE_WRITE.
    RegionForbids,
    /// The peer's queue pair does not allow REMOTE_WRITE.
    QpForbids,
}

impl Fault {
    /// All faults, in the order of the run.
    pub const ALL: [Fault; 4] = [Fault::WrongKey, Fault::OutOfBounds, Fault::RegionForbids, Fault::QpForbids];

    /// One line for display.
    pub fn title(self) -> &'static str {
        match self {
            Fault::WrongKey => "WRITE with a wrong rkey",
            Fault::OutOfBounds => "WRITE beyond the end of the memory region",
            Fault::RegionForbids => "WRITE to a memory region without REMOTE_WRITE",
            Fault::QpForbids => "WRITE to a queue pair without REMOTE_WRITE",
        }
    }

    /// The destination of the faulty WRITE of `len` bytes. `open` allows writes; `closed` does not.
    // EXERCISE 1 (What goes wrong, and who learns it): the destination of each faulty WRITE. Exactly one thing is wrong
    // with each: the key, the bounds, the region, or (set elsewhere) the queue pair.
    pub fn aim(self, open: Region, closed: Region, len: u64) -> Region {
        match self {
            // The owner chooses the low byte of an rkey; the rest is an index into the device's table.
            Fault::WrongKey => Region { rkey: open.rkey ^ 0xff, ..open },
            Fault::OutOfBounds => Region { address: open.address + open.len - len / 2, ..open },
            Fault::RegionForbids => closed,
            Fault::QpForbids => open,
        }
    }
}

/// Parses a line that announces a region: `NAME REGION`.
pub fn announced(line: &str, name: &str) -> Result<Region, String> {
    let rest = line.strip_prefix(name).and_then(|r| r.strip_prefix(' '));
    rest.ok_or_else(|| format!("expected '{name} address=…', got '{line}'"))?.parse()
}

/// Parses a line that announces the size of each request.
pub fn size(line: &str) -> Result<usize, String> {
    field(&mut std::iter::once(line), "bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_is_one_and_only_one_thing_wrong() {
        let open = Region { address: 1 << 20, len: 8192, rkey: 0x1234 };
        let closed = Region { address: 2 << 20, len: 8192, rkey: 0x5678 };
        let inside = |r: Region, len: u64| r.address >= open.address && r.address + len <= open.address + open.len;
        let key = Fault::WrongKey.aim(open, closed, 8192);
        assert!(key.rkey != open.rkey && key.rkey != closed.rkey && inside(key, 8192));
        let beyond = Fault::OutOfBounds.aim(open, closed, 8192);
        assert!(beyond.rkey == open.rkey && !inside(beyond, 8192) && inside(beyond, 4096));
        assert_eq!(Fault::RegionForbids.aim(open, closed, 8192), closed);
        assert_eq!(Fault::QpForbids.aim(open, closed, 8192), open);
    }

    #[test]
    fn lines_of_the_side_channel() {
        let region = Region { address: 4096, len: 64, rkey: 7 };
        assert_eq!(announced(&format!("open {region}"), "open"), Ok(region));
        assert!(announced(&format!("closed {region}"), "open").is_err());
        assert!(announced("open", "open").is_err());
        assert_eq!(size("bytes=64"), Ok(64));
        assert!(size("64").is_err() && size("bytes=-1").is_err());
    }
}
