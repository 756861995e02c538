//! X25519, AES-256-GCM and SHA-256 as Noise names them, of crates that need no C compiler.
//!
//! AES-GCM and X25519 are [graviola](https://docs.rs/graviola)'s: assembler whose arithmetic is formally proven, and
//! six times as fast as the crates of RustCrypto.

use std::fmt;

use graviola::aead;
use graviola::key_agreement::x25519::{PublicKey, StaticPrivateKey};
use sha2::{Digest, Sha256};
use snow::Error;
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};
use tinynccl_sys::secret;

/// Bytes by which a ciphertext is longer than what it holds.
pub(super) const TAG: usize = 16;

/// Finds the primitives of a handshake.
pub(super) struct Primitives;

impl CryptoResolver for Primitives {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Kernel))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        matches!(choice, DHChoice::Curve25519).then(|| Box::new(X25519::default()) as Box<dyn Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::new(Sha(Sha256::new())) as Box<dyn Hash>)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        matches!(choice, CipherChoice::AESGCM).then(|| Box::new(AesGcm::new(&[0; 32])) as Box<dyn Cipher>)
    }
}

/// The kernel's random bytes.
struct Kernel;

impl Random for Kernel {
    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), Error> {
        for part in dest.chunks_mut(32) {
            let bytes: [u8; 32] = secret::random().map_err(|_| Error::Rng)?;
            part.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        }
        Ok(())
    }
}

/// A key pair of X25519. graviola wipes the private key when it goes.
#[derive(Default)]
struct X25519 {
    pair: Option<StaticPrivateKey>,
    private: [u8; 32],
    public: [u8; 32],
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, privkey: &[u8]) {
        self.pair = StaticPrivateKey::try_from_slice(privkey).ok();
        if let Some(pair) = &self.pair {
            self.public = pair.public_key().as_bytes();
        }
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), Error> {
        let mut private = [0; 32];
        rng.try_fill_bytes(&mut private)?;
        self.set(&private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    /// Nothing asks for it: the keys of this handshake are all ephemeral.
    fn privkey(&self) -> &[u8] {
        &self.private
    }

    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), Error> {
        let theirs = pubkey.get(..32).ok_or(Error::Dh)?;
        let theirs = PublicKey::try_from_slice(theirs).map_err(|_| Error::Dh)?;
        // Fails for points of small order, whose result would be zero.
        let shared = self.pair.as_ref().ok_or(Error::Dh)?.diffie_hellman(&theirs).map_err(|_| Error::Dh)?;
        out.get_mut(..32).ok_or(Error::Dh)?.copy_from_slice(&shared.0);
        Ok(())
    }
}

struct Sha(Sha256);

impl Hash for Sha {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        self.0 = Sha256::new();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        let digest = self.0.finalize_reset();
        out.iter_mut().zip(digest).for_each(|(to, from)| *to = from);
    }
}

/// AES-256-GCM with the nonces of Noise: four zero bytes, then a number, big endian.
pub(super) struct AesGcm(aead::AesGcm);

impl AesGcm {
    pub(super) fn new(key: &[u8; 32]) -> AesGcm {
        AesGcm(aead::AesGcm::new(key))
    }

    /// Encrypts `bytes` in place under the number `nonce`, which must not come again; the tag.
    pub(super) fn seal(&self, nonce: u64, bytes: &mut [u8]) -> [u8; TAG] {
        let mut tag = [0; TAG];
        self.0.encrypt(&nonce_of(nonce), &[], bytes, &mut tag);
        tag
    }

    /// Decrypts `bytes` in place; false if they or the tag are not what was sealed under this number. Then they are
    /// of no meaning.
    pub(super) fn open(&self, nonce: u64, bytes: &mut [u8], tag: &[u8]) -> bool {
        self.0.decrypt(&nonce_of(nonce), &[], bytes, tag).is_ok()
    }
}

fn nonce_of(number: u64) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce.split_at_mut(4).1.copy_from_slice(&number.to_be_bytes());
    nonce
}

impl fmt::Debug for AesGcm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AesGcm")
    }
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        *self = AesGcm::new(key);
    }

    fn encrypt(&self, nonce: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let mut tag = [0; TAG];
        let Some((bytes, rest)) = out.split_at_mut_checked(plaintext.len()) else { return 0 };
        bytes.copy_from_slice(plaintext);
        self.0.encrypt(&nonce_of(nonce), authtext, bytes, &mut tag);
        rest.iter_mut().zip(tag).for_each(|(to, from)| *to = from);
        plaintext.len() + TAG
    }

    fn decrypt(&self, nonce: u64, authtext: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<usize, Error> {
        let (bytes, tag) = ciphertext.split_last_chunk::<TAG>().ok_or(Error::Decrypt)?;
        let out = out.get_mut(..bytes.len()).ok_or(Error::Decrypt)?;
        out.copy_from_slice(bytes);
        self.0.decrypt(&nonce_of(nonce), authtext, out, tag).map_err(|_| Error::Decrypt)?;
        Ok(bytes.len())
    }
}

/// Returns why this processor cannot do it, if so.
pub(super) fn check() -> Result<(), Error> {
    // Without these instructions the crate would panic.
    if graviola::util::is_cpu_supported() { Ok(()) } else { Err(Error::Decrypt) }
}
