//! Records: a length, so many bytes of AES-256-GCM, and its tag. Here without any I/O.
//!
//! The nonce of a record is its number on the connection and in its direction, which is not sent: a record that was
//! changed, left out, repeated or moved does not open, nor does anything after it. The bytes of a stream are cut into
//! records as they are sent; no border means anything. An empty record ends the stream: without it the stream was cut.

use super::noise::Keys;
use super::primitives::{AesGcm, TAG};
use snow::types::Cipher;

/// Bytes of a record's length.
pub(super) const HEAD: usize = 2;
/// Bytes by which a record is longer than what it holds.
pub(crate) const RECORD: usize = HEAD + TAG;
/// Most bytes of the stream in one record: Noise allows 65,535 with the tag.
pub(super) const PAYLOAD: usize = u16::MAX as usize - TAG;
/// Largest record.
const LONGEST: usize = HEAD + PAYLOAD + TAG;
/// Records that are sent at once, and read ahead: they stay in the L2 cache between their encryption and the kernel's
/// copy.
const BATCH: usize = 4;
/// Records of one key: then comes the next one (`Rekey` of Noise). 2^32 blocks of AES at most, with which GCM's bound
/// on telling ciphertext from noise is below 2^-64.
const PER_KEY: u64 = 1 << 20;

/// A direction's cipher, and the number of the next record.
#[derive(Debug)]
struct Numbered {
    cipher: AesGcm,
    next: u64,
}

impl Numbered {
    fn new(cipher: AesGcm) -> Numbered {
        Numbered { cipher, next: 0 }
    }

    /// Takes a number; it never comes again. `None` when there are no more, after 2^64 - 1 records.
    fn take(&mut self) -> Option<u64> {
        // The last one belongs to `rekey`.
        let number = Some(self.next).filter(|next| *next < u64::MAX)?;
        if number > 0 && number.is_multiple_of(PER_KEY) {
            self.cipher.rekey();
        }
        self.next += 1;
        Some(number)
    }
}

/// Makes the records of a direction.
#[derive(Debug)]
pub(super) struct Sealer {
    numbered: Numbered,
    records: Vec<u8>,
    /// Bytes of the records that are sent.
    sent: usize,
}

/// Both directions of a connection with these keys.
pub(super) fn records(keys: Keys) -> (Sealer, Opener) {
    let sealer = Sealer { numbered: Numbered::new(keys.send), records: Vec::new(), sent: 0 };
    let opener = Opener {
        numbered: Numbered::new(keys.recv),
        // Touched as it is needed.
        buffer: vec![0; (BATCH + 1) * LONGEST].into_boxed_slice(),
        start: 0,
        end: 0,
        opened: 0..0,
        ended: false,
        forged: None,
    };
    (sealer, opener)
}

impl Sealer {
    /// Seals as much of the two parts as fits into one record, and returns how much. Nothing in both parts makes the
    /// record that ends the stream.
    ///
    /// # Errors
    /// There are no numbers left.
    pub(super) fn seal(&mut self, first: &[u8], second: &[u8]) -> Result<usize, &'static str> {
        let number = self.numbered.take().ok_or("it has sent 2^64 records: make a new connection")?;
        let first = first.get(..PAYLOAD).unwrap_or(first);
        let second = second.get(..PAYLOAD - first.len()).unwrap_or(second);
        let len = first.len() + second.len();
        if self.sent == self.records.len() {
            self.records.clear();
            self.sent = 0;
        }
        let at = self.records.len() + HEAD;
        self.records.extend_from_slice(&((len + TAG) as u16).to_le_bytes());
        self.records.extend_from_slice(first);
        self.records.extend_from_slice(second);
        let tag = self.numbered.cipher.seal(number, self.records.get_mut(at..).unwrap_or_default());
        self.records.extend_from_slice(&tag);
        Ok(len)
    }

    /// True while another record should go with the ones that are to be sent.
    pub(super) fn has_room(&self) -> bool {
        self.rest().len() <= (BATCH - 1) * LONGEST
    }

    /// The bytes of records that are to be sent.
    pub(super) fn rest(&self) -> &[u8] {
        self.records.get(self.sent..).unwrap_or_default()
    }

    /// `n` more of them are sent.
    pub(super) fn advance(&mut self, n: usize) {
        self.sent += n;
    }
}

