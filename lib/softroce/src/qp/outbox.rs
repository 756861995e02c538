//! Packets on their way out: headers, and references to registered memory.

use std::sync::Arc;

use crate::memory::Piece;
use crate::path::Path;
use crate::wire::Headers;
use crate::wire::packet::{MAX_HEADERS, padding};

/// Where the payload is.
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
    /// The way; the connection's where there is none.
    pub(crate) path: Option<Arc<Path>>,
}

impl OutPacket {
    pub(crate) fn head(&self) -> &[u8] {
        self.head.get(..usize::from(self.head_len)).unwrap_or_default()
    }
}

/// Packets that a queue pair wants sent. Whoever drives it sends them before it lets go of the lock of the table of
/// regions.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) packets: Vec<OutPacket>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: Vec<u8>,
    limit: usize,
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
    }

    /// Adds a packet whose payload `fill` puts into `bytes` or `pieces`. Nothing is added where that fails.
    pub(crate) fn packet<E>(
        &mut self,
        headers: &Headers,
        copied: bool,
        path: Option<&Arc<Path>>,
        fill: impl FnOnce(&mut Outbox) -> Result<(), E>,
    ) -> Result<(), E> {
        let (pieces, bytes) = (self.pieces.len(), self.bytes.len());
        if let Err(e) = fill(self) {
            self.pieces.truncate(pieces);
            self.bytes.truncate(bytes);
            return Err(e);
        }
        let (body, len) = if copied {
            (Body::Copied(bytes, self.bytes.len()), self.bytes.len() - bytes)
        } else {
            let new = self.pieces.get(pieces..).unwrap_or_default();
            (Body::Memory(pieces, self.pieces.len()), new.iter().map(Piece::len).sum())
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
        let Ok(()) = self.packet(headers, true, None, |_| Ok::<_, std::convert::Infallible>(()));
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
                    unsafe { crate::memory::copy_out(*piece, &mut bytes) };
                }
            }
        }
        bytes.resize(bytes.len() + usize::from(packet.pad), 0);
        bytes
    }
}
