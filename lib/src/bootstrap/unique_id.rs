//! What a rank must know to join a job: where the store is, and the token that tells this job from any other.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The protocol that this build speaks with the store.
pub const PROTOCOL_VERSION: u16 = 1;

/// Most addresses a unique id may hold.
const MAX_ADDRESSES: usize = 64;

/// Identifies one job, like `ncclUniqueId`: made once by the process that runs the [`Server`](super::Server), handed to every
/// rank by any means (environment, file, MPI broadcast).
///
/// Its text is one printable ASCII line: `tinynccl-1-<32 hex digits>@<address>,<address>…`.
#[derive(Clone, PartialEq, Eq)]
pub struct UniqueId {
    version: u16,
    token: [u8; 16],
    addresses: Vec<SocketAddr>,
}

impl UniqueId {
    /// The id of a job with this token, whose store listens at `addresses` (most useful first).
    pub fn new(token: [u8; 16], addresses: Vec<SocketAddr>) -> Self {
        UniqueId { version: PROTOCOL_VERSION, token, addresses }
    }

    /// A token that no other job has.
    pub fn random_token() -> Result<[u8; 16]> {
        let mut token = [0; 16];
        let got = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::errno("unique id", "random token", e))?;
        // Linux gives 256 bytes and less whole.
        if got == token.len() { Ok(token) } else { Err(Error::invalid("unique id", "too few random bytes")) }
    }

    /// Protocol version of the build that made this id.
    pub fn version(&self) -> u16 {
        self.version
    }

    /// The job's token.
    pub fn token(&self) -> [u8; 16] {
        self.token
    }

    /// Where the store listens.
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
        write!(f, "tinynccl-{}-", self.version)?;
        for byte in self.token {
            write!(f, "{byte:02x}")?;
        }
        for (i, address) in self.addresses.iter().enumerate() {
            write!(f, "{}{address}", if i == 0 { '@' } else { ',' })?;
        }
        Ok(())
    }
}

/// Without the token, so that a log does not give it away.
impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UniqueId").field("version", &self.version).field("addresses", &self.addresses).finish()
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse(text.trim()).map_err(|detail| Error::Config {
            name: "unique id".to_owned(),
            value: text.chars().take(200).collect(),
            detail: format!("{detail}; expected tinynccl-1-<32 hex digits>@<ip:port>,<ip:port>…"),
        })
    }
}

fn parse(text: &str) -> Result<UniqueId, String> {
    let rest = text.strip_prefix("tinynccl-").ok_or("it does not begin with tinynccl-")?;
    let (version, rest) = rest.split_once('-').ok_or("no version")?;
    let version = version.parse().map_err(|_| format!("version {version:?} is not a number"))?;
    let (hex, addresses) = rest.split_once('@').ok_or("no @ before the addresses")?;
    let token = parse_token(hex).ok_or("the token is not 32 hex digits")?;
    let mut list = Vec::new();
    for address in addresses.split(',') {
        if list.len() == MAX_ADDRESSES {
            return Err(format!("more than {MAX_ADDRESSES} addresses"));
        }
        list.push(address.parse().map_err(|_| format!("{address:?} is not ip:port"))?);
    }
    Ok(UniqueId { version, token, addresses: list })
}

fn parse_token(hex: &str) -> Option<[u8; 16]> {
    if hex.len() != 32 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(hex, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_goes_there_and_back() {
        let id = UniqueId::new(
            [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255],
            vec!["10.0.0.1:4711".parse().unwrap(), "[fe80::1%2]:9".parse().unwrap()],
        );
        let text = id.to_string();
        assert_eq!(text, "tinynccl-1-000102030405060708090a0b0c0d0eff@10.0.0.1:4711,[fe80::1%2]:9");
        assert_eq!(text.parse::<UniqueId>().unwrap(), id);
        assert!(!format!("{id:?}").contains("0405"), "the token must not show in logs");
    }

    #[test]
    fn bad_text_says_what_is_wrong() {
        let token = "0".repeat(32);
        for (text, wrong) in [
            ("".to_owned(), "does not begin"),
            ("hello".to_owned(), "does not begin"),
            ("tinynccl-1".to_owned(), "no version"),
            (format!("tinynccl-x-{token}@1.2.3.4:5"), "version \"x\""),
            (format!("tinynccl-1-{token}"), "no @"),
            ("tinynccl-1-00@1.2.3.4:5".to_owned(), "32 hex digits"),
            (format!("tinynccl-1-+{}@1.2.3.4:5", "0".repeat(31)), "32 hex digits"),
            (format!("tinynccl-1-{token}@localhost:5"), "is not ip:port"),
            (format!("tinynccl-1-{token}@1.2.3.4:5,"), "is not ip:port"),
            (format!("tinynccl-1-{token}@{}", vec!["1.2.3.4:5"; 65].join(",")), "more than 64"),
        ] {
            let e = text.parse::<UniqueId>().unwrap_err().to_string();
            assert!(e.contains(wrong) && e.contains("expected tinynccl-1-"), "{text}: {e}");
        }
    }

    #[test]
    fn random_tokens_differ() {
        assert_ne!(UniqueId::random_token().unwrap(), UniqueId::random_token().unwrap());
    }

    proptest! {
        #[test]
        fn any_id_goes_there_and_back(
            token in any::<[u8; 16]>(),
            addresses in prop::collection::vec(any::<SocketAddr>(), 1..=MAX_ADDRESSES),
        ) {
            // Flow information is not part of an address's text.
            let addresses = addresses.into_iter().map(|mut a| {
                if let SocketAddr::V6(six) = &mut a {
                    six.set_flowinfo(0);
                }
                a
            });
            let id = UniqueId::new(token, addresses.collect());
            prop_assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,80}", tail in "[0-9a-f@:,.\\[\\]-]{0,60}") {
            let _ = text.parse::<UniqueId>();
            let _ = format!("tinynccl-1-{tail}").parse::<UniqueId>();
        }
    }
}