/// Opens the records of a direction.
#[derive(Debug)]
pub(super) struct Opener {
    numbered: Numbered,
    buffer: Box<[u8]>,
    /// Bytes that have come of records that are not opened.
    start: usize,
    end: usize,
    /// Bytes in front of those that are opened and not handed out.
    opened: std::ops::Range<usize>,
    /// The record that ends the stream has come.
    ended: bool,
    /// One that did not open: nothing after it does.
    forged: Option<Forged>,
}

/// A stream that makes no sense any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forged {
    /// Number of the record, counted from 0.
    record: u64,
}

impl std::fmt::Display for Forged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let record = self.record;
        write!(
            f,
            "record {record} of the encrypted connection is not what its peer has sealed: bytes were changed, repeated, moved or left out \
             on the way (an attacker, or a broken device)"
        )
    }
}

impl Opener {
    /// Hands out up to `to.len()` bytes of what has come, 0 if no record is whole.
    ///
    /// # Errors
    /// A record that the peer has not made. What was before it has been handed out.
    pub(super) fn read(&mut self, to: &mut [u8]) -> Result<usize, Forged> {
        let mut got = 0;
        while let Some(rest) = to.get_mut(got..).filter(|rest| !rest.is_empty()) {
            if self.opened.is_empty() {
                match self.open(rest) {
                    Ok(None) => break,
                    Ok(Some(n)) => got += n,
                    // It comes again with the next call.
                    Err(_) if got > 0 => break,
                    Err(e) => return Err(e),
                }
            } else {
                let n = rest.len().min(self.opened.len());
                let from = self.buffer.get(self.opened.start..self.opened.start + n).unwrap_or_default();
                rest.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                self.opened.start += n;
                got += n;
            }
        }
        Ok(got)
    }

    /// Opens the next record: straight to `to` if it fits, else where it is. `None`: it is not whole.
    fn open(&mut self, to: &mut [u8]) -> Result<Option<usize>, Forged> {
        if let Some(forged) = self.forged {
            return Err(forged);
        }
        let forged = Forged { record: self.numbered.next };
        let here = self.buffer.get_mut(self.start..self.end).unwrap_or_default();
        let Some((head, rest)) = here.split_first_chunk_mut::<HEAD>() else { return Ok(None) };
        let len = usize::from(u16::from_le_bytes(*head));
        let payload = len.checked_sub(TAG).filter(|_| !self.ended).ok_or(forged)?;
        let Some((record, _)) = rest.split_at_mut_checked(len) else { return Ok(None) };
        let (bytes, tag) = record.split_at_mut(payload);
        let direct = to.get_mut(..payload);
        let handed = if direct.is_some() { payload } else { 0 };
        let target = match direct {
            Some(to) => {
                to.copy_from_slice(bytes);
                to
            }
            None => bytes,
        };
        let opens = self.numbered.take().is_some_and(|number| self.numbered.cipher.open(number, target, tag));
        if !opens {
            self.forged = Some(forged);
            return Err(forged);
        }
        self.ended = payload == 0;
        if handed == 0 {
            self.opened = self.start + HEAD..self.start + HEAD + payload;
        }
        self.start += HEAD + len;
        Ok(Some(handed))
    }

