//! Packets on their way out: headers, and references to registered memory.

use std::sync::Arc;

use crate::memory::Piece;
use crate::path::Path;
use crate::psn::Psn;
use crate::wire::Headers;
use crate::wire::packet::{MAX_HEADERS, padding};

/// Location of a packet's payload.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Body {
    /// Pieces of registered memory: from and to which of the outbox's.
    Memory(usize, usize),
    /// Copied: from and to which of the outbox's bytes.
    Copied(usize, usize),
}

/// A packet without its ICRC.
#[derive(Debug)]
pub(crate) struct OutPacket {
    head: [u8; MAX_HEADERS],
    head_len: u8,
    pub(crate) pad: u8,
    /// Bytes of payload.
    pub(crate) len: u32,
    pub(crate) body: Body,
    /// The path of a datagram; `None` for the connection's.
    pub(crate) path: Option<Arc<Path>>,
}

impl OutPacket {
    pub(crate) fn head(&self) -> &[u8] {
        self.head.get(..usize::from(self.head_len)).unwrap_or_default()
    }
}

/// Bytes of a message in a GPU's memory that are copied at a time: a copy by its driver costs some microseconds,
/// however short it is.
pub(crate) const AHEAD: u32 = 128 << 10;

/// A part of a message that was copied for several packets.
#[derive(Debug, Clone, Copy)]
struct Ahead {
    message: Message,
    /// Position of its first byte in the message.
    from: u32,
    len: u32,
    /// Position of its first byte in the outbox's bytes.
    at: usize,
}

/// Packets that a queue pair wants sent. The thread that drives it sends them before it releases the lock of the table
/// of regions.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) packets: Vec<OutPacket>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: Vec<u8>,
    limit: usize,
    ahead: Option<Ahead>,
}

/// A message of a queue pair: its own request, or an answer, by the number of its first packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    Request(Psn),
    Answer(Psn),
}

impl Outbox {
    /// Takes about `limit` packets until it is cleared.
    pub(crate) fn new(limit: usize) -> Outbox {
        Outbox { limit, ..Outbox::default() }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.packets.len() >= self.limit
    }

    pub(crate) fn clear(&mut self) {
        self.packets.clear();
        self.pieces.clear();
        self.bytes.clear();
        self.ahead = None;
    }

    /// Adds a packet whose payload `fill` puts into `bytes` or `pieces`. Nothing is added where that fails.
    pub(crate) fn packet<E>(
        &mut self,
        headers: &Headers,
        path: Option<&Arc<Path>>,
        fill: impl FnOnce(&mut Outbox) -> Result<Body, E>,
    ) -> Result<(), E> {
        let (pieces, bytes) = (self.pieces.len(), self.bytes.len());
        let body = fill(self).inspect_err(|_| {
            self.pieces.truncate(pieces);
            self.bytes.truncate(bytes);
        })?;
        let len = match body {
            Body::Copied(from, to) => to - from,
            Body::Memory(from, to) => self.pieces.get(from..to).unwrap_or_default().iter().map(Piece::len).sum(),
        };
        let mut headers = *headers;
        headers.bth.pad = padding(len);
        let mut head = [0; MAX_HEADERS];
        let head_len = headers.build(&mut head) as u8;
        self.packets.push(OutPacket {
            head,
            head_len,
            pad: headers.bth.pad,
            len: len as u32,
            body,
            path: path.cloned(),
        });
        Ok(())
    }

    /// Adds a packet without payload.
    pub(crate) fn bare(&mut self, headers: &Headers) {
        let Ok(()) = self.packet(headers, None, |_| Ok::<_, std::convert::Infallible>(Body::Copied(0, 0)));
    }

    /// Bytes `from` to `from + len` of a message in a GPU's memory. Where an earlier packet has not copied them
    /// already, `copy` appends up to `most` bytes of the message from there on.
    pub(crate) fn of_gpu<E>(
        &mut self,
        message: Message,
        from: u32,
        len: u32,
        most: u32,
        copy: impl FnOnce(&mut Vec<u8>, u32) -> Result<(), E>,
    ) -> Result<Body, E> {
        let has = |a: &Ahead| a.message == message && a.from <= from && from + len <= a.from + a.len;
        let ahead = match self.ahead.filter(has) {
            Some(ahead) => ahead,
            None => {
                let ahead = Ahead { message, from, len: most.clamp(len, AHEAD.max(len)), at: self.bytes.len() };
                copy(&mut self.bytes, ahead.len)?;
                *self.ahead.insert(ahead)
            }
        };
        let at = ahead.at + (from - ahead.from) as usize;
        Ok(Body::Copied(at, at + len as usize))
    }

    /// A packet as bytes, its ICRC left out.
    #[cfg(test)]
    pub(crate) fn bytes_of(&self, packet: &OutPacket) -> Vec<u8> {
        let mut bytes = packet.head().to_vec();
        match packet.body {
            Body::Copied(from, to) => bytes.extend(&self.bytes[from..to]),
            Body::Memory(from, to) => {
                for piece in &self.pieces[from..to] {
                    // SAFETY: tests keep their memory and the table's lock.
                    unsafe { crate::memory::copy_out(*piece, &mut bytes) }.expect("memory of the host");
                }
            }
        }
        bytes.resize(bytes.len() + usize::from(packet.pad), 0);
        bytes
    }
}
