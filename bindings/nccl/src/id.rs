//! `ncclUniqueId`: the rendezvous of a communicator's ranks, in 128 bytes.

use std::net::{SocketAddr, ToSocketAddrs};

use crate::abi::{self, UNIQUE_ID_BYTES};
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::{digest, directory, door, place, settings};

const MAGIC: [u8; 8] = *b"tinynccl";
const VERSION: u8 = 2;
const HEAD: usize = 48;
/// Most addresses in an id.
const MOST: usize = (UNIQUE_ID_BYTES - HEAD) / place::BYTES;

/// The kind of a unique id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An acceptor is open at these addresses.
    Store,
    /// `NCCL_COMM_ID`: the rank 0 of the communicator will open an acceptor at this address.
    Door,
}

/// A unique id, read.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Id {
    pub(crate) kind: Kind,
    /// Number among the ids of the process that made it.
    pub(crate) number: u64,
    /// Secret that only the ranks know.
    pub(crate) secret: [u8; 32],
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Id {
    /// Encodes it as the caller's bytes: `magic[8] version kind count number[5] secret[32]`, then the addresses.
    fn encode(&self) -> abi::UniqueId {
        let mut internal = [0; UNIQUE_ID_BYTES];
        let addresses = &self.addresses[..self.addresses.len().min(MOST)];
        internal[..8].copy_from_slice(&MAGIC);
        internal[8..11].copy_from_slice(&[VERSION, self.kind as u8, addresses.len() as u8]);
        internal[11..16].copy_from_slice(&self.number.to_le_bytes()[..5]);
        internal[16..HEAD].copy_from_slice(&self.secret);
        for (place, address) in internal[HEAD..].chunks_mut(place::BYTES).zip(addresses) {
            place.copy_from_slice(&place::encode(*address));
        }
        abi::UniqueId { internal }
    }

    /// # Errors
    /// `ncclInvalidArgument` for bytes that no `ncclGetUniqueId` of this library wrote.
    pub(crate) fn decode(id: &abi::UniqueId) -> Result<Id> {
        let bytes = &id.internal;
        let wrong = |what: &str| {
            Fault::argument(format!(
                "commId is not an id of this library ({what}): call ncclGetUniqueId on one rank, and give all 128 bytes to \
                 the others; all ranks must load the same libnccl.so.2"
            ))
        };
        if bytes[..8] != MAGIC {
            return Err(wrong("it begins with other bytes"));
        }
        if bytes[8] != VERSION {
            return Err(wrong("it is of another version"));
        }
        let kind = match bytes[9] {
            0 => Kind::Store,
            1 => Kind::Door,
            _ => return Err(wrong("its kind is unknown")),
        };
        let count = usize::from(bytes[10]);
        let addresses = bytes[HEAD..].get(..count * place::BYTES).and_then(place::decode);
        let addresses = addresses.filter(|all| !all.is_empty()).ok_or_else(|| wrong("its addresses do not parse"))?;
        let mut number = [0; 8];
        number[..5].copy_from_slice(&bytes[11..16]);
        let number = u64::from_le_bytes(number);
        let secret = bytes[16..HEAD].try_into().map_err(|_| wrong("it has no secret"))?;
        Ok(Id { kind, number, secret, addresses })
    }
}

/// Makes a new id. Its store will be in this process, which has to live until the rendezvous is complete.
pub(crate) fn new() -> Result<Id> {
    if let Some(door) = door()? {
        return Ok(door);
    }
    let all = door::addresses(&settings::config()?)?;
    // Loopback only where there is nothing else: another host would try its own.
    let outside: Vec<SocketAddr> = all.iter().copied().filter(|address| !address.ip().is_loopback()).collect();
    let (number, secret) = directory::here()?.new_id();
    Ok(Id { kind: Kind::Store, number, secret, addresses: if outside.is_empty() { all } else { outside } })
}

/// The id that `NCCL_COMM_ID` stands for. It is no secret: who reaches the address can join, unless `TINYNCCL_SECRET`
/// is set.
fn door() -> Result<Option<Id>> {
    let Some(text) = settings::variable("NCCL_COMM_ID").filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    let text = text.trim();
    let wrong = |why: &str| {
        Fault::usage(format!(
            "NCCL_COMM_ID={text:?}: {why}; expected address:port or name:port, like 10.0.0.1:5000, [fd00::1]:5000 or node1:5000"
        ))
    };
    let addresses = match text.parse() {
        Ok(address) => vec![address],
        Err(_) => by_name(text).map_err(|why| wrong(&why))?,
    };
    if addresses.iter().any(|address| address.port() == 0) {
        return Err(wrong("its port is 0, and all ranks must know it"));
    }
    // A name may lead to other addresses on another host.
    let what = if text.parse::<SocketAddr>().is_ok() { addresses[0].to_string() } else { text.to_owned() };
    let secret = digest::of("NCCL_COMM_ID", &[what.as_bytes()]);
    Ok(Some(Id { kind: Kind::Door, number: directory::NO_NUMBER, secret, addresses }))
}

/// The addresses of `name:port`.
fn by_name(text: &str) -> Result<Vec<SocketAddr>, String> {
    let (name, port) = text.rsplit_once(':').ok_or("it has no port")?;
    let port: u16 = port.parse().map_err(|_| format!("{port:?} is no port"))?;
    if name.is_empty() {
        return Err("it has no address".to_owned());
    }
    let found: Vec<SocketAddr> =
        (name, port).to_socket_addrs().map_err(|e| format!("{name:?}: {e}"))?.take(MOST).collect();
    if found.is_empty() { Err(format!("{name:?} has no address")) } else { Ok(found) }
}

export! {
    /// Writes a new id for the ranks of one communicator. One rank calls it and gives the bytes to all others, over a
    /// channel that no one else reads: any process that has them can join.
    fn ncclGetUniqueId / pncclGetUniqueId [] (id: *mut abi::UniqueId) {
        // SAFETY: NULL or the caller's variable.
        let id = unsafe { out("uniqueId", id) }?;
        *id = new()?.encode();
        Ok(())
    }
}

/// Encodes `id` as an `ncclUniqueId`.
pub(crate) fn encoded(id: &Id) -> abi::UniqueId {
    id.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Status;

    #[test]
    fn ids_go_there_and_back() {
        let addresses: Vec<SocketAddr> =
            ["10.0.0.1:1", "[fd00::1]:2", "10.0.0.3:3", "10.0.0.4:4"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(addresses.len(), MOST);
        let twice = [&addresses[..], &addresses[..]].concat();
        let id = Id { kind: Kind::Store, number: (1 << 40) - 2, secret: [7; 32], addresses: twice };
        let back = Id::decode(&id.encode()).unwrap();
        assert!(back == Id { addresses, ..id });
    }

    #[test]
    fn other_bytes_are_refused() {
        let good = Id { kind: Kind::Store, number: 1, secret: [7; 32], addresses: vec!["10.0.0.1:1".parse().unwrap()] }
            .encode();
        for at in [0, 8, 9, 10, HEAD] {
            let mut bad = good;
            bad.internal[at] = 99;
            let fault = Id::decode(&bad).err().unwrap();
            assert!(fault.status == Status::InvalidArgument && fault.text.contains("ncclGetUniqueId"), "{fault:?}");
        }
    }

    #[test]
    fn addresses_have_names() {
        let found = by_name("localhost:5000").unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 5000), "{found:?}");
        for wrong in ["localhost", ":5000", "localhost:", "localhost:x", "localhost:70000", "localhost:-1"] {
            assert!(by_name(wrong).is_err(), "{wrong}");
        }
    }
}
