//! The handshake that makes a connection's keys: `Noise_NNpsk0_25519_AESGCM_SHA256` of snow's.
//!
//! ```text
//!   dialer                              acceptor
//!   hello                           ─▶
//!   psk, e   (48 bytes)             ─▶
//!                                   ◀─  e, ee   (48 bytes)
//! ```
//! The pre-shared key comes from the secret that both ends prove to each other anyway. Each end draws an ephemeral key
//! and forgets it with the connection: who learns the secret later cannot read what was recorded before. The dialer's
//! hello is the prologue, so both ends must have seen the same one. A message that was made without the secret, or was
//! changed, does not decrypt; a replayed one makes other keys.

use super::primitives::{AesGcm, Primitives, check};
use snow::{Builder, HandshakeState};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::secret::Secret;

/// Bytes of each message of the handshake: a public key and a tag.
pub(crate) const MESSAGE: usize = 48;
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Hash of a whole handshake, which no other one has: what is proven over it is proven for this connection alone.
pub(crate) type Binding = [u8; 32];

/// The keys of a connection, from one end's view.
pub(crate) struct Keys {
    pub(super) send: AesGcm,
    pub(super) recv: AesGcm,
    pub(crate) binding: Binding,
}

/// A dialer's handshake, whose first message is sent.
pub(crate) struct Opening(Box<HandshakeState>);

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opening")
    }
}

/// Fails where this processor cannot encrypt, with the setting's name.
pub(crate) fn is_possible() -> Result<()> {
    check().map_err(|_| {
        let detail = "this processor lacks instructions that it needs: AES, carry-less multiplication (PCLMULQDQ), AVX2, \
                      BMI and ADX on x86-64, those of the cryptography extension on AArch64";
        Error::config("TINYNCCL_ENCRYPT", 1, detail.to_owned())
    })
}

/// Begins a handshake as the dialer of `hello`: the state, and the message that follows the hello.
pub(crate) fn begin(secret: &Secret, hello: &[u8]) -> Result<(Opening, [u8; MESSAGE])> {
    let failed = |e: snow::Error| Error::invalid("encrypt", format!("the handshake cannot begin: {e}"));
    is_possible()?;
    let mut state = state(secret, hello, true).map_err(failed)?;
    let message = message(&mut state).map_err(failed)?;
    Ok((Opening(Box::new(state)), message))
}

/// Answers a dialer's hello and message: the keys, and the message for it.
///
/// # Errors
/// It does not know the secret, or what came was changed.
pub(crate) fn answer(secret: &Secret, hello: &[u8], theirs: &[u8]) -> Result<(Keys, [u8; MESSAGE]), String> {
    is_possible().map_err(|e| e.to_string())?;
    let mut state = state(secret, hello, false).map_err(|e| e.to_string())?;
    read(&mut state, theirs)?;
    let ours = message(&mut state).map_err(|e| e.to_string())?;
    let (dialers, acceptors) = split(&mut state);
    let binding = binding(&state);
    Ok((Keys { send: acceptors, recv: dialers, binding }, ours))
}

impl Opening {
    /// Ends the handshake with the acceptor's message.
    ///
    /// # Errors
    /// As [`answer`].
    pub(crate) fn finish(mut self, theirs: &[u8]) -> Result<Keys, String> {
        read(&mut self.0, theirs)?;
        let (send, recv) = split(&mut self.0);
        Ok(Keys { send, recv, binding: binding(&self.0) })
    }
}

fn state(secret: &Secret, hello: &[u8], dials: bool) -> Result<HandshakeState, snow::Error> {
    let key = secret.derive("encryption", &[]);
    let builder = Builder::with_resolver(PATTERN.parse()?, Box::new(Primitives)).psk(0, key.bytes())?;
    let builder = builder.prologue(hello)?;
    if dials { builder.build_initiator() } else { builder.build_responder() }
}

fn message(state: &mut HandshakeState) -> Result<[u8; MESSAGE], snow::Error> {
    let mut bytes = [0; MESSAGE];
    match state.write_message(&[], &mut bytes)? {
        MESSAGE => Ok(bytes),
        _ => Err(snow::Error::Input),
    }
}

fn read(state: &mut HandshakeState, theirs: &[u8]) -> Result<(), String> {
    let wrong = |_| "it does not know this job's secret, or its first bytes were changed on the way".to_owned();
    state.read_message(theirs, &mut [0; MESSAGE]).map(drop).map_err(wrong)
}

