//! Rendezvous of the ranks of a new communicator.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tinynccl::bootstrap::{Server, UniqueId};
use tinynccl::config::CudaFailure;
use tinynccl::cuda::{DeviceComm, Uncaptured};
use tinynccl::{Comm, Config, Secret, interrupt};

use crate::config::Options;
use crate::directory::{self, Claim};
use crate::fault::{Fault, Result};
use crate::gpu::{self, Current};
use crate::id::{Id, Kind};
use crate::member::{Member, Ranks, Roster};
use crate::visit::{self, Door};
use crate::{digest, door, place, settings};

/// The settings of a communicator with these options.
pub(crate) fn config(options: &Options) -> Result<Config> {
    settings::check()?;
    let mut config = settings::config()?;
    // NCCL's own variable is in `config` already, and counts before a communicator's configuration.
    if ["TINYNCCL_CUDA_BLOCKS", "NCCL_MAX_CTAS"].iter().all(|name| settings::variable(name).is_none())
        && let Some(blocks) = options.blocks
    {
        config.cuda_blocks = blocks;
    }
    // A program with a non-blocking communicator polls for failures and aborts it. What it has on its streams behind a
    // failed call (an optimizer's step) must not run before.
    if !options.blocking && settings::variable("TINYNCCL_CUDA_FAILURE").is_none() {
        config.cuda_failure = CudaFailure::Hold;
    }
    Ok(config)
}

/// Joins the ranks of `id`.
pub(crate) fn by_id(id: &Id, rank: usize, size: usize, config: Config, stop: &dyn Fn() -> bool) -> Result<Comm> {
    match id.kind {
        Kind::Store => by_store(id, rank, size, config, stop),
        Kind::Door if size == 1 => alone(config),
        Kind::Door => {
            // A process makes its communicators of this kind in the same order as the others do.
            static TURNS: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);
            let turn = {
                let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
                let turn = turns.get_or_insert_default().entry(rank).or_default();
                *turn += 1;
                *turn
            };
            if rank == 0 {
                let mut opened = id.addresses.iter().map(|address| door::open_at(*address));
                // Of several addresses of a name some may be another host's.
                let first = opened.next().unwrap_or(Ok(()));
                opened.fold(first, Result::or)?;
            }
            let door = Door { addresses: &id.addresses, name: id.secret, number: directory::NO_NUMBER, stays: false };
            afresh(&id.secret, &turn.to_le_bytes(), door, (rank, size), config, stop)
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
            let name = directory::name_of(&id.secret);
            let door = Door { addresses: &id.addresses, name, number: id.number, stays: true };
            let store = visit::ask(&door, &config, stop)?;
            Comm::init(&UniqueId::new(Secret::new(id.secret), store), rank, size, config.clone())?
        }
    };
    if size > 1 { Ok(comm) } else { alone(config) }
}

fn alone(config: Config) -> Result<Comm> {
    let mut all = Comm::threads(1, config)?;
    all.pop().ok_or_else(|| Fault::internal("a world of one rank has none"))
}

/// Joins the ranks at a new store in the process of the new rank 0, whose acceptor is `door`. `token` and `purpose`
/// together are unique to this rendezvous: its name and secret are derived from them.
pub(crate) fn afresh(
    token: &[u8; 32],
    purpose: &[u8],
    door: Door<'_>,
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
        let server = Server::open(place::anywhere(&config)?, secret, &config)?;
        directory::here()?.post(name, &server);
        return Ok(Comm::init_with_server(server, rank, size, config)?);
    }
    let store = visit::ask(&Door { name, ..door }, &config, stop)?;
    Ok(Comm::init(&UniqueId::new(secret, store), rank, size, config)?)
}

/// Makes `comm` a communicator of GPUs, with the GPU of `member`.
pub(crate) fn with_gpu(comm: Comm, member: &Member) -> Result<Ranks> {
    let context = gpu::context(member.ordinal())?;
    let (_current, _uncaptured) = (Current::enter(&context)?, Uncaptured::begin());
    let device = DeviceComm::new(&comm, &context)?;
    let roster = roster(&comm)?;
    member.identify(&roster.token);
    let (rank, size) = (comm.rank(), comm.size());
    log::info!(
        "communicator {}: rank {rank} of {size} on GPU {}, path {} ({}), {} MiB",
        member.name(),
        member.ordinal(),
        device.path(),
        device.path_reason(),
        device.window_bytes() >> 20
    );
    Ok(Ranks { device: Arc::new(device), comm, roster })
}

fn roster(comm: &Comm) -> Result<Roster> {
    let token = digest::random()?;
    if comm.size() == 1 {
        return Ok(Roster { token, doors: vec![Vec::new()] });
    }
    let door: Vec<u8> = door::addresses(comm.config())?.into_iter().flat_map(place::encode).collect();
    let all = comm.exchange_bytes("roster", &[&token[..], &door].concat())?;
    let broken = || Fault::internal("a rank's door does not parse: do all ranks load the same library?");
    let parts: Vec<(&[u8; 32], &[u8])> =
        all.iter().map(|bytes| bytes.split_first_chunk().ok_or_else(broken)).collect::<Result<_>>()?;
    let doors = parts.iter().map(|(_, door)| place::decode(door).ok_or_else(broken)).collect::<Result<_>>()?;
    let token = parts.first().map(|(token, _)| **token).ok_or_else(broken)?;
    Ok(Roster { token, doors })
}

thread_local! {
    /// The communicator that this thread makes, and the one that it makes it from.
    static MAKING: RefCell<Vec<Arc<Member>>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` so that an abort of one of `members` ends its waits.
pub(crate) fn stoppable<R>(members: Vec<Arc<Member>>, work: impl FnOnce() -> R) -> R {
    /// Puts back what was there before, also when the work unwinds.
    struct Restore(Vec<Arc<Member>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            MAKING.set(std::mem::take(&mut self.0));
        }
    }
    let _restore = Restore(MAKING.replace(members));
    interrupt::watched(|| MAKING.with_borrow(|making| making.iter().any(|member| member.is_stopped())), work)
}
