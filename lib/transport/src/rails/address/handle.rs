//! Handles of listeners: their addresses, and what a dialer must know.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use sha2::{Digest, Sha256};

use crate::bootstrap::Host;
use crate::bootstrap::interface::LocalAddress;
use crate::rails::address::ports::Remote;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::secret::Secret;

const MAGIC: [u8; 8] = *b"tnet\0\0\0\x01";
/// Addresses begin here; before are magic, secret, host, listener, two ports, two counts, whether there are more
/// addresses, and the owner's 8 bytes.
const ADDRESSES: usize = 56;
const OWNERS: std::ops::Range<usize> = 48..56;
const V4: usize = 5;
const V6: usize = 17;

/// Addresses and secret of a listener, in 128 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handle {
    /// Random bytes of this listener, which a dialer has from the handle alone.
    pub(in crate::rails) secret: [u8; 16],
    pub(in crate::rails) host: u64,
    pub(in crate::rails) listener: u32,
    /// Ports for IPv4 and IPv6; 0 where it does not listen.
    pub(in crate::rails) ports: (u16, u16),
    pub(in crate::rails) addresses: Vec<Remote>,
    /// Addresses that carry no data, but at which an error may be sent.
    pub(in crate::rails) others: Vec<Remote>,
    /// True if its host has more addresses than fit, which it gives on request ([`relay`](crate::rails::relay)).
    pub(in crate::rails) more: bool,
}

/// Returns an identifier of the network that a process sees: equal for two that reach each other over loopback.
pub(in crate::rails) fn host(host: &Host) -> u64 {
    let text = format!(
        "{} {} {}",
        host.boot_id,
        if host.boot_id.is_empty() { &host.hostname } else { "" },
        host.net_namespace
    );
    let digest: [u8; 32] = Sha256::digest(text).into();
    digest.iter().take(8).fold(0, |all, byte| all << 8 | u64::from(*byte))
}

impl Handle {
    /// Length of a handle, in bytes.
    pub const BYTES: usize = 128;
    /// 8 bytes of the handle that nothing here reads: any owner of the handle may keep its own data there.
    pub const OWN: std::ops::Range<usize> = OWNERS;

    /// Makes a handle with as many of `local`, then of `others`, as fit: 14 of IPv4, or 4 of IPv6.
    pub(in crate::rails) fn new(
        secret: [u8; 16],
        host: u64,
        listener: u32,
        ports: (u16, u16),
        (local, others): (&[LocalAddress], &[LocalAddress]),
    ) -> Handle {
        let mut left_over = Self::BYTES - ADDRESSES;
        let mut more = false;
        let mut fit = |all: &[LocalAddress], needed: bool| {
            let mut fitting = Vec::new();
            for address in all {
                let (port, bytes) = if address.ip.is_ipv4() { (ports.0, V4) } else { (ports.1, V6) };
                if port == 0 {
                    continue;
                }
                if let Some(left) = left_over.checked_sub(bytes) {
                    left_over = left;
                    fitting.push(Remote { ip: address.ip, prefix: address.prefix });
                } else {
                    more |= needed;
                }
            }
            // IPv4 addresses first, as they stand in the bytes.
            fitting.sort_by_key(|a| a.ip.is_ipv6());
            fitting
        };
        let (addresses, others) = (fit(local, true), fit(others, false));
        Handle { secret, host, listener, ports, addresses, others, more }
    }

    /// Returns all of `local`, in as many handles as that takes.
    pub(in crate::rails) fn parts(host: u64, listener: u32, ports: (u16, u16), local: &[LocalAddress]) -> Vec<Handle> {
        let mut parts = Vec::new();
        let mut rest = local;
        loop {
            // By the longest: parts of both kinds of addresses are not filled.
            let fits = (1..=rest.len()).rev().find(|n| {
                rest.get(..*n).is_some_and(|some| !Handle::new([0; 16], host, listener, ports, (some, &[])).more)
            });
            let (some, behind) = rest.split_at(fits.unwrap_or(0));
            parts.push(Handle::new([0; 16], host, listener, ports, (some, &[])));
            if behind.is_empty() || some.is_empty() {
                return parts;
            }
            rest = behind;
        }
    }

    /// Adds addresses that another handle of the same host has.
    pub(in crate::rails) fn merge(&mut self, other: &Handle) {
        for address in &other.addresses {
            if !self.addresses.contains(address) {
                self.addresses.push(*address);
            }
        }
    }

    /// Returns the secret of the listener's connections.
    pub(in crate::rails) fn key(&self) -> Secret {
        let mut bytes = [0; 32];
        bytes.iter_mut().zip(self.secret).for_each(|(to, from)| *to = from);
        Secret::new(bytes).derive("net", &self.listener.to_le_bytes())
    }

    /// Returns the address of the acceptor to dial at `ip`, with its port.
    pub(in crate::rails) fn acceptor_at(&self, ip: IpAddr) -> SocketAddr {
        SocketAddr::new(ip, if ip.is_ipv4() { self.ports.0 } else { self.ports.1 })
    }

