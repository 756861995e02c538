//! The id with which a rank joins a job: the addresses of the store, and the secret of this job.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use super::message::{from_hex, hex};
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::secret::Secret;

/// The protocol that this build speaks with the store.
pub const PROTOCOL_VERSION: u16 = 4;

/// Most addresses a unique id may hold.
const MAX_ADDRESSES: usize = 64;

/// Identifies one job, like `ncclUniqueId`: made once by the process that runs the
/// [`Server`](crate::bootstrap::Server), handed to every rank by any means that others cannot read (environment, file,
/// MPI broadcast): any process that has it can join.
///
/// Its text is one printable ASCII line: `tinynccl-4-<64 hex digits>@<address>,<address>…`.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    version: u16,
    secret: Secret,
    addresses: Vec<SocketAddr>,
}

impl UniqueId {
    /// The id of a job with this secret, whose store listens at `addresses` (most useful first).
    pub fn new(secret: Secret, addresses: Vec<SocketAddr>) -> Self {
        UniqueId { version: PROTOCOL_VERSION, secret, addresses }
    }

    /// Protocol version of the build that made this id.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The job's secret.
    pub fn secret(&self) -> Secret {
        self.secret
    }

    /// Returns the addresses at which the store listens, most useful first.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The addresses as text, for errors.
    pub(crate) fn address_list(&self) -> String {
        let list: Vec<String> = self.addresses.iter().map(SocketAddr::to_string).collect();
        list.join(", ")
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tinynccl-{}-{}", self.version, hex(self.secret.bytes()))?;
        for (i, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if i == 0 { '@' } else { ',' })?;
        }
        Ok(())
    }
}

/// Prints no secret, so that a log does not give it away.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").field("version", &self.version).field("addresses", &self.addresses).finish()
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text.trim()).map_err(|detail| {
            let detail = format!("{detail}; expected tinynccl-4-<64 hex digits>@<ip:port>,<ip:port>…");
            Error::config("unique id", without_secret(text), detail)
        })
    }
}

fn parse(text: &str) -> Result<UniqueId, String> {
    let rest = text.strip_prefix("tinynccl-").ok_or("it does not begin with tinynccl-")?;
    let (version, rest) = rest.split_once('-').ok_or("no version")?;
    let version = version.parse().map_err(|_| format!("version {version:?} is not a number"))?;
    let (hex, addresses) = rest.split_once('@').ok_or("no @ before the addresses")?;
    let secret = from_hex(hex).and_then(|bytes| bytes.try_into().ok()).map(Secret::new);
    let secret = secret.ok_or("the secret is not 64 hex digits")?;
    let mut list = Vec::new();
    for address in addresses.split(',') {
        if list.len() == MAX_ADDRESSES {
            return Err(format!("more than {MAX_ADDRESSES} addresses"));
        }
        list.push(address.parse().map_err(|_| format!("{address:?} is not ip:port"))?);
    }
    Ok(UniqueId { version, secret, addresses: list })
}

/// Returns at most 200 characters of a text, for an error, without runs of hex digits that may be part of a secret.
fn without_secret(text: &str) -> String {
    let shown = |word: &str| if word.len() < 16 { word.to_owned() } else { "…".to_owned() };
    let words = text.split_inclusive(|c: char| !c.is_ascii_hexdigit());
    words.map(shown).collect::<String>().chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_goes_there_and_back() {
        let id = UniqueId::new(
            Secret::new(std::array::from_fn(|i| if i == 31 { 255 } else { i as u8 })),
            vec!["10.0.0.1:4711".parse().unwrap(), "[fe80::1%2]:9".parse().unwrap()],
        );
        let text = id.to_string();
        assert_eq!(
            text,
            "tinynccl-4-000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1eff@10.0.0.1:4711,[fe80::1%2]:9"
        );
        assert_eq!(text.parse::<UniqueId>().unwrap(), id);
        assert!(!format!("{id:?}").contains("0405"), "the secret must not show in logs");
    }

    #[test]
    fn bad_text_says_what_is_wrong() {
        let secret = "0a".repeat(32);
        for (text, wrong) in [
            ("".to_owned(), "does not begin"),
            ("hello".to_owned(), "does not begin"),
            ("tinynccl-2".to_owned(), "no version"),
            (format!("tinynccl-x-{secret}@1.2.3.4:5"), "version \"x\""),
            (format!("tinynccl-4-{secret}"), "no @"),
            ("tinynccl-4-00@1.2.3.4:5".to_owned(), "64 hex digits"),
            (format!("tinynccl-4-+{}@1.2.3.4:5", "0".repeat(63)), "64 hex digits"),
            (format!("tinynccl-4-{secret}@localhost:5"), "is not ip:port"),
            (format!("tinynccl-4-{secret}@1.2.3.4:5,"), "is not ip:port"),
            (format!("tinynccl-4-{secret}@{}", vec!["1.2.3.4:5"; 65].join(",")), "more than 64"),
        ] {
            let e = text.parse::<UniqueId>().unwrap_err().to_string();
            assert!(e.contains(wrong) && e.contains("expected tinynccl-4-"), "{text}: {e}");
            assert!(!e.contains("0a0a"), "a secret, or most of one, ends in a log: {e}");
        }
    }

    proptest! {
        #[test]
        fn any_id_goes_there_and_back(
            secret in any::<[u8; 32]>(),
            addresses in prop::collection::vec(any::<SocketAddr>(), 1..=MAX_ADDRESSES),
        ) {
            // Flow information is not part of an address's text.
            let addresses = addresses.into_iter().map(|mut a| {
                if let SocketAddr::V6(six) = &mut a {
                    six.set_flowinfo(0);
                }
                a
            });
            let id = UniqueId::new(Secret::new(secret), addresses.collect());
            prop_assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,80}", tail in "[0-9a-f@:,.\\[\\]-]{0,60}") {
            let _ = text.parse::<UniqueId>();
            let _ = format!("tinynccl-4-{tail}").parse::<UniqueId>();
        }
    }
}
