//! Creates process groups.

use std::sync::Arc;

use super::choose::{Facts, choose};
use super::gpu;
use super::{BackendType, ProcessGroup, make, mpi, nccl};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, Environment, Sums};
use tinynccl_transport::bootstrap::{UniqueId, rendezvous_from, rendezvous_from_env};

/// The GPU of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// None; backend nccl then takes the one of the local rank.
    #[default]
    None,
    /// The one with the number of the local rank. If a host has more ranks than GPUs, they are assigned round robin.
    LocalRank,
    /// The one of this number (`CUDA_VISIBLE_DEVICES` counts).
    Ordinal(usize),
}

/// The rendezvous of the ranks, and their options.
#[derive(Debug, Clone)]
pub struct InitOptions {
    join: Join,
    device: Device,
    config: Option<Config>,
}

#[derive(Debug, Clone)]
enum Join {
    Environment,
    Address { host: String, port: u16, rank: usize, world_size: usize },
    Id { id: UniqueId, rank: usize, world_size: usize },
}

impl Default for InitOptions {
    fn default() -> InitOptions {
        InitOptions::from_env()
    }
}

impl InitOptions {
    fn of(join: Join) -> InitOptions {
        InitOptions { join, device: Device::None, config: None }
    }

    /// From the launcher's environment: ours, torchrun's (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`,
    /// `MASTER_PORT`), Open MPI's, MPICH's or Slurm's; see [`rendezvous_from_env`].
    pub fn from_env() -> InitOptions {
        InitOptions::of(Join::Environment)
    }

    /// Joins as `rank` of `world_size` ranks, whose rendezvous is at `host` and `port`, where rank 0 listens. The local
    /// rank is `LOCAL_RANK`, or the rank where all ranks are on one host.
    pub fn address(host: impl Into<String>, port: u16, rank: usize, world_size: usize) -> InitOptions {
        InitOptions::of(Join::Address { host: host.into(), port, rank, world_size })
    }

    /// Joins as `rank` of `world_size` ranks, whose rendezvous is the server of `id`.
    pub fn id(id: &UniqueId, rank: usize, world_size: usize) -> InitOptions {
        InitOptions::of(Join::Id { id: id.clone(), rank, world_size })
    }

    /// The GPU of this rank; without one, buffers are on the host.
    #[must_use]
    pub fn device(mut self, device: Device) -> InitOptions {
        self.device = device;
        self
    }

    /// Settings; else [`Config::from_env`].
    #[must_use]
    pub fn config(mut self, config: Config) -> InitOptions {
        self.config = Some(config);
        self
    }

    fn join(&self) -> Result<Comm> {
        let config = match &self.config {
            Some(config) => config.clone(),
            None => Config::from_env()?,
        };
        let rendezvous = match &self.join {
            Join::Environment => rendezvous_from_env(&config)?,
            Join::Id { id, rank, world_size } => return Comm::init(id, *rank, *world_size, config),
            Join::Address { host, port, rank, world_size } => {
                let environment = Environment::default();
                let given = |name: &str| match name {
                    "RANK" => Some(rank.to_string()),
                    "WORLD_SIZE" => Some(world_size.to_string()),
                    "MASTER_ADDR" => Some(host.clone()),
                    "MASTER_PORT" => Some(port.to_string()),
                    // Other variables of a launcher do not apply to this group.
                    "LOCAL_RANK" => environment.get(name),
                    _ => None,
                };
                let place = rendezvous_from(&given, &config);
                environment.check().and(place)?
            }
        };
        Comm::join(rendezvous, config)
    }
}

