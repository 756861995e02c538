//! `ncclUniqueId`: where the ranks of a communicator meet, in 128 bytes.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use tinynccl::Secret;
use tinynccl::bootstrap::Server;

use crate::abi::{self, UNIQUE_ID_BYTES};
use crate::export::{export, out};
use crate::fault::{Fault, Result};
use crate::{digest, place, settings};

const MAGIC: [u8; 8] = *b"tinynccl";
const VERSION: u8 = 1;
const HEAD: usize = 48;
/// Addresses that an id has room for.
const MOST: usize = (UNIQUE_ID_BYTES - HEAD) / place::BYTES;

/// A unique id, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A store listens at these addresses.
    Store,
    /// `NCCL_COMM_ID`: the rank 0 of the communicator will open a door at this address.
    Door,
}

/// A unique id, read.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Id {
    pub(crate) kind: Kind,
    /// What only the ranks know.
    pub(crate) secret: [u8; 32],
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Id {
    /// As the caller's bytes: `magic[8] version kind count 0[5] secret[32]`, then the addresses.
    fn encode(&self) -> abi::UniqueId {
        let mut internal = [0; UNIQUE_ID_BYTES];
        let addresses = &self.addresses[..self.addresses.len().min(MOST)];
        internal[..8].copy_from_slice(&MAGIC);
        internal[8..11].copy_from_slice(&[VERSION, self.kind as u8, addresses.len() as u8]);
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
        let secret = bytes[16..HEAD].try_into().map_err(|_| wrong("it has no secret"))?;
        Ok(Id { kind, secret, addresses })
    }

    /// As the library's rendezvous has it.
    pub(crate) fn rendezvous(&self) -> tinynccl::bootstrap::UniqueId {
        tinynccl::bootstrap::UniqueId::new(Secret::new(self.secret), self.addresses.clone())
    }
}

/// Stores of this process whose ranks have not come yet, by the secret of their ids.
static STORES: Mutex<Vec<([u8; 32], Server)>> = Mutex::new(Vec::new());

fn stores() -> std::sync::MutexGuard<'static, Vec<([u8; 32], Server)>> {
    STORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A new id. Its store is in this process, until its first rank of this process takes it over, or the process ends.
pub(crate) fn new() -> Result<Id> {
    if let Some(door) = door()? {
        return Ok(door);
    }
    let config = settings::config()?;
    let secret = digest::random()?;
    let server = Server::open(place::anywhere(&config)?, Secret::new(secret), &config)?;
    let addresses = server.unique_id().addresses().to_vec();
    stores().push((secret, server));
    Ok(Id { kind: Kind::Store, secret, addresses })
}

/// The store of an id, if it is in this process and no rank has taken it yet.
pub(crate) fn take_store(id: &Id) -> Option<Server> {
    let mut stores = stores();
    let place = stores.iter().position(|(secret, _)| *secret == id.secret)?;
    Some(stores.swap_remove(place).1)
}

/// The id that `NCCL_COMM_ID` stands for. It is no secret: who reaches the address can join, unless `TINYNCCL_SECRET`
/// is set.
fn door() -> Result<Option<Id>> {
    let Some(text) = settings::variable("NCCL_COMM_ID").filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    let address: SocketAddr = text.trim().parse().map_err(|_| {
        Fault::usage(format!("NCCL_COMM_ID={text:?}: expected ip:port, like 10.0.0.1:5000 or [fd00::1]:5000"))
    })?;
    let secret = digest::of("NCCL_COMM_ID", &[address.to_string().as_bytes()]);
    Ok(Some(Id { kind: Kind::Door, secret, addresses: vec![address] }))
}

export! {
    /// Writes a new id for the ranks of one communicator. One rank calls it and gives the bytes to all others, over a
    /// channel that nobody else reads: who has them can join.
    fn ncclGetUniqueId / pncclGetUniqueId [] (id: *mut abi::UniqueId) {
        // SAFETY: NULL or the caller's variable.
        let id = unsafe { out("uniqueId", id) }?;
        *id = new()?.encode();
        Ok(())
    }
}

/// As an `ncclUniqueId`.
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
        let id = Id { kind: Kind::Store, secret: [7; 32], addresses: [&addresses[..], &addresses[..]].concat() };
        let back = Id::decode(&id.encode()).unwrap();
        assert!(back.addresses == addresses && back.secret == id.secret && back.kind == Kind::Store);
    }

    #[test]
    fn other_bytes_are_refused() {
        let good = Id { kind: Kind::Store, secret: [7; 32], addresses: vec!["10.0.0.1:1".parse().unwrap()] }.encode();
        for at in [0, 8, 9, 10, HEAD] {
            let mut bad = good;
            bad.internal[at] = 99;
            let fault = Id::decode(&bad).err().unwrap();
            assert!(fault.status == Status::InvalidArgument && fault.text.contains("ncclGetUniqueId"), "{fault:?}");
        }
    }

    #[test]
    fn a_store_is_taken_once() {
        let id = new().unwrap();
        assert!(take_store(&id).is_some());
        assert!(take_store(&id).is_none());
    }
}
