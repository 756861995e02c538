//! Rendezvous of the ranks of a new communicator.

use std::collections::HashMap;
use std::sync::{Mutex, Once, PoisonError};

use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::{Comm, Config, Secret};

use super::client::{self, Lookup};
use super::directory::{self, Claim};
use super::id::{Id, Kind, NO_NUMBER, name_of};
use super::{address, digest, listener};
use crate::abi::error::{Error, Result};

/// Joins the ranks of `id`.
pub(crate) fn by_id(id: &Id, rank: usize, size: usize, config: Config, stop: &dyn Fn() -> bool) -> Result<Comm> {
    match id.kind {
        Kind::Store => by_store(id, rank, size, config, stop),
        Kind::Address if size == 1 => alone(config),
        Kind::Address => {
            config.check_key("NCCL_COMM_ID, a public address,")?;
            if rank == 0 && !config.has_secret() && !id.addresses.iter().all(|address| address.ip().is_loopback()) {
                static ONCE: Once = Once::new();
                ONCE.call_once(|| {
                    log::warn!(
                        "NCCL_COMM_ID is no secret: each process that reaches the address can take a rank's place; set TINYNCCL_SECRET (or \
                         TINYNCCL_SECRET_FILE) to the same random text for all ranks, as `openssl rand -hex 32` makes it"
                    );
                });
            }
            // A process makes its communicators of this kind in the same order as the others do.
            static TURNS: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);
            let turn = {
                let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
                let turn = turns.get_or_insert_default().entry(rank).or_default();
                *turn += 1;
                *turn
            };
            if rank == 0 {
                let mut opened = id.addresses.iter().map(|address| listener::open_at(*address));
                // Of several addresses of a name some may be another host's.
                let first = opened.next().unwrap_or(Ok(()));
                opened.fold(first, Result::or)?;
            }
            let lookup = Lookup { addresses: &id.addresses, name: id.secret, number: NO_NUMBER, stays: false };
            at_new_store(&id.secret, &turn.to_le_bytes(), lookup, (rank, size), config, stop)
        }
    }
}

/// Joins the ranks of an id that a process has made. They all connect to its store, also a single rank with an id of
/// another process: other ranks may have been given a different size.
fn by_store(id: &Id, rank: usize, size: usize, config: Config, stop: &dyn Fn() -> bool) -> Result<Comm> {
    let comm = match directory::here()?.claim(id, size == 1, &config)? {
        Claim::Alone => return alone(config),
        Claim::Host(server) => Comm::init_with_server(*server, rank, size, config.clone())?,
        Claim::Guest => {
            let name = name_of(&id.secret);
            let lookup = Lookup { addresses: &id.addresses, name, number: id.number, stays: true };
            let store = client::find(&lookup, &config, stop)?;
            Comm::init(&UniqueId::new(Secret::new(id.secret), store), rank, size, config.clone())?
        }
    };
    if size > 1 { Ok(comm) } else { alone(config) }
}

/// Makes the communicator of a single rank.
fn alone(config: Config) -> Result<Comm> {
    let mut all = Comm::threads(1, config)?;
    all.pop().ok_or_else(|| Error::internal("a world of one rank has none"))
}

/// Joins the ranks at a new store in the process of the new rank 0, at whose listener `lookup` finds it. `token` and
/// `purpose` together are unique to this rendezvous: its name and secret are derived from them.
pub(crate) fn at_new_store(
    token: &[u8; 32],
    purpose: &[u8],
    lookup: Lookup<'_>,
    (rank, size): (usize, usize),
    config: Config,
    stop: &dyn Fn() -> bool,
) -> Result<Comm> {
    if size == 1 {
        return alone(config);
    }
    let name = digest::of("store", &[token, purpose]);
    let secret = Secret::new(digest::of("secret", &[token, purpose]));
    if rank == 0 {
        let server = Server::open(address::anywhere(&config)?, secret, &config)?;
        directory::here()?.publish(name, &server);
        return Ok(Comm::init_with_server(server, rank, size, config)?);
    }
    let store = client::find(&Lookup { name, ..lookup }, &config, stop)?;
    Ok(Comm::init(&UniqueId::new(secret, store), rank, size, config)?)
}
