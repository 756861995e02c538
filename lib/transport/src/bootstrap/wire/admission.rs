//! Mutual authentication of the store and a rank: each proves that it knows the job's secret, before either sends more.
//!
//! ```text
//!   rank                                            store
//!   hello: version, rank, world size, nonce [, psk, e] ─▶
//!                                              ◀─   challenge: nonce, proof over hello and nonce [, e, ee]
//!   proof over hello and nonce                 ─▶
//!                                              ◀─   welcome: the generation
//! ```
//! In brackets is the handshake of an encrypted connection ([`seal`](crate::seal)), whose hash is in the proofs
//! and whose keys seal all that follows.
//!
//! Every store draws a generation. The secret of the links between the ranks comes from the job's secret and the
//! generation, so that the ranks of a newer start reject a rank of an older one, with the same secret, too.
//! A member that comes again over another stream (`resume.rs`) proves that it knows the secret of the links: a rank of
//! an older start cannot take its place.
//! In a job with a public value instead of a secret, the generation alone protects the links: any client that can
//! register learns it, and no other.

use super::frame::Hello;
use super::message::{Bytes, ToRank};
use crate::seal::{Binding, MESSAGE};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{self, Config};
use tinynccl_sys::secret::{self, Nonce, Secret};

/// Random bytes of a store, which distinguish one start of a job from another.
pub(in crate::bootstrap) type Generation = [u8; 32];

/// Text for a client or a store that is not one of ours.
pub(in crate::bootstrap) const WRONG_SECRET: &str = "wrong secret: the rank and the store belong to different jobs (one of them may be left \
     over from an older start), or TINYNCCL_SECRET is not the same for all ranks";

const STORE: &str = "store";
const RANK: &str = "rank";
const MEMBER: &str = "member";

/// Returns the secret that ranks and store prove to each other: the one of the job's id, mixed with the one that
/// `config` names, if it does.
pub(crate) fn join_secret(id: &Secret, config: &Config) -> Result<Secret> {
    Ok(given_secret(config)?.map_or(*id, |given| given.derive("join", id.bytes())))
}

/// Returns the secret that `config` names, if it does.
pub(crate) fn given_secret(config: &Config) -> Result<Option<Secret>> {
    match &config.secret_file {
        None => Ok(config.secret),
        Some(path) => read(path, config).map(Some),
    }
}

/// The secret in a file.
fn read(path: &str, config: &Config) -> Result<Secret> {
    let wrong = |detail: String| Error::config("TINYNCCL_SECRET_FILE", path, detail);
    if config.secret.is_some() {
        return Err(wrong("TINYNCCL_SECRET is set, too: expected one of them".to_owned()));
    }
    let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("expected a file to read: {e}")))?;
    config::secret(text.trim()).map_err(wrong)
}

/// A new one.
pub(in crate::bootstrap) fn generation() -> Result<Generation> {
    secret::random()
}

/// The secret of the data links.
pub(in crate::bootstrap) fn link_secret(secret: &Secret, generation: &Generation) -> Secret {
    secret.derive("links", generation)
}

/// The store's challenge to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::bootstrap) struct Challenge {
    pub(in crate::bootstrap) hello: Hello,
    nonce: Nonce,
    /// Message of the connection's encryption, if there is one.
    binding: Option<Binding>,
}

impl Challenge {
    /// Makes the store's reply to a hello; `sealed`: with that of the encryption, and its binding.
    pub(in crate::bootstrap) fn to(
        hello: Hello,
        secret: &Secret,
        sealed: Option<([u8; MESSAGE], Binding)>,
    ) -> Result<(Challenge, ToRank)> {
        let (message, binding) = sealed.unzip();
        let challenge = Challenge { hello, nonce: secret::random()?, binding };
        let message = ToRank::Challenge {
            nonce: Bytes(challenge.nonce.to_vec()),
            proof: Bytes(challenge.over(|parts| secret.prove(STORE, parts)).to_vec()),
            seal: Bytes(message.map(Vec::from).unwrap_or_default()),
        };
        Ok((challenge, message))
    }

    /// Result of `of` over the parts that are proven.
    fn over<T>(&self, of: impl FnOnce(&[&[u8]]) -> T) -> T {
        let binding = self.binding.as_ref().map_or(&[][..], |binding| binding);
        of(&[&self.hello.encode(self.binding.is_some()), &self.nonce, binding])
    }

    /// Returns true if `proof` shows that the client knows the job's secret.
    pub(in crate::bootstrap) fn is_met(&self, secret: &Secret, proof: &Bytes) -> bool {
        self.over(|parts| secret.accepts(&proof.0, RANK, parts))
    }

    /// Returns true if `proof` is that of a member that comes again: it shows knowledge of the links' secret.
    pub(in crate::bootstrap) fn is_met_again(&self, links: &Secret, proof: &Bytes) -> bool {
        self.over(|parts| links.accepts(&proof.0, MEMBER, parts))
    }

    /// Returns the challenge that a rank has received; `None` when it does not come from a store that knows the secret.
    pub(in crate::bootstrap) fn received(
        secret: &Secret,
        hello: Hello,
        (nonce, proof): (&Bytes, &Bytes),
        binding: Option<Binding>,
    ) -> Option<Challenge> {
        let challenge = Challenge { hello, nonce: nonce.0.as_slice().try_into().ok()?, binding };
        challenge.over(|parts| secret.accepts(&proof.0, STORE, parts)).then_some(challenge)
    }

