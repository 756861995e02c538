//! The terms that both sides must agree on first, as one line on the side channel, and the wire they lead to.

use std::fmt;
use std::str::FromStr;

use verbs_kit::endpoint::field;

/// Wire to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum WireChoice {
    /// RDMA if both sides have a device, else TCP.
    Auto,
    /// Only RDMA.
    Verbs,
    /// TCP, even if there is RDMA.
    Tcp,
}

impl fmt::Display for WireChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WireChoice::Auto => "auto",
            WireChoice::Verbs => "verbs",
            WireChoice::Tcp => "tcp",
        })
    }
}

impl FromStr for WireChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<WireChoice, String> {
        clap::ValueEnum::from_str(text, false)
    }
}

/// One side's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the buffer.
    pub bytes: usize,
    /// Bytes of a chunk.
    pub chunk: usize,
    /// Number of times that the buffer is sent.
    pub rounds: u64,
    /// The requested wire.
    pub wire: WireChoice,
    /// True when there is a usable RDMA device.
    pub rdma: bool,
}

impl Terms {
    /// True when both sides use RDMA, false when they use TCP. The error describes conflicting terms.
    pub fn agree(&self, theirs: &Terms) -> Result<bool, String> {
        let size = |t: &Terms| (t.bytes, t.chunk, t.rounds);
        if size(self) != size(theirs) {
            return Err(format!(
                "the other side has --bytes {} --chunk {} --rounds {}, this one {} {} {}: give both the same",
                theirs.bytes, theirs.chunk, theirs.rounds, self.bytes, self.chunk, self.rounds
            ));
        }
        let asked = |wire| self.wire == wire || theirs.wire == wire;
        if asked(WireChoice::Verbs) && asked(WireChoice::Tcp) {
            return Err(format!("--wire {} here, --wire {} on the other side", self.wire, theirs.wire));
        }
        if asked(WireChoice::Verbs) && !(self.rdma && theirs.rdma) {
            let side = if self.rdma { "the other side" } else { "this side" };
            return Err(format!("--wire verbs was asked for, but {side} has no RDMA device"));
        }
        Ok(self.rdma && theirs.rdma && !asked(WireChoice::Tcp))
    }
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Terms { bytes, chunk, rounds, wire, rdma } = self;
        write!(f, "bytes={bytes} chunk={chunk} rounds={rounds} wire={wire} rdma={rdma}")
    }
}

impl FromStr for Terms {
    type Err = String;

    fn from_str(text: &str) -> Result<Terms, String> {
        let mut fields = text.split(' ');
        let terms = Terms {
            bytes: field(&mut fields, "bytes")?,
            chunk: field(&mut fields, "chunk")?,
            rounds: field(&mut fields, "rounds")?,
            wire: field(&mut fields, "wire")?,
            rdma: field(&mut fields, "rdma")?,
        };
        match fields.next() {
            Some(more) => Err(format!("unexpected '{more}' at the end")),
            None => Ok(terms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUTO: Terms = Terms { bytes: 100, chunk: 10, rounds: 2, wire: WireChoice::Auto, rdma: true };

    #[test]
    fn rdma_only_where_both_have_it_and_nobody_wants_tcp() {
        let tcp = Terms { wire: WireChoice::Tcp, ..AUTO };
        let verbs = Terms { wire: WireChoice::Verbs, ..AUTO };
        let none = Terms { rdma: false, ..AUTO };
        for (mine, theirs, expected) in [
            (AUTO, AUTO, Ok(true)),
            (AUTO, verbs, Ok(true)),
            (AUTO, tcp, Ok(false)),
            (AUTO, none, Ok(false)),
            (none, AUTO, Ok(false)),
            (verbs, tcp, Err("--wire verbs here, --wire tcp")),
            (verbs, none, Err("the other side has no RDMA device")),
            (none, verbs, Err("this side has no RDMA device")),
            (AUTO, Terms { chunk: 11, ..AUTO }, Err("give both the same")),
            (Terms { rounds: 3, ..AUTO }, AUTO, Err("give both the same")),
        ] {
            match (mine.agree(&theirs), expected) {
                (Ok(got), Ok(want)) => assert_eq!(got, want, "{mine} and {theirs}"),
                (Err(got), Err(want)) => assert!(got.contains(want), "{got}"),
                (got, want) => panic!("{mine} and {theirs}: {got:?}, expected {want:?}"),
            }
        }
    }

    #[test]
    fn text_of_another_protocol_is_refused() {
        let line = AUTO.to_string();
        assert_eq!(line.parse::<Terms>(), Ok(AUTO));
        for bad in ["", "GET / HTTP/1.1", "bytes=1", "bytes=1 chunk=1 rounds=1 wire=rope rdma=true", &(line + " x")] {
            assert!(bad.parse::<Terms>().is_err(), "{bad}");
        }
    }
}
