//! `TINYNCCL_VERIFY`: sums of data from the buffer that it comes from to the buffer where it ends.
//!
//! A call is chosen by its number, so that all ranks choose the same ones ([`Chosen`]). In a chosen call
//!
//! - a rank keeps the sum of each block of memory that it writes, or that was its input, and compares the memory with
//!   it whenever it reads the block again, and at the end of the call (`ledger`): memory that changed is *its own*;
//! - a sender's sums follow its last message of the call over each link, and the receiver compares them with the sums
//!   of what it read, or of what lies in the buffer after the last copy ([`Audit`]): what differs changed *on the
//!   link*. Sums of data that a rank passes on are those that it received, so no hop can launder a wrong bit;
//! - all ranks compare the sums of their results, and of what others got from their inputs ([`Account`]): what differs
//!   although all sums before were right was computed wrong, and *the rank without a majority* computed it.
//!
//! Sums are XXH3 (64 bits) of blocks of 64 KiB, so that an error tells where. The sums cost no message that a call
//! would wait for, but those at the end.
//!
//! | file | idea |
//! | --- | --- |
//! | `sums` | sums of blocks, at once or as the bytes come |
//! | `ledger` | sums of memory when it was written |
//! | `audit` | sums per link, and their exchange |
//! | `account` | comparison of results |

mod account;
mod audit;
mod ledger;
mod sums;

pub use account::{Account, Finding, Segment};
pub(crate) use audit::{Audit, Heard};
pub(crate) use sums::{BLOCK, sum};

use tinynccl_plan::wire::{Algorithm, Collective, Header};
use tinynccl_sys::config::{Config, Verify};

/// The calls whose data is verified: all, or one of `every` on average. Numbers are spread as evenly as possible
/// (Knuth, The Art of Computer Programming, volume 3, 6.4: multiplicative hashing), so that a loop of calls does not
/// always meet the same of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    every: u32,
}

impl Chosen {
    #[cfg(test)]
    pub(crate) const ALL: Chosen = Chosen { every: 1 };

    /// `None`: no calls.
    pub fn of(config: &Config) -> Option<Chosen> {
        match config.verify {
            Verify::Off => None,
            Verify::Sample => Some(Chosen { every: u32::try_from(config.verify_every).unwrap_or(u32::MAX) }),
            Verify::All => Some(Chosen { every: 1 }),
        }
    }

    /// True if the call with this number is verified. The first one is.
    #[inline]
    pub fn has(self, seq: u32) -> bool {
        let spread = u64::from(seq.wrapping_sub(1).wrapping_mul(0x9e37_79b1));
        spread * u64::from(self.every) < 1 << 32
    }
}

/// A call in an error: `all_reduce #4 of comm 1 (ring)`.
pub(crate) fn op(header: &Header) -> String {
    let name = Collective::from_code(header.collective).map_or("call", Collective::name);
    let algorithm = match Algorithm::from_code(header.algorithm) {
        Some(algorithm) if header.collective != Collective::SendRecv as u8 => format!(" ({algorithm})"),
        _ => String::new(),
    };
    format!("{name} #{} of comm {}{algorithm}", header.seq, header.comm)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_every_so_many_calls_is_chosen_whatever_the_period_of_the_program() {
        for every in [1, 2, 16, 64, 1000] {
            let chosen = Chosen { every };
            assert!(chosen.has(1));
            // Each call of a loop of 64 has its turn.
            for period in [1, 3, 64, 100] {
                for first in 0..period {
                    let calls = 20 * every;
                    let hits = (0..calls).filter(|i| chosen.has(i * period + first)).count();
                    assert!((10..=30).contains(&hits), "1 of {every}, call {first} of {period}: {hits} in {calls}");
                }
            }
        }
    }

    #[test]
    fn the_setting_says_which() {
        let of = |verify| Chosen::of(&Config::default().with(|c| (c.verify, c.verify_every) = (verify, 7)));
        assert_eq!((of(Verify::Off), of(Verify::Sample)), (None, Some(Chosen { every: 7 })));
        assert_eq!(of(Verify::All), Some(Chosen { every: 1 }));
    }
}