    /// Space for what comes next.
    pub(super) fn space(&mut self) -> &mut [u8] {
        if self.opened.is_empty() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            self.opened = 0..0;
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// `n` bytes were put into [`Opener::space`].
    pub(super) fn filled(&mut self, n: usize) {
        self.end = (self.end + n).min(self.buffer.len());
    }

    /// The peer has ended the stream, and all of it is handed out.
    pub(super) fn is_over(&self) -> bool {
        self.ended && self.opened.is_empty() && self.start == self.end
    }

    /// True if [`Opener::read`] would not return 0.
    pub(super) fn has_some(&self) -> bool {
        let here = self.buffer.get(self.start..self.end).unwrap_or_default();
        let whole = |(head, rest): (&[u8; HEAD], &[u8])| rest.len() >= usize::from(u16::from_le_bytes(*head));
        self.forged.is_some() || !self.opened.is_empty() || here.split_first_chunk().is_some_and(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::super::noise::{answer, begin};
    use super::*;
    use proptest::prelude::*;
    use tinynccl_sys::secret::Secret;

    /// One direction.
    fn direction() -> (Sealer, Opener) {
        let (opening, message) = begin(&Secret::new([1; 32]), b"hello").unwrap();
        let (theirs, reply) = answer(&Secret::new([1; 32]), b"hello", &message).unwrap();
        (records(opening.finish(&reply).unwrap()).0, records(theirs).1)
    }

    fn record(sealer: &mut Sealer, bytes: &[u8]) -> Vec<u8> {
        assert_eq!(sealer.seal(bytes, &[]), Ok(bytes.len()));
        let record = sealer.rest().to_vec();
        sealer.advance(record.len());
        record
    }

    /// Gives `wire` to the opener in pieces of `cut` bytes, and takes what comes out in pieces of `take`.
    fn open(opener: &mut Opener, mut wire: &[u8], cut: usize, take: usize) -> Result<Vec<u8>, Forged> {
        let mut out = Vec::new();
        loop {
            let space = opener.space();
            let n = wire.len().min(cut).min(space.len());
            let (now, later) = wire.split_at(n);
            space[..n].copy_from_slice(now);
            opener.filled(n);
            wire = later;
            loop {
                let mut to = vec![0; take];
                match opener.read(&mut to)? {
                    0 => break,
                    n => out.extend(&to[..n]),
                }
            }
            if wire.is_empty() {
                return Ok(out);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        /// However it is sealed, cut on the way, and taken: the bytes come out, and then the end.
        #[test]
        fn any_stream_goes_there_and_back(
            parts in prop::collection::vec((0usize..3000, prop_oneof![0usize..5000, Just(PAYLOAD), 60_000usize..140_000]), 0..5),
            cut in 1usize..70_000, take in prop_oneof![1usize..200, 1000usize..80_000],
        ) {
            let (mut sealer, mut opener) = direction();
            let (mut plain, mut wire) = (Vec::new(), Vec::new());
            for (index, (head, data)) in parts.iter().enumerate() {
                let bytes: Vec<u8> = (0..head + data).map(|i| (i * 7 + i / 256 + index) as u8).collect();
                let mut at = 0;
                while at < bytes.len() {
                    let (first, second) = bytes[at..].split_at(head.saturating_sub(at));
                    at += sealer.seal(first, second).unwrap();
                    prop_assert!(sealer.rest().len() <= LONGEST);
                    wire.extend(sealer.rest());
                    sealer.advance(sealer.rest().len());
                }
                plain.extend(bytes);
            }
            prop_assert!(!opener.is_over());
            wire.extend(record(&mut sealer, &[]));
            prop_assert!(open(&mut opener, &wire, cut, take).unwrap() == plain);
            prop_assert!(opener.is_over() && !opener.has_some());
        }

        /// No byte of a record can be changed, and what comes out before is right.
        #[test]
        fn a_changed_byte_is_noticed(at in 0usize..3 * (RECORD + 100), bit in 0u8..8, cut in 1usize..400) {
            let (mut sealer, mut opener) = direction();
            let all: Vec<Vec<u8>> = (0..3).map(|i| record(&mut sealer, &[i; 100])).collect();
            let mut wire = all.concat();
            wire[at] ^= 1 << bit;
            let whole = at / (RECORD + 100);
            // A longer length waits for bytes that may come.
            wire.extend(vec![0; LONGEST]);
            let (mut out, mut rest) = (Vec::new(), &wire[..]);
            let forged = loop {
                let n = rest.len().min(cut);
                match open(&mut opener, &rest[..n], cut, 1) {
                    Ok(bytes) => out.extend(bytes),
                    Err(forged) => break forged,
                }
                rest = &rest[n..];
                prop_assert!(!rest.is_empty(), "all was taken");
            };
            prop_assert_eq!(forged, Forged { record: whole as u64 });
            prop_assert!(out.iter().zip((0..3).flat_map(|i| [i; 100])).all(|(a, b)| *a == b));
            prop_assert_eq!(opener.read(&mut [0; 10]), Err(forged), "nothing after it is taken");
        }

        #[test]
        fn what_is_not_ours_never_opens(bytes in prop::collection::vec(any::<u8>(), 0..3000), cut in 1usize..100) {
            let (_, mut opener) = direction();
            if let Ok(out) = open(&mut opener, &bytes, cut, 100) {
                prop_assert!(out.is_empty());
            }
        }
    }

    #[test]
    fn records_have_their_place() {
        // Repeated, left out, moved, one of the other direction, one of another connection, anything after the end.
        type Attack = fn(&[Vec<u8>], &[Vec<u8>]) -> Vec<u8>;
        let wires: [Attack; 5] = [
            |ours, _| [&ours[0][..], &ours[0]].concat(),
            |ours, _| [&ours[0][..], &ours[2]].concat(),
            |ours, _| [&ours[0][..], &ours[2], &ours[1]].concat(),
            |ours, others| [&ours[0][..], &others[1]].concat(),
            |ours, _| [&ours[0][..], &ours[1], &ours[2], &ours[3], &ours[3]].concat(),
        ];
        for (case, wire) in wires.iter().enumerate() {
            let (mut sealer, mut opener) = direction();
            let mut all: Vec<Vec<u8>> = (0..3).map(|i| record(&mut sealer, &[i; 100])).collect();
            all.push(record(&mut sealer, &[]));
            let (mut other, _) = direction();
            let others: Vec<Vec<u8>> = (0..2).map(|i| record(&mut other, &[i; 100])).collect();
            let forged = open(&mut opener, &wire(&all, &others), 64, 1).unwrap_err();
            assert_eq!(forged.record, if case == 4 { 4 } else { 1 }, "case {case}");
            assert!(forged.to_string().contains("record"), "{forged}");
        }
    }

    #[test]
    fn no_nonce_comes_twice() {
        // Over the border between two keys.
        let (mut sealer, mut opener) = direction();
        (sealer.numbered.next, opener.numbered.next) = (PER_KEY - 2, PER_KEY - 2);
        let wire: Vec<Vec<u8>> = (0..4).map(|_| record(&mut sealer, b"the same bytes")).collect();
        assert!((0..4).all(|i| (0..i).all(|j| wire[i] != wire[j])));
        assert_eq!(open(&mut opener, &wire.concat(), 7, 100).unwrap(), b"the same bytes".repeat(4));
        // One that keeps the old key does not open what was sealed with the new one.
        let (mut sealer, mut stale) = direction();
        (sealer.numbered.next, stale.numbered.next) = (PER_KEY, PER_KEY + 1);
        let new = record(&mut sealer, b"x");
        let next = record(&mut sealer, b"y");
        assert!(open(&mut stale, &next, 100, 100).is_err(), "{new:?}");
        // At the end there is an error, not number 0 again.
        let (mut sealer, _) = direction();
        sealer.numbered.next = u64::MAX - 1;
        assert!(sealer.seal(b"last", &[]).is_ok());
        assert!(sealer.seal(b"none", &[]).unwrap_err().contains("2^64"));
        assert!(sealer.seal(b"none", &[]).is_err());
    }
}
