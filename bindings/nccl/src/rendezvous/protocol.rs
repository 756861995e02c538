//! Messages between a rank and the listener of a process: a request for a store by its name, and the reply.

use std::io;
use std::net::SocketAddr;

use super::address;
use super::id::Name;

/// First bytes of a request; after them the name of a rendezvous, and the number of an id or [`super::id::NO_NUMBER`].
const MAGIC: [u8; 8] = *b"tinydoo2";
/// Length of a request in bytes.
pub(super) const REQUEST: usize = MAGIC.len() + size_of::<Name>() + size_of::<u64>();
/// Reply for an id that was used, in place of the number of addresses; other replies are this number and the addresses.
const USED: u8 = u8::MAX;
/// Most addresses of a store in a reply.
pub(super) const MOST: usize = 16;

/// Encodes a request.
pub(super) fn request(name: &Name, number: u64) -> Vec<u8> {
    [&MAGIC[..], name, &number.to_le_bytes()].concat()
}

/// Decodes a request to a name and a number; `None` for bytes that are no request.
pub(super) fn parse(request: &[u8; REQUEST]) -> Option<(&Name, u64)> {
    let (name, number) = request.strip_prefix(&MAGIC)?.split_first_chunk()?;
    Some((name, u64::from_le_bytes(number.try_into().ok()?)))
}

/// Reply to a client that looks a store up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// There is none of this name yet.
    Unknown,
    /// The store's addresses.
    At(Vec<SocketAddr>),
    /// The id's communicator has been made.
    Used,
}

impl Reply {
    /// Encodes it, as one byte or more.
    pub(super) fn encode(&self) -> Vec<u8> {
        let store: &[SocketAddr] = match self {
            Reply::Used => return vec![USED],
            Reply::Unknown => &[],
            Reply::At(store) => store,
        };
        let mut reply = vec![store.len().min(MOST) as u8];
        reply.extend(store.iter().take(MOST).flat_map(|address| address::encode(*address)));
        reply
    }

    /// Receives a reply; `read` fills the bytes that it is given.
    pub(super) fn receive(mut read: impl FnMut(&mut [u8]) -> io::Result<()>) -> io::Result<Reply> {
        let mut count = [0];
        read(&mut count)?;
        if count == [USED] {
            return Ok(Reply::Used);
        }
        let mut bytes = vec![0; usize::from(count[0]).min(MOST) * address::BYTES];
        read(&mut bytes)?;
        let store = address::decode(&bytes);
        let store = store.ok_or_else(|| io::Error::other("what came is not a list of addresses"))?;
        Ok(if store.is_empty() { Reply::Unknown } else { Reply::At(store) })
    }
}
