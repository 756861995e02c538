//! Bytes on the wire: the fixed hello, and length-prefixed frames.
//!
//! A client first sends a hello of [`HELLO_BYTES`] bytes, little endian: `magic[8] version[u16] flags[u16] nonce[16]
//! rank[u32] world_size[u32]`. Its layout up to the version never changes, so that two versions can recognise each
//! other. A client that encrypts says so in the flags, and the first message of that handshake follows. After it both
//! sides send frames: `length[u32] body[length]`, where the body is the JSON of a
//! [`message`](super::message): first the store's challenge, then the client's proof.

use super::unique_id::PROTOCOL_VERSION;
use tinynccl_sys::secret::{self, Nonce};

/// First bytes of every client.
pub(crate) const MAGIC: [u8; 8] = *b"tinynccl";
const NOT_OURS: &str = "this is a tinynccl rendezvous store, and what came is not a tinynccl hello";
/// Length of the hello.
pub(crate) const HELLO_BYTES: usize = 36;
/// Longest body of a frame, once a client is known.
pub(crate) const MAX_FRAME: usize = 16 << 20;
/// Longest body of a proof's frame.
pub(crate) const MAX_PROOF: usize = 1 << 10;
/// Longest body of the frame after it (a rank's registration).
pub(crate) const MAX_REGISTER: usize = 256 << 10;

/// The fields of a client's first message, behind magic and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Hello {
    /// Drawn for this connection.
    pub(crate) nonce: Nonce,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
}

/// Flag: the client encrypts the connection.
const SEALED: u16 = 1;

/// A hello as it is sent.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Wire {
    magic: [u8; 8],
    version: u16,
    flags: u16,
    hello: Hello,
}

impl Hello {
    /// Makes the hello of a rank, for one connection, with a random nonce.
    pub(crate) fn new(rank: usize, world_size: usize) -> tinynccl_plan::Result<Hello> {
        Ok(Hello { nonce: secret::random()?, rank: rank as u32, world_size: world_size as u32 })
    }

    /// `sealed`: a message of the encryption's handshake follows.
    pub(crate) fn encode(&self, sealed: bool) -> [u8; HELLO_BYTES] {
        let flags = if sealed { SEALED } else { 0 };
        bytemuck::cast(Wire { magic: MAGIC, version: PROTOCOL_VERSION, flags, hello: *self })
    }

    /// Returns the hello in `bytes`, and whether its client encrypts, if it has our magic and version; else the reason,
    /// as a text for the client.
    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<(Hello, bool), String> {
        let Wire { magic, version, flags, hello } = bytemuck::cast(*bytes);
        if magic != MAGIC {
            return Err(NOT_OURS.to_owned());
        }
        if version != PROTOCOL_VERSION {
            return Err(format!(
                "the client speaks protocol version {version}, the store version {PROTOCOL_VERSION}: \
                 build all ranks from the same version"
            ));
        }
        if flags & !SEALED != 0 {
            return Err(format!("the client asks for something that this version does not know (flags {flags:#06x})"));
        }
        Ok((hello, flags & SEALED != 0))
    }
}

/// Appends a frame to `out`. Bodies above [`MAX_FRAME`] are refused, because the other side would refuse them.
pub(crate) fn put_frame(out: &mut Vec<u8>, body: &[u8]) -> Result<(), String> {
    if body.len() > MAX_FRAME {
        return Err(format!("a message of {} bytes exceeds the limit of {MAX_FRAME}", body.len()));
    }
    out.extend_from_slice(&(body.len() as u32).to_le_bytes());
    out.extend_from_slice(body);
    Ok(())
}

/// Bytes received and not yet consumed. Memory grows with what arrives, never with what a length field claims.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    /// Bytes of what was consumed so far, since the connection began.
    taken: u64,
    /// Bytes to come that were consumed before, when they came over another stream.
    again: u64,
}

impl Decoder {
    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    /// Goes on with what comes over another stream, from byte `from` on; `rest` is what has come of it.
    pub(crate) fn go_on(&mut self, rest: &Decoder, from: u64) -> Result<(), String> {
        let taken = self.taken;
        let again = taken.checked_sub(from).ok_or_else(|| format!("it goes on at byte {from}, after {taken}"))?;
        *self = Decoder { taken, again, ..Decoder::default() };
        self.extend(rest.rest());
        Ok(())
    }

    pub(crate) fn extend(&mut self, bytes: &[u8]) {
        let known = bytes.len().min(usize::try_from(self.again).unwrap_or(usize::MAX));
        self.again -= known as u64;
        let bytes = bytes.get(known..).unwrap_or_default();
        if self.start > 0 && self.start >= self.buffer.len() / 2 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }

    /// The hello's bytes, once they are all here. Wrong bytes are noticed as soon as they come: `Err`.
    pub(crate) fn hello(&mut self) -> Result<Option<[u8; HELLO_BYTES]>, String> {
        let rest = self.rest();
        if rest.len() >= HELLO_BYTES {
            return Ok(self.bytes());
        }
        let seen = rest.len().min(MAGIC.len());
        if rest.iter().zip(&MAGIC).take(seen).any(|(a, b)| a != b) {
            return Err(NOT_OURS.to_owned());
        }
        Ok(None)
    }

