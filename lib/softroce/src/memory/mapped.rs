//! Whether the processor can access memory that is about to be registered. A kernel's card pins its pages and fails
//! with `EFAULT` otherwise; this one would find out when it copies, and take the program down.
//!
//! A GPU's memory is the common case: it has addresses in the process, and the processor may not use them.

use std::fs::File;
use std::io::{BufRead, BufReader};

/// Whether all of `at..at + len` is mapped for reading, and with `writes` for writing. `true` where the system does not
/// say.
pub(crate) fn is_accessible(at: usize, len: usize, writes: bool) -> bool {
    let Ok(maps) = File::open("/proc/self/maps") else { return true };
    covers(BufReader::new(maps), at, at.saturating_add(len), writes)
}

/// The same by lines of mappings in the order of their addresses: `7f00-7f80 rw-p ...`.
fn covers(maps: impl BufRead, mut from: usize, until: usize, writes: bool) -> bool {
    for line in maps.lines().map_while(Result::ok) {
        if from >= until {
            break;
        }
        let Some((range, rest)) = line.split_once(' ') else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)) else { continue };
        if end <= from {
            continue;
        }
        let allowed = rest.starts_with("rw") || rest.starts_with('r') && !writes;
        if start > from || !allowed {
            return false;
        }
        from = end;
    }
    from >= until
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str =
        "1000-3000 rw-p 00000000 00:00 0\n3000-4000 r--p 00000000 00:00 0 [x]\n5000-6000 ---p 0 00:00 0\n";

    #[test]
    fn a_range_is_covered_by_mappings_without_a_gap() {
        let covers = |from, until, writes| covers(MAPS.as_bytes(), from, until, writes);
        assert!(covers(0x1000, 0x3000, true) && covers(0x1800, 0x4000, false) && covers(0x2000, 0x2000, true));
        assert!(!covers(0x2fff, 0x3001, true), "the second may only be read");
        assert!(!covers(0x3000, 0x4001, false), "a gap");
        assert!(!covers(0x800, 0x1001, false) && !covers(0x6000, 0x6001, false), "not mapped");
        assert!(!covers(0x5000, 0x5001, false), "no access");
    }

    #[test]
    fn our_own_memory_is_accessible_and_reserved_addresses_are_not() {
        let bytes = vec![0u8; 3 << 20];
        assert!(is_accessible(bytes.as_ptr() as usize, bytes.len(), true));
        assert!(!is_accessible(1, 1, false));
    }
}