/// Joins the other ranks and makes a group of all of them; every rank calls it, with the same backend.
///
/// ```no_run
/// use tinynccl::ReduceOp;
/// use tinynccl::process_group::{BackendType, InitOptions, init_process_group};
///
/// # fn main() -> tinynccl::Result<()> {
/// let group = init_process_group(BackendType::Auto, &InitOptions::from_env())?;
/// let mut gradients = vec![group.rank() as f32; 1 << 20];
/// group.all_reduce_in_place(&mut gradients, ReduceOp::Avg)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Unsupported`] when a rank lacks the backend, naming the rank and the searched paths: the same on all ranks,
/// and no other backend is taken instead. [`Error::InvalidArgument`] when ranks request different backends; those of
/// [`Comm::from_env`].
pub fn init_process_group(backend: BackendType, options: &InitOptions) -> Result<ProcessGroup> {
    ProcessGroup::new(options.join()?, backend, options.device)
}

impl ProcessGroup {
    /// A group of the ranks of `comm`; every one of them calls it, with the same backend.
    ///
    /// # Errors
    /// As [`init_process_group`].
    pub fn new(comm: Comm, backend: BackendType, device: Device) -> Result<ProcessGroup> {
        let device = match (backend, device) {
            (BackendType::Nccl, Device::None) => Device::LocalRank,
            (_, device) => device,
        };
        let gpu = match device {
            Device::None => None,
            Device::LocalRank => Some(ordinal(None, comm.local_rank())),
            Device::Ordinal(number) => Some(ordinal(Some(number), comm.local_rank())),
        };
        let words = |e: Error| match e {
            Error::Unsupported { what, detail } => format!("{what}: {detail}"),
            other => other.to_string(),
        };
        // The other libraries round every addition.
        let rounds_once = || match comm.config().sum {
            Sums::Pairwise => Ok(()),
            Sums::Exact => {
                Err("TINYNCCL_SUM=exact is kept by backend tinynccl alone: ask for that, or unset it".to_owned())
            }
        };
        let facts = Facts {
            asked: backend.name().to_owned(),
            nccl: (backend == BackendType::Nccl || backend == BackendType::Auto && gpu.is_some())
                .then(|| rounds_once().and_then(|()| nccl::find(comm.config()).map_err(words))),
            mpi: (backend == BackendType::Mpi).then(|| rounds_once().and_then(|()| mpi::find(&comm).map_err(words))),
            gpu: gpu.map(|gpu| gpu.map_err(words)),
        };
        let all: Vec<Facts> = comm.exchange("process_group: what ranks ask for", &facts)?;
        let (kind, why) = choose(&all, comm.is_one_host())?;
        if comm.rank() == 0 {
            log::info!("process group of {} ranks: backend {kind}: {why}", comm.size());
        }
        let context = match facts.gpu {
            Some(Ok(number)) => Some(gpu::open(number)),
            _ => None,
        };
        let made = context.transpose().and_then(|context| make::make(kind, &comm, context));
        Self::together(comm, made, kind, why)
    }

    /// A group, if every rank has made its part.
    pub(super) fn together(
        comm: Comm,
        made: Result<Arc<dyn super::Backend>>,
        kind: BackendType,
        why: String,
    ) -> Result<ProcessGroup> {
        let failures: Vec<Option<String>> =
            comm.exchange("process_group: what came of it", &made.as_ref().err().map(Error::to_string))?;
        let backend = made?;
        if let Some((rank, failure)) = failures.iter().enumerate().find_map(|(r, f)| f.as_ref().map(|f| (r, f))) {
            return Err(Error::Unsupported {
                what: format!("backend {kind}"),
                detail: format!("rank {rank}: {failure}"),
            });
        }
        Ok(ProcessGroup::assemble(comm, backend, why))
    }
}

/// The GPU of this number, or of the local rank.
fn ordinal(number: Option<usize>, local_rank: usize) -> Result<usize> {
    let count = gpu::device_count()?;
    match number {
        Some(number) if number < count => Ok(number),
        None if count > 0 => Ok(local_rank % count),
        _ => Err(Error::Unsupported {
            what: number.map_or("a GPU".to_owned(), |n| format!("GPU {n}")),
            detail: format!("this host has {count} (as far as CUDA_VISIBLE_DEVICES shows them)"),
        }),
    }
}