    /// The next bytes as they are, once all are here.
    pub(crate) fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.rest().first_chunk::<N>()?;
        self.consume(N);
        Some(bytes)
    }

    /// True if nothing is here that was not taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    /// The next whole frame's body.
    pub(crate) fn frame(&mut self, limit: usize) -> Result<Option<Vec<u8>>, String> {
        let rest = self.rest();
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > limit {
            return Err(format!("a frame of {length} bytes exceeds the limit of {limit}"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let body = body.to_vec();
        self.consume(4 + length);
        Ok(Some(body))
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        self.taken += bytes as u64;
    }

    #[cfg(test)]
    fn capacity(&self) -> usize {
        self.buffer.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{ToRank, ToStore};
    use super::*;
    use proptest::prelude::*;

    const HELLO: Hello = Hello { nonce: [7; 16], rank: 3, world_size: 8 };

    #[test]
    fn hello_goes_there_and_back() {
        assert_eq!(Hello::decode(&HELLO.encode(false)), Ok((HELLO, false)));
    }

    #[test]
    fn a_refused_hello_is_told_why() {
        let mut magic = HELLO.encode(false);
        magic[0] = b'G';
        let mut version = HELLO.encode(false);
        version[8] = 9;
        for (bytes, why) in [(magic, "not a tinynccl hello"), (version, "version 9, the store version 4")] {
            let e = Hello::decode(&bytes).unwrap_err();
            assert!(e.contains(why), "{e}");
        }
    }

    #[test]
    fn frames_survive_any_split() {
        let mut wire = Vec::new();
        for body in [b"".as_slice(), b"a", &[5; 1000]] {
            put_frame(&mut wire, body).unwrap();
        }
        for step in 1..wire.len() {
            let mut decoder = Decoder::default();
            let mut lengths = Vec::new();
            for piece in wire.chunks(step) {
                decoder.extend(piece);
                while let Some(body) = decoder.frame(MAX_FRAME).unwrap() {
                    lengths.push(body.len());
                }
            }
            assert_eq!(lengths, [0, 1, 1000], "step {step}");
        }
    }

    #[test]
    fn a_long_length_is_refused_at_once_and_nothing_is_reserved_for_a_claim() {
        let mut decoder = Decoder::default();
        decoder.extend(&u32::MAX.to_le_bytes());
        assert!(decoder.frame(MAX_FRAME).unwrap_err().contains("exceeds the limit"));
        let mut decoder = Decoder::default();
        decoder.extend(&(MAX_FRAME as u32).to_le_bytes());
        assert_eq!(decoder.frame(MAX_FRAME), Ok(None));
        assert!(decoder.capacity() < 1024);
    }

    proptest! {
        #[test]
        fn any_hello_goes_there_and_back(nonce in any::<[u8; 16]>(), rank: u32, world_size: u32, bit in 0usize..288) {
            let hello = Hello { nonce, rank, world_size };
            let mut bytes = hello.encode(false);
            prop_assert_eq!(Hello::decode(&bytes), Ok((hello, false)));
            prop_assert_eq!(Hello::decode(&hello.encode(true)), Ok((hello, true)));
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Magic, version and flags are checked; the others come as they are.
            match Hello::decode(&bytes) {
                Err(_) => prop_assert!(bit / 8 < 12 && bit != 80),
                Ok((other, sealed)) => {
                    prop_assert_eq!((other == hello, sealed), (bit == 80, bit == 80))
                }
            }
        }

        #[test]
        fn any_bodies_come_out_as_they_went_in(
            bodies in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
            cuts in prop::collection::vec(1usize..200, 1..8),
        ) {
            let mut wire = Vec::new();
            for body in &bodies {
                put_frame(&mut wire, body).unwrap();
            }
            let (mut decoder, mut out, mut rest) = (Decoder::default(), Vec::new(), &wire[..]);
            for cut in cuts.iter().cycle() {
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                decoder.extend(now);
                while let Some(body) = decoder.frame(MAX_FRAME).unwrap() {
                    out.push(body);
                }
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(out, bodies);
        }

        #[test]
        fn arbitrary_bytes_never_panic(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20)) {
            let mut decoder = Decoder::default();
            let mut fed = 0;
            for piece in &pieces {
                decoder.extend(piece);
                fed += piece.len();
                while let Ok(Some(body)) = decoder.frame(MAX_FRAME) {
                    let _ = serde_json::from_slice::<ToStore>(&body);
                    let _ = serde_json::from_slice::<ToRank>(&body);
                }
                prop_assert!(decoder.capacity() <= 4 * fed + 64, "{} for {fed} bytes", decoder.capacity());
            }
            let mut decoder = Decoder::default();
            decoder.extend(&pieces.concat());
            if let Ok(Some(bytes)) = decoder.hello() {
                let _ = Hello::decode(&bytes);
            }
        }
    }
}
