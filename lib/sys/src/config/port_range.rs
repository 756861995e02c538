//! A range of TCP ports.

use std::fmt;
use std::ops::RangeInclusive;

/// TCP ports, from the first to the last, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    low: u16,
    high: u16,
}

impl PortRange {
    /// The ports of `low` to `high`, both included; `None` when there are none, or 0 is one of them.
    pub fn new(low: u16, high: u16) -> Option<PortRange> {
        (low > 0 && low <= high).then_some(PortRange { low, high })
    }

    /// All of them.
    pub fn ports(self) -> RangeInclusive<u16> {
        self.low..=self.high
    }

    pub(super) fn parse(text: &str) -> Result<PortRange, String> {
        let ends =
            text.split_once('-').and_then(|(low, high)| Some((low.trim().parse().ok()?, high.trim().parse().ok()?)));
        ends.and_then(|(low, high)| PortRange::new(low, high))
            .ok_or_else(|| "expected a range of ports, like 29600-29631, from 1 to 65535".to_owned())
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.low, self.high)
    }
}
