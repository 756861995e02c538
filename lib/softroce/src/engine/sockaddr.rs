//! Addresses as the system calls of batches have them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Room for an IPv4 or IPv6 address.
pub(super) type Raw = libc::sockaddr_in6;

pub(super) const EMPTY: Raw = Raw {
    sin6_family: 0,
    sin6_port: 0,
    sin6_flowinfo: 0,
    sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
    sin6_scope_id: 0,
};

/// Fills `raw`; returns how many of its bytes count.
pub(super) fn store(address: &SocketAddr, raw: &mut Raw) -> libc::socklen_t {
    match address {
        SocketAddr::V4(a) => {
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: a.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(a.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: `raw` is larger than an IPv4 address, and both are plain bytes aligned alike.
            unsafe { (&raw mut *raw).cast::<libc::sockaddr_in>().write(v4) };
            size_of::<libc::sockaddr_in>() as libc::socklen_t
        }
        SocketAddr::V6(a) => {
            *raw = Raw {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: a.port().to_be(),
                sin6_flowinfo: a.flowinfo().to_be(),
                sin6_addr: libc::in6_addr { s6_addr: a.ip().octets() },
                sin6_scope_id: a.scope_id(),
            };
            size_of::<Raw>() as libc::socklen_t
        }
    }
}

/// Reads what the kernel stored.
pub(super) fn load(raw: &Raw) -> Option<SocketAddr> {
    match i32::from(raw.sin6_family) {
        libc::AF_INET => {
            // SAFETY: the family is that of an IPv4 address; `raw` is larger.
            let v4 = unsafe { (&raw const *raw).cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), 0, raw.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_and_come() {
        for text in ["192.0.2.1:4791", "[fe80::1%3]:50000"] {
            let address: SocketAddr = text.parse().expect("address");
            let mut raw = EMPTY;
            store(&address, &mut raw);
            assert_eq!(load(&raw), Some(address));
        }
    }
}