    /// Encodes the handle.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let count = |all: &[Remote]| {
            let v4 = all.iter().filter(|a| a.ip.is_ipv4()).count();
            [v4 as u8, (all.len() - v4) as u8]
        };
        let mut text = Vec::with_capacity(Self::BYTES);
        text.extend(MAGIC);
        text.extend(self.secret);
        text.extend(self.host.to_le_bytes());
        text.extend(self.listener.to_le_bytes());
        text.extend(self.ports.0.to_le_bytes());
        text.extend(self.ports.1.to_le_bytes());
        text.extend(count(&self.addresses));
        text.extend(count(&self.others));
        text.push(u8::from(self.more));
        text.resize(ADDRESSES, 0);
        for address in self.addresses.iter().chain(&self.others) {
            match address.ip {
                IpAddr::V4(ip) => text.extend(ip.octets()),
                IpAddr::V6(ip) => text.extend(ip.octets()),
            }
            text.push(address.prefix);
        }
        let mut bytes = [0; Self::BYTES];
        bytes.iter_mut().zip(text).for_each(|(to, from)| *to = from);
        bytes
    }

    /// Decodes a handle.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it is no handle.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Handle> {
        let wrong = || Error::invalid("connect", "expected a handle of this plugin; all ranks must load the same one");
        let mut rest = &bytes[..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at_checked(n)?;
            rest = tail;
            Some(head)
        };
        fn array<const N: usize>(bytes: Option<&[u8]>) -> Option<[u8; N]> {
            bytes?.try_into().ok()
        }
        let mut parse = || {
            (array(take(8))? == MAGIC).then_some(())?;
            let secret = array(take(16))?;
            let host = u64::from_le_bytes(array(take(8))?);
            let listener = u32::from_le_bytes(array(take(4))?);
            let ports = (u16::from_le_bytes(array(take(2))?), u16::from_le_bytes(array(take(2))?));
            let counts: [u8; 4] = array(take(4))?;
            let [more] = array(take(1))?;
            take(ADDRESSES - 45)?;
            let mut list = |v4: u8, v6: u8| {
                let mut addresses = Vec::new();
                for _ in 0..v4 {
                    let [a, b, c, d, prefix] = array(take(V4))?;
                    addresses.push(Remote { ip: Ipv4Addr::new(a, b, c, d).into(), prefix });
                }
                for _ in 0..v6 {
                    let ip: [u8; 16] = array(take(16))?;
                    let [prefix] = array(take(1))?;
                    addresses.push(Remote { ip: Ipv6Addr::from(ip).into(), prefix });
                }
                Some(addresses)
            };
            let (addresses, others) = (list(counts[0], counts[1])?, list(counts[2], counts[3])?);
            Some(Handle { secret, host, listener, ports, addresses, others, more: more != 0 })
        };
        parse().ok_or_else(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn port(ip: &str, prefix: u8) -> LocalAddress {
        LocalAddress { interface: "x".to_owned(), ip: ip.parse().unwrap(), prefix, loopback: false }
    }

    #[test]
    fn a_handle_survives_its_text() {
        let local = [port("fd00::1", 64), port("10.0.0.1", 24), port("127.0.0.1", 8)];
        let handle = Handle::new([7; 16], 5, 3, (4711, 4712), (&local, &[port("192.0.2.1", 24)]));
        assert_eq!(handle.addresses[0].to_string(), "10.0.0.1/24");
        assert_eq!(handle.others.len(), 1);
        let mut bytes = handle.to_bytes();
        bytes[Handle::OWN].fill(9);
        assert_eq!(Handle::parse(&bytes).unwrap(), handle);
        assert_ne!(handle.key(), Handle { listener: 4, ..handle.clone() }.key());
    }

    #[test]
    fn more_addresses_than_fit_are_in_several_handles() {
        let v4: Vec<LocalAddress> = (0..20).map(|i| port(&format!("10.0.{i}.1"), 24)).collect();
        let handle = Handle::new([0; 16], 0, 0, (1, 1), (&v4, &v4));
        assert_eq!((handle.addresses.len(), handle.others.len(), handle.more), (14, 0, true));
        assert_eq!(Handle::parse(&handle.to_bytes()).unwrap(), handle);
        let all: Vec<LocalAddress> = v4.iter().cloned().chain([port("fd00::1", 64), port("fd01::1", 64)]).collect();
        let parts = Handle::parts(7, 0, (1, 1), &all);
        assert_eq!(parts.iter().map(|p| p.addresses.len()).collect::<Vec<_>>(), [14, 8]);
        let mut whole = parts[0].clone();
        parts.iter().for_each(|part| whole.merge(&Handle::parse(&part.to_bytes()).unwrap()));
        assert_eq!(whole.addresses.len(), 22);
        assert_eq!(Handle::parts(7, 0, (1, 1), &[]).len(), 1);
        assert_eq!(Handle::new([0; 16], 0, 0, (1, 0), (&[port("fd00::1", 64)], &[])).addresses, [], "no IPv6 there");
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in proptest::collection::vec(any::<u8>(), Handle::BYTES), ours: bool) {
            let mut bytes: [u8; Handle::BYTES] = text.try_into().unwrap();
            if ours {
                bytes[..8].copy_from_slice(&MAGIC);
            }
            if let Ok(handle) = Handle::parse(&bytes) {
                prop_assert_eq!(Handle::parse(&handle.to_bytes()).unwrap(), handle);
            }
        }
    }
}
