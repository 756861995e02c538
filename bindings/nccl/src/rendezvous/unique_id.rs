//! `ncclGetUniqueId`: new ids, of this process or of `NCCL_COMM_ID`.

use std::net::{SocketAddr, ToSocketAddrs};

use super::id::{Id, Kind, MOST, NO_NUMBER};
use super::{digest, directory, listener};
use crate::abi;
use crate::abi::error::{Error, Result};
use crate::abi::export::{export, out};
use crate::env::{settings, variables};

/// Makes a new id. Its store will be in this process, which has to live until the rendezvous is complete.
pub(crate) fn new() -> Result<Id> {
    if let Some(id) = from_environment()? {
        return Ok(id);
    }
    let all = listener::addresses(&settings::config()?)?;
    // Loopback only where there is nothing else: another host would try its own.
    let outside: Vec<SocketAddr> = all.iter().copied().filter(|address| !address.ip().is_loopback()).collect();
    let (number, secret) = directory::here()?.new_id();
    Ok(Id { kind: Kind::Store, number, secret, addresses: if outside.is_empty() { all } else { outside } })
}

/// Returns the id that `NCCL_COMM_ID` stands for. It is no secret: who reaches the address can join, unless
/// `TINYNCCL_SECRET` is set.
fn from_environment() -> Result<Option<Id>> {
    let Some(text) = variables::get("NCCL_COMM_ID").filter(|text| !text.trim().is_empty()) else { return Ok(None) };
    let text = text.trim();
    let wrong = |why: &str| {
        Error::usage(format!(
            "NCCL_COMM_ID={text:?}: {why}; expected address:port or name:port, like 10.0.0.1:5000, [fd00::1]:5000 or \
             node1:5000"
        ))
    };
    let addresses = match text.parse() {
        Ok(address) => vec![address],
        Err(_) => by_name(text).map_err(|why| wrong(&why))?,
    };
    if addresses.iter().any(|address| address.port() == 0) {
        return Err(wrong("its port is 0, and all ranks must know it"));
    }
    // A name may lead to other addresses on another host.
    let what = if text.parse::<SocketAddr>().is_ok() { addresses[0].to_string() } else { text.to_owned() };
    let secret = digest::of("NCCL_COMM_ID", &[what.as_bytes()]);
    Ok(Some(Id { kind: Kind::Address, number: NO_NUMBER, secret, addresses }))
}

/// Resolves the addresses of `name:port`.
fn by_name(text: &str) -> Result<Vec<SocketAddr>, String> {
    let (name, port) = text.rsplit_once(':').ok_or("it has no port")?;
    let port: u16 = port.parse().map_err(|_| format!("{port:?} is no port"))?;
    if name.is_empty() {
        return Err("it has no address".to_owned());
    }
    let found: Vec<SocketAddr> =
        (name, port).to_socket_addrs().map_err(|e| format!("{name:?}: {e}"))?.take(MOST).collect();
    if found.is_empty() { Err(format!("{name:?} has no address")) } else { Ok(found) }
}

export! {
    /// Writes a new id for the ranks of one communicator. One rank calls it and gives the bytes to all others, over a
    /// channel that no one else reads: any process that has them can join.
    fn ncclGetUniqueId / pncclGetUniqueId [] (id: *mut abi::UniqueId) {
        // SAFETY: NULL or the caller's variable.
        let id = unsafe { out("uniqueId", id) }?;
        *id = new()?.encode();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_names() {
        let found = by_name("localhost:5000").unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback() && address.port() == 5000), "{found:?}");
        for wrong in ["localhost", ":5000", "localhost:", "localhost:x", "localhost:70000", "localhost:-1"] {
            assert!(by_name(wrong).is_err(), "{wrong}");
        }
    }
}
