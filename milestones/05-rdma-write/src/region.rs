//! The location of registered memory for the peer: address, length and rkey, as one line of text.

use std::fmt;
use std::str::FromStr;

use verbs_kit::endpoint::field;

/// Memory of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte in the process that owns it.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// The key that its device requires.
    pub rkey: u32,
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "address={} len={} rkey={}", self.address, self.len, self.rkey)
    }
}

impl FromStr for Region {
    type Err = String;

    // EXERCISE 2 (How it works): parse address, length and key as `Display` prints them, and refuse a region that wraps
    // around the end of memory.
    fn from_str(text: &str) -> Result<Region, String> {
        let mut fields = text.split(' ');
        let region = Region {
            address: field(&mut fields, "address")?,
            len: field(&mut fields, "len")?,
            rkey: field(&mut fields, "rkey")?,
        };
        match fields.next() {
            Some(more) => Err(format!("unexpected '{more}' at the end")),
            None if region.address.checked_add(region.len).is_none() => Err("the region wraps around".to_owned()),
            None => Ok(region),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read() {
        let region = Region { address: 0x7f00_0000_1000, len: 8192, rkey: 0x1234 };
        assert_eq!(region.to_string().parse::<Region>(), Ok(region));
        for bad in ["", "address=1", "address=1 len=2 rkey=x", "address=1 len=2 rkey=3 more", "len=1 address=2 rkey=3"]
        {
            assert!(bad.parse::<Region>().is_err(), "{bad}");
        }
        assert!("address=18446744073709551615 len=2 rkey=3".parse::<Region>().is_err());
    }
}
