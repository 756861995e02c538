//! Addresses in few bytes, for unique ids and for the replies of listeners.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tinynccl::Config;
use tinynccl::bootstrap::interface;

use crate::abi::error::Result;

/// Bytes of an address: a kind, an IP address, a port.
pub(crate) const BYTES: usize = 19;

/// Encodes an address.
pub(crate) fn encode(address: SocketAddr) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    let (kind, rest) = bytes.split_at_mut(1);
    let (ip, port) = rest.split_at_mut(16);
    match address.ip() {
        IpAddr::V4(four) => {
            kind[0] = 4;
            ip[..4].copy_from_slice(&four.octets());
        }
        IpAddr::V6(six) => {
            kind[0] = 6;
            ip.copy_from_slice(&six.octets());
        }
    }
    port.copy_from_slice(&address.port().to_be_bytes());
    bytes
}

/// Decodes addresses; `None` if these are not addresses.
pub(crate) fn decode(bytes: &[u8]) -> Option<Vec<SocketAddr>> {
    let (all, rest) = bytes.as_chunks::<BYTES>();
    rest.is_empty().then(|| all.iter().map(one).collect())?
}

fn one(bytes: &[u8; BYTES]) -> Option<SocketAddr> {
    let ip: [u8; 16] = bytes[1..17].try_into().ok()?;
    let ip = match bytes[0] {
        4 => IpAddr::V4(Ipv4Addr::new(ip[0], ip[1], ip[2], ip[3])),
        6 => IpAddr::V6(Ipv6Addr::from(ip)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes([bytes[17], bytes[18]])))
}

/// Returns the unspecified address to bind, port 0, so that a listener is reached at all addresses that `config`
/// allows.
pub(crate) fn anywhere(config: &Config) -> Result<SocketAddr> {
    let local = interface::local_addresses(config)?;
    let outside = |four: bool| local.iter().any(|address| !address.loopback && address.ip.is_ipv4() == four);
    let any = if outside(false) && !outside(true) {
        IpAddr::from(Ipv6Addr::UNSPECIFIED)
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    Ok(SocketAddr::new(any, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_there_and_back() {
        let all: Vec<SocketAddr> = ["10.0.0.1:4711", "[fd00::9]:9"].map(|text| text.parse().unwrap()).to_vec();
        let bytes: Vec<u8> = all.iter().flat_map(|address| encode(*address)).collect();
        assert_eq!(decode(&bytes), Some(all));
        assert_eq!((decode(&bytes[1..]), decode(&[])), (None, Some(Vec::new())));
        assert_eq!(decode(&[0; BYTES]), None);
    }
}
