//! Encryption of TCP connections (`TINYNCCL_ENCRYPT`): the control plane, links and rails use the same socket.
//!
//! | file | idea |
//! | --- | --- |
//! | `socket` | a socket that sends and receives as the kernel's does, sealed or not |
//! | `record` | the bytes on the wire: records, their numbers, and the end of a stream |
//! | `noise` | the handshake that makes the keys, from the secret and from what both ends draw |
//! | `primitives` | X25519, AES-GCM and SHA-256 for it |
//!
//! The handshakes that prove the secret ([`handshake`](crate::handshake), and `admission` of the store) carry the two
//! messages of `noise` and prove its [`Binding`], too: a man in the middle cannot put one connection's proofs into
//! another. After the acceptor's first answer both directions carry records alone.

mod noise;
mod primitives;
mod record;
mod socket;

pub(crate) use noise::{Binding, Keys, MESSAGE, Opening, answer, begin, is_possible};
pub(crate) use record::RECORD;
pub(crate) use socket::{Fault, Socket};

/// Text for an end that encrypts, if `ours`, and meets one that does, if `theirs`, and differs.
pub(crate) fn differs(ours: bool, theirs: bool) -> String {
    let (ours, theirs) = (u8::from(ours), u8::from(theirs));
    format!("TINYNCCL_ENCRYPT is {ours} here and {theirs} at the process that connects: set the same for all ranks")
}

/// The keys of both ends of a connection.
#[cfg(test)]
pub(crate) fn keys() -> [Keys; 2] {
    let secret = tinynccl_sys::Secret::new([7; 32]);
    let (opening, message) = begin(&secret, b"hello").unwrap();
    let (theirs, reply) = answer(&secret, b"hello", &message).unwrap();
    [opening.finish(&reply).unwrap(), theirs]
}

/// Seals both ends of a connection with each other.
#[cfg(test)]
pub(crate) fn pair(ends: &mut [Socket; 2]) {
    ends.iter_mut().zip(keys()).for_each(|(end, keys)| end.seal(keys));
}
