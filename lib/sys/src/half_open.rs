//! Unauthenticated connections: which of them are closed when there are too many.
//!
//! Each address has the same share, so that one that floods a listener crowds out its own connections only. Of one
//! address's connections, those that have sent nothing go first, and of these the oldest.

use std::collections::HashMap;
use std::net::IpAddr;

/// Source of a connection, by which the limit is shared: an IPv4 address, or the upper 64 bits of an IPv6 one, a
/// network in which a host has as many addresses as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source(u64);

impl Source {
    /// Returns the source of a connection from the address `ip`.
    pub fn of(ip: IpAddr) -> Source {
        Source(match ip.to_canonical() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            // Global ones begin with other bits than zeros.
            IpAddr::V6(ip) => (ip.to_bits() >> 64) as u64,
        })
    }
}

impl From<&str> for Source {
    /// Returns the source of a connection that is described by its address, perhaps with a port. All other descriptions
    /// have one source in common.
    fn from(address: &str) -> Source {
        let ip = address.parse().map(|address: std::net::SocketAddr| address.ip());
        ip.or_else(|_| address.parse()).map_or(Source(0), Source::of)
    }
}

/// Returns the indices of the connections that are to be closed so that `most` stay. `connections` lists the oldest
/// first, each with true if it has sent something.
pub fn excess(connections: impl IntoIterator<Item = (Source, bool)>, most: usize) -> Vec<usize> {
    // By source, the indices of its connections; those that go first are at the end.
    let mut sources: HashMap<Source, [Vec<usize>; 2]> = HashMap::new();
    let mut count = 0;
    for (place, (source, has_spoken)) in connections.into_iter().enumerate() {
        let [silent, spoken] = sources.entry(source).or_default();
        if has_spoken { spoken } else { silent }.push(place);
        count += 1;
    }
    for places in sources.values_mut().flatten() {
        places.reverse();
    }
    let mut gone = Vec::new();
    while count - gone.len() > most {
        let size = |places: &[Vec<usize>; 2]| places[0].len() + places[1].len();
        let Some([silent, spoken]) = sources.values_mut().max_by_key(|places| size(places)) else { break };
        gone.extend(silent.pop().or_else(|| spoken.pop()));
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(address: &str) -> Source {
        Source::from(address)
    }

    #[test]
    fn an_address_crowds_out_its_own() {
        let flood = (from("10.0.0.9:1"), true);
        let mut clients = vec![flood; 300];
        // One that has just come, and one that came before all of them.
        clients.insert(0, (from("10.0.0.1:1"), false));
        clients.push((from("10.0.0.2:1"), false));
        let gone = excess(clients.iter().copied(), 128);
        assert_eq!(gone.len(), 302 - 128);
        assert_eq!(gone, (1..=174).collect::<Vec<_>>(), "the oldest of the flood");
        assert!(excess(clients, 302).is_empty());
    }

    #[test]
    fn those_that_have_said_something_stay_longer() {
        let [one, other] = [from("10.0.0.1:1"), from("10.0.0.2:1")];
        let clients = [(one, true), (one, false), (one, true), (one, false), (other, false)];
        assert_eq!(excess(clients, 4), [1]);
        assert_eq!(excess(clients, 3), [1, 3]);
        assert_eq!(excess(clients, 2), [1, 3, 0]);
        assert_eq!(excess(clients, 0).len(), 5);
    }

    #[test]
    fn a_host_has_one_share_whatever_it_is_called() {
        assert_eq!(from("[::ffff:10.0.0.1]:7"), from("10.0.0.1:9"));
        assert_eq!(from("[2001:db8::1]:7"), from("[2001:db8::ffff:2]:7"));
        assert_ne!(from("[2001:db8::1]:7"), from("[2001:db8:1::1]:7"));
        assert_ne!(from("10.0.0.1:7"), from("10.0.0.2:7"));
        assert_eq!(from("shared memory of process 7"), from("shared memory of process 8"));
    }
}
