//! A unique id, as `ncclUniqueId` holds it in 128 bytes.

use std::net::SocketAddr;

use super::{address, digest};
use crate::abi::error::{Error, Result};
use crate::abi::{self, UNIQUE_ID_BYTES};

const MAGIC: [u8; 8] = *b"tinynccl";
const VERSION: u8 = 2;
const HEAD: usize = 48;
/// Most addresses in an id.
pub(super) const MOST: usize = (UNIQUE_ID_BYTES - HEAD) / address::BYTES;

/// The name of a rendezvous: a digest that only its ranks can compute.
pub(crate) type Name = [u8; 32];

/// The number that stands for no id of a process.
pub(crate) const NO_NUMBER: u64 = 0;

/// Returns the name under which ranks look the store of an id up.
pub(crate) fn name_of(secret: &[u8; 32]) -> Name {
    digest::of("id", &[secret])
}

/// Returns the error for an id whose communicator was made before.
pub(crate) fn used() -> Error {
    Error::usage(
        "the id was used: a communicator has been made with it, or its ranks did not fit together; call \
         ncclGetUniqueId for each communicator",
    )
}

/// The kind of a unique id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A listener is open at these addresses.
    Store,
    /// `NCCL_COMM_ID`: the rank 0 of the communicator will open a listener at this address.
    Address,
}

/// A unique id, decoded.
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
    pub(crate) fn encode(&self) -> abi::UniqueId {
        let mut internal = [0; UNIQUE_ID_BYTES];
        let addresses = &self.addresses[..self.addresses.len().min(MOST)];
        internal[..8].copy_from_slice(&MAGIC);
        internal[8..11].copy_from_slice(&[VERSION, self.kind as u8, addresses.len() as u8]);
        internal[11..16].copy_from_slice(&self.number.to_le_bytes()[..5]);
        internal[16..HEAD].copy_from_slice(&self.secret);
        for (slot, address) in internal[HEAD..].chunks_mut(address::BYTES).zip(addresses) {
            slot.copy_from_slice(&address::encode(*address));
        }
        abi::UniqueId { internal }
    }

    /// Decodes the caller's bytes.
    ///
    /// # Errors
    /// `ncclInvalidArgument` for bytes that no `ncclGetUniqueId` of this library wrote.
    pub(crate) fn decode(id: &abi::UniqueId) -> Result<Id> {
        let bytes = &id.internal;
        let wrong = |what: &str| {
            Error::argument(format!(
                "commId is not an id of this library ({what}): call ncclGetUniqueId on one rank, and give all 128 \
                 bytes to the others; all ranks must load the same libnccl.so.2"
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
            1 => Kind::Address,
            _ => return Err(wrong("its kind is unknown")),
        };
        let count = usize::from(bytes[10]);
        let addresses = bytes[HEAD..].get(..count * address::BYTES).and_then(address::decode);
        let addresses = addresses.filter(|all| !all.is_empty()).ok_or_else(|| wrong("its addresses do not parse"))?;
        let mut number = [0; 8];
        number[..5].copy_from_slice(&bytes[11..16]);
        let number = u64::from_le_bytes(number);
        let secret = bytes[16..HEAD].try_into().map_err(|_| wrong("it has no secret"))?;
        Ok(Id { kind, number, secret, addresses })
    }
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
            let error = Id::decode(&bad).err().unwrap();
            assert!(error.status == Status::InvalidArgument && error.text.contains("ncclGetUniqueId"), "{error:?}");
        }
    }
}
