//! Packet sequence numbers: 24-bit serial arithmetic (InfiniBand specification, volume 1, 9.7.2).

use std::fmt;

const BITS: u32 = 24;
const MASK: u32 = (1 << BITS) - 1;

/// A packet sequence number. It wraps at 2^24, so two of them compare by their distance: see [`Psn::since`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Psn {
        Psn(value & MASK)
    }

    /// As a number below 2^24.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Psn {
        Psn(self.0.wrapping_add(n) & MASK)
    }

    /// The number one packet earlier.
    #[must_use]
    pub const fn previous(self) -> Psn {
        Psn(self.0.wrapping_sub(1) & MASK)
    }

    /// Distance from `earlier` to this one: negative where this one comes before it. Half the space, 2^23 numbers,
    /// counts as behind.
    #[must_use]
    pub const fn since(self, earlier: Psn) -> i32 {
        // The difference moves to the top of the word and back, which extends its sign.
        (self.0.wrapping_sub(earlier.0) << (32 - BITS)) as i32 >> (32 - BITS)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn distance_undoes_addition(start: u32, n in 0u32..1 << 23) {
            let start = Psn::new(start);
            prop_assert_eq!(start.plus(n).since(start), n as i32);
            prop_assert_eq!(start.since(start.plus(n)), -(n as i32));
            prop_assert_eq!(start.plus(n + 1).previous(), start.plus(n));
        }
    }

    #[test]
    fn wraps_at_24_bits() {
        assert_eq!(Psn::new(0xff_ffff).plus(1), Psn::new(0));
        assert_eq!(Psn::new(1).since(Psn::new(0xff_ffff)), 2);
        assert_eq!(Psn::new(0).previous().get(), 0xff_ffff);
    }
}
