//! The secret that the ranks of a job share: proven by challenge and response, never sent.
//!
//! Both sides of a connection draw a nonce, and each sends an HMAC-SHA256 over its role, both nonces and what the
//! connection is for. A client without the secret cannot make one, an overheard proof fits no other nonces, and one
//! side's proof is of no use in the other's role. A text that people choose can be guessed by trying: it should be as
//! random as a key.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use tinynccl_plan::error::{Error, Result};

/// Drawn anew for every connection.
pub type Nonce = [u8; 16];
/// Proof that its sender knows the secret.
pub type Proof = [u8; 32];

/// A job's secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// The secret of these bytes, which should be random.
    pub const fn new(bytes: [u8; 32]) -> Secret {
        Secret(bytes)
    }

    /// A secret that no other job has.
    pub fn random() -> Result<Secret> {
        random().map(Secret)
    }

    /// Returns the secret itself, to hand it to another process of the job.
    #[doc(hidden)]
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The secret that a text stands for.
    pub fn of_text(text: &str) -> Secret {
        Secret(Sha256::new_with_prefix(b"tinynccl secret ").chain_update(text).finalize().into())
    }

    /// Derives another secret for `purpose` and `context`, which does not give this one away.
    pub fn derive(&self, purpose: &str, context: &[u8]) -> Secret {
        Secret(self.prove(purpose, &[context]))
    }

    /// Returns a number by which reports name its holders, which does not give it away.
    pub fn name(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.prove("name of the job", &[]);
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Returns the proof that a holder of the secret gives in the role `role` for the connection that `parts` describe.
    pub fn prove(&self, role: &str, parts: &[&[u8]]) -> Proof {
        self.mac(role, parts).finalize().into_bytes().into()
    }

    /// Returns true if `proof` is [`Secret::prove`] of the same `role` and `parts`. Takes the same time wherever it
    /// differs.
    pub fn accepts(&self, proof: &[u8], role: &str, parts: &[&[u8]]) -> bool {
        self.mac(role, parts).verify_slice(proof).is_ok()
    }

    fn mac(&self, role: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // A key of a whole block, which HMAC fills up with zeros anyway: making it cannot fail.
        let mut key = [0; 64];
        key.split_at_mut(self.0.len()).0.copy_from_slice(&self.0);
        let mut mac = Hmac::<Sha256>::new(&key.into());
        // With their lengths: no two lists of parts are the same bytes.
        for part in [role.as_bytes()].iter().chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }
}

/// Without its bytes: this may end in a log.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Random bytes of the kernel's, which no one can predict.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::errno("secret", "random bytes", e))?;
    // Linux gives 256 bytes and less whole.
    if got == N { Ok(bytes) } else { Err(Error::invalid("secret", "too few random bytes")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_are_hmac_sha256() {
        // Python: hmac.digest(bytes([7]) * 32, b"\4" + b"\0" * 7 + b"rank" + b"\2" + b"\0" * 7 + b"ab", "sha256").hex()
        let hex: String = Secret::new([7; 32]).prove("rank", &[b"ab"]).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, "0935589756c8ddd14c8bb3d9e1f38edaf014ec6adbc0b8bf07fc22d3361a0809");
    }

    #[test]
    fn a_proof_is_for_one_secret_role_and_connection() {
        let secret = Secret::new([7; 32]);
        let proof = secret.prove("rank", &[b"ab", b"c"]);
        assert!(secret.accepts(&proof, "rank", &[b"ab", b"c"]));
        assert!(!secret.accepts(&proof, "store", &[b"ab", b"c"]));
        assert!(!secret.accepts(&proof, "rank", &[b"a", b"bc"]));
        assert!(!secret.accepts(&proof[..31], "rank", &[b"ab", b"c"]));
        for other in [Secret::new([8; 32]), secret.derive("links", b""), Secret::random().unwrap()] {
            assert!(other != secret && !other.accepts(&proof, "rank", &[b"ab", b"c"]));
        }
        for bit in 0..256 {
            let mut wrong = proof;
            wrong[bit / 8] ^= 1 << (bit % 8);
            assert!(!secret.accepts(&wrong, "rank", &[b"ab", b"c"]));
        }
    }

    #[test]
    fn a_secret_does_not_show() {
        assert_eq!(format!("{:?}", Secret::new([0xab; 32])), "Secret");
        assert_ne!(Secret::random().unwrap(), Secret::random().unwrap());
        assert_ne!(Secret::of_text("a"), Secret::of_text("b"));
    }
}
