//! The kernel's messages about interfaces and addresses (rtnetlink(7)), taken apart. No I/O: `engine::watch` reads them.
//!
//! ```text
//! | length 32 | type 16 | flags 16 | sequence 32 | port 32 | interface or address | attributes: length 16, type 16, ... |
//! ```
//! All numbers are in the machine's byte order, and everything is padded to 4 bytes.

use std::net::IpAddr;

use crate::interface::is_up;

/// A change of an interface or of its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// An interface is up, or not.
    Link { index: u32, up: bool },
    /// An interface is no more.
    Gone { index: u32 },
    /// An address of an interface is there, or not any more.
    Address { index: u32, ip: IpAddr, there: bool },
}

/// Splits the first `N` bytes off.
fn take<'a, const N: usize>(bytes: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(head)
}

fn u16_of(bytes: &mut &[u8]) -> Option<usize> {
    take(bytes).map(|b| usize::from(u16::from_ne_bytes(*b)))
}

fn u32_of(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).map(|b| u32::from_ne_bytes(*b))
}

/// Splits `len` bytes and their padding off.
fn piece<'a>(bytes: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (head, rest) = bytes.split_at_checked(len)?;
    *bytes = rest.get(head.len().wrapping_neg() & 3..).unwrap_or_default();
    Some(head)
}

/// Parses the messages of a datagram into changes, in order. Those that are not known or not whole are left out.
pub(crate) fn changes(mut datagram: &[u8]) -> Vec<Change> {
    let mut all = Vec::new();
    while let Some((kind, body)) = message(&mut datagram) {
        let change = match kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => link(kind, body),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => address(kind, body),
            _ => None,
        };
        all.extend(change);
    }
    all
}

fn message<'a>(datagram: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let len = u32::from_ne_bytes(*datagram.first_chunk()?) as usize;
    let mut message = piece(datagram, len)?;
    let header: &[u8; 16] = take(&mut message)?;
    let kind = u16::from_ne_bytes(*header.get(4..)?.first_chunk()?);
    Some((kind, message))
}

/// `struct ifinfomsg`.
fn link(kind: u16, mut body: &[u8]) -> Option<Change> {
    let [family, _, _, _] = *take(&mut body)?;
    let (index, flags) = (u32_of(&mut body)?, u32_of(&mut body)?);
    // Messages of a family are about a bridge's ports.
    if i32::from(family) != libc::AF_UNSPEC {
        return None;
    }
    Some(if kind == libc::RTM_DELLINK { Change::Gone { index } } else { Change::Link { index, up: is_up(flags) } })
}

/// `struct ifaddrmsg`.
fn address(kind: u16, mut body: &[u8]) -> Option<Change> {
    let [family, _, low_flags, _] = *take(&mut body)?;
    let (index, mut flags) = (u32_of(&mut body)?, u32::from(low_flags));
    let (mut address, mut local) = (None, None);
    while let Some((kind, value)) = attribute(&mut body) {
        match kind {
            libc::IFA_ADDRESS => address = ip(family, value),
            libc::IFA_LOCAL => local = ip(family, value),
            libc::IFA_FLAGS => flags = value.first_chunk().map_or(flags, |b| u32::from_ne_bytes(*b)),
            _ => {}
        }
    }
    let there = kind == libc::RTM_NEWADDR;
    // An IPv6 address can be used, and is announced again, when no neighbour was found to have it.
    if there && flags & (libc::IFA_F_TENTATIVE | libc::IFA_F_DADFAILED) != 0 {
        return None;
    }
    // For a link between two points IFA_ADDRESS is the other end.
    Some(Change::Address { index, ip: local.or(address)?, there })
}

fn attribute<'a>(bytes: &mut &'a [u8]) -> Option<(u16, &'a [u8])> {
    let len = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
    let mut value = piece(bytes, len)?;
    let (_, kind) = (u16_of(&mut value)?, u16_of(&mut value)?);
    Some((kind as u16, value))
}

fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => value.first_chunk::<4>().map(|b| IpAddr::from(*b)),
        libc::AF_INET6 => value.first_chunk::<16>().map(|b| IpAddr::from(*b)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message_of(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = (16 + body.len() as u32).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(body);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn attribute_of(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn link_of(kind: u16, family: u8, flags: i32) -> Vec<u8> {
        let body = [&[family, 0, 0, 0][..], &7u32.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 4]].concat();
        message_of(kind, &[body, attribute_of(libc::IFLA_IFNAME, b"eth0\0")].concat())
    }

    fn address_of(kind: u16, family: i32, flags: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let head = [&[family as u8, 24, flags, 0][..], &7u32.to_ne_bytes()].concat();
        message_of(kind, &[head, attributes.concat()].concat())
    }

    #[test]
    fn links_come_and_go() {
        let up = libc::IFF_UP | libc::IFF_RUNNING;
        let datagram = [
            link_of(libc::RTM_NEWLINK, 0, up),
            link_of(libc::RTM_NEWLINK, 0, libc::IFF_UP),
            link_of(libc::RTM_DELLINK, libc::AF_BRIDGE as u8, up),
            link_of(libc::RTM_DELLINK, 0, 0),
        ];
        let expected =
            [Change::Link { index: 7, up: true }, Change::Link { index: 7, up: false }, Change::Gone { index: 7 }];
        assert_eq!(changes(&datagram.concat()), expected);
    }

    #[test]
    fn addresses_come_and_go() {
        let v4 = [attribute_of(libc::IFA_ADDRESS, &[192, 0, 2, 9]), attribute_of(libc::IFA_LOCAL, &[192, 0, 2, 1])];
        let v6 = attribute_of(libc::IFA_ADDRESS, &[0xfd; 16]);
        let tentative = attribute_of(libc::IFA_FLAGS, &(libc::IFA_F_TENTATIVE | 0x100).to_ne_bytes());
        let datagram = [
            address_of(libc::RTM_NEWADDR, libc::AF_INET, 0x80, &v4),
            address_of(libc::RTM_NEWADDR, libc::AF_INET6, 0, &[tentative.clone(), v6.clone()]),
            address_of(libc::RTM_NEWADDR, libc::AF_INET6, libc::IFA_F_TENTATIVE as u8, std::slice::from_ref(&v6)),
            address_of(libc::RTM_NEWADDR, libc::AF_INET6, 0, std::slice::from_ref(&v6)),
            address_of(libc::RTM_DELADDR, libc::AF_INET6, libc::IFA_F_TENTATIVE as u8, &[v6]),
            address_of(libc::RTM_NEWADDR, libc::AF_INET, 0, &[tentative]),
            message_of(libc::RTM_NEWROUTE, &[1, 2, 3]),
        ];
        let (ours, other) = (IpAddr::from([192, 0, 2, 1]), IpAddr::from([0xfd; 16]));
        let expected = [(ours, true), (other, true), (other, false)];
        let expected = expected.map(|(ip, there)| Change::Address { index: 7, ip, there });
        assert_eq!(changes(&datagram.concat()), expected);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 16u16..24, family in 0u8..12) {
            changes(&bytes);
            changes(&message_of(kind, &[&[family][..], &bytes].concat()));
        }
    }
}