/// The ciphers of what the dialer sends and of what the acceptor sends.
fn split(state: &mut HandshakeState) -> (AesGcm, AesGcm) {
    let (dialers, acceptors) = state.dangerously_get_raw_split();
    (AesGcm::new(&dialers), AesGcm::new(&acceptors))
}

fn binding(state: &HandshakeState) -> Binding {
    let mut binding = [0; 32];
    binding.iter_mut().zip(state.get_handshake_hash()).for_each(|(to, from)| *to = *from);
    binding
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Secret = Secret::new([1; 32]);

    #[test]
    fn both_ends_have_the_same_keys_and_every_connection_others() {
        let ends = || {
            let (opening, message) = begin(&OURS, b"hello").unwrap();
            let (theirs, reply) = answer(&OURS, b"hello", &message).unwrap();
            (opening.finish(&reply).unwrap(), theirs)
        };
        let sealed = |cipher: &AesGcm| {
            let mut bytes = [0; 32];
            (cipher.seal(0, &mut bytes), bytes)
        };
        let (dialer, acceptor) = ends();
        assert_eq!(dialer.binding, acceptor.binding);
        assert_eq!(sealed(&dialer.send), sealed(&acceptor.recv));
        assert_eq!(sealed(&dialer.recv), sealed(&acceptor.send));
        assert_ne!(sealed(&dialer.send), sealed(&dialer.recv));
        let (other, _) = ends();
        assert!(other.binding != dialer.binding && sealed(&other.send) != sealed(&dialer.send));
    }

    #[test]
    fn without_the_secret_or_with_a_changed_byte_there_are_no_keys() {
        let hello = b"hello".to_vec();
        let (opening, message) = begin(&OURS, &hello).unwrap();
        assert!(answer(&Secret::new([2; 32]), &hello, &message).is_err());
        assert!(answer(&OURS, b"hullo", &message).is_err());
        assert!(answer(&OURS, &hello, &message[..MESSAGE - 1]).is_err());
        for at in 0..MESSAGE {
            for bit in 0..8 {
                let mut changed = message;
                changed[at] ^= 1 << bit;
                assert!(answer(&OURS, &hello, &changed).is_err(), "byte {at}");
            }
        }
        let (keys, reply) = answer(&OURS, &hello, &message).unwrap();
        // The same message again is another connection: who replays it has no key of it.
        let (again, other) = answer(&OURS, &hello, &message).unwrap();
        assert!(again.binding != keys.binding && other != reply);
        drop(opening);
        for at in 0..MESSAGE {
            let (opening, message) = begin(&OURS, &hello).unwrap();
            let (_, mut reply) = answer(&OURS, &hello, &message).unwrap();
            reply[at] ^= 1;
            assert!(opening.finish(&reply).is_err(), "byte {at}");
        }
        // What another process answers to the same hello.
        let (opening, _) = begin(&OURS, &hello).unwrap();
        assert!(opening.finish(&reply).is_err());
    }

    #[test]
    fn primitives_are_the_ones_of_the_name() {
        use snow::params::{CipherChoice, DHChoice, HashChoice};
        use snow::resolvers::CryptoResolver;
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
        };
        // RFC 7748, section 5.2.
        let mut dh = Primitives.resolve_dh(&DHChoice::Curve25519).unwrap();
        let (mut nine, mut shared) = ([0; 32], [0; 32]);
        nine[0] = 9;
        dh.set(&nine);
        dh.dh(&nine, &mut shared).unwrap();
        assert_eq!(shared[..], hex("422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"));
        assert_eq!(dh.pubkey(), shared);
        assert!(dh.dh(&[0; 32], &mut shared).is_err(), "a point of small order");
        // FIPS 180-2.
        let mut hash = Primitives.resolve_hash(&HashChoice::SHA256).unwrap();
        let mut digest = [0; 32];
        hash.input(b"a");
        hash.input(b"bc");
        hash.result(&mut digest);
        assert_eq!(digest[..], hex("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
        // Test case 14 of the specification of GCM.
        let mut cipher = Primitives.resolve_cipher(&CipherChoice::AESGCM).unwrap();
        cipher.set(&[0; 32]);
        let mut sealed = [0; 32];
        assert_eq!(cipher.encrypt(0, &[], &[0; 16], &mut sealed), 32);
        assert_eq!(sealed[..], hex("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"));
        assert_eq!(cipher.decrypt(0, &[], &sealed, &mut [0; 16]), Ok(16));
        sealed[31] ^= 1;
        assert!(cipher.decrypt(0, &[], &sealed, &mut [0; 16]).is_err());
    }
}