    /// Returns the rank's proof.
    pub(in crate::bootstrap) fn answer(&self, secret: &Secret) -> Bytes {
        Bytes(self.over(|parts| secret.prove(RANK, parts)).to_vec())
    }

    /// Returns the proof of a rank that is a member, to go on over another stream: it knows the secret of the links.
    pub(in crate::bootstrap) fn answer_again(&self, links: &Secret) -> Bytes {
        Bytes(self.over(|parts| links.prove(MEMBER, parts)).to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello = Hello { nonce: [3; 16], rank: 1, world_size: 2 };
    const SECRET: Secret = Secret::new([5; 32]);

    fn challenge(secret: &Secret, binding: Option<Binding>) -> (Challenge, Bytes, Bytes) {
        match Challenge::to(HELLO, secret, binding.map(|binding| ([1; MESSAGE], binding))).unwrap() {
            (challenge, ToRank::Challenge { nonce, proof, seal }) => {
                assert_eq!(seal.0.len(), if binding.is_some() { MESSAGE } else { 0 });
                (challenge, nonce, proof)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn both_sides_prove_and_neither_takes_what_was_overheard() {
        let received = |secret: &Secret, hello: Hello, nonce: &Bytes, proof: &Bytes, binding: Option<Binding>| {
            Challenge::received(secret, hello, (nonce, proof), binding)
        };
        let (first, nonce, proof) = challenge(&SECRET, None);
        let answered = received(&SECRET, HELLO, &nonce, &proof, None).unwrap().answer(&SECRET);
        assert!(first.is_met(&SECRET, &answered));
        // The store's own proof is no answer, and an answer is for one challenge and one hello.
        assert!(!first.is_met(&SECRET, &proof));
        let (second, ..) = challenge(&SECRET, None);
        assert!(!second.is_met(&SECRET, &answered));
        assert!(received(&SECRET, Hello { nonce: [4; 16], ..HELLO }, &nonce, &proof, None).is_none());
        assert!(!Challenge { hello: Hello { rank: 0, ..HELLO }, ..first }.is_met(&SECRET, &answered));
        let stranger = Secret::new([6; 32]);
        assert!(received(&stranger, HELLO, &nonce, &proof, None).is_none());
        assert!(!first.is_met(&SECRET, &first.answer(&stranger)));
        // With encryption they are for its keys alone: a man in the middle has other ones with each side.
        let (sealed, nonce, proof) = challenge(&SECRET, Some([8; 32]));
        let answered = received(&SECRET, HELLO, &nonce, &proof, Some([8; 32])).unwrap();
        assert!(sealed.is_met(&SECRET, &answered.answer(&SECRET)));
        for other in [None, Some([9; 32])] {
            assert!(received(&SECRET, HELLO, &nonce, &proof, other).is_none());
            let other = Challenge { binding: other, ..sealed };
            assert!(!sealed.is_met(&SECRET, &other.answer(&SECRET)));
            assert!(!sealed.is_met_again(&SECRET, &other.answer_again(&SECRET)));
        }
    }

    #[test]
    fn what_the_settings_name_and_the_id_count_together() {
        let named = |secret: u8| Config::default().with(|c| c.secret = Some(Secret::new([secret; 32])));
        let of = |id: u8, config: &Config| join_secret(&Secret::new([id; 32]), config).unwrap();
        assert_eq!(of(1, &Config::default()), Secret::new([1; 32]));
        assert_eq!(of(1, &named(2)), of(1, &named(2)));
        let all = [of(1, &Config::default()), of(1, &named(2)), of(1, &named(3)), of(2, &named(2))];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
    }

    #[test]
    fn a_file_holds_the_secret_that_the_variable_would() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret").to_str().unwrap().to_owned();
        let file = Config::default().with(|c| c.secret_file = Some(path.clone()));
        let error = |config: &Config| join_secret(&SECRET, config).unwrap_err().to_string();
        assert!(error(&file).contains("expected a file to read"), "{}", error(&file));
        std::fs::write(&path, "correct horse battery staple\n").unwrap();
        let variable =
            Config::from_lookup(|name| (name == "TINYNCCL_SECRET").then(|| "correct horse battery staple".into()));
        let both = variable.clone().unwrap().with(|c| c.secret_file = Some(path.clone()));
        assert_eq!(join_secret(&SECRET, &file).unwrap(), join_secret(&SECRET, &variable.unwrap()).unwrap());
        assert!(
            error(&both).contains("TINYNCCL_SECRET_FILE") && error(&both).contains("one of them"),
            "{}",
            error(&both)
        );
        std::fs::write(&path, "staple").unwrap();
        assert!(
            error(&file).contains("expected 16 characters") && !error(&file).contains("staple"),
            "{}",
            error(&file)
        );
    }

    #[test]
    fn links_have_another_secret_in_every_generation() {
        let of = |generation: u8| link_secret(&SECRET, &[generation; 32]);
        assert!(of(1) != of(2) && of(1) == of(1) && of(1) != SECRET);
    }
}
