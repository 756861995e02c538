//! Creates device communicators: chooses the path, and sets up what it needs.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::CudaContext;

use super::alone::Alone;
use super::divided::{Part, not_divided};
use super::path_check;
use crate::comm::{DeviceComm, Ledger, Order};
use crate::driver::{available, cuda};
use crate::hosted::reach::{Lanes, Reach};
use crate::hosted::{self, Hosted};
use crate::kernels::{Kernels, Team};
use crate::path::names::Names;
use crate::path::report::Report;
use crate::path::{self, DataPath};
use crate::peer::{Chooser, Peer, Registry, Scratch};
use crate::phased::Phased;
use crate::verify::Verifier;
use crate::window::{Layout, MAX_RANKS, RankGpu, Reached, Window, Windows, enable};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::{Config, CudaPath};
use tinynccl_sys::fork::Origin;

impl DeviceComm {
    /// Joins the ranks of `comm`, each with the device of its `context`. Every rank must call it.
    ///
    /// Calls take the peer path if all ranks reach each other's memory, otherwise the hosted path: see
    /// [`DeviceComm::path`]. With `TINYNCCL_CUDA_PATH=hosts` those of several hosts with as many ranks each take the
    /// peer path inside each host, and go through the hosts' memory between them.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when a path is requested (`TINYNCCL_CUDA_PATH=peer` or `hosts`) that these ranks cannot
    /// take.
    pub fn new(comm: &Comm, context: &Arc<CudaContext>) -> Result<DeviceComm> {
        available()?;
        let op = "DeviceComm::new";
        // A separate communicator, so that its messages do not mix with the caller's calls.
        let host = comm.split(Some(0), 0)?.ok_or_else(|| Error::invalid(op, "the split returned no communicator"))?;
        comm.attach_child(&host);
        if host.size() == 1 {
            return Self::alone(context, &host.config().clone(), Some(host));
        }
        let (config, rank) = (host.config().clone(), host.rank());
        let reached = match path::obstacle(config.cuda_path, host.is_one_host(), host.size()) {
            Some(why) => Err(why),
            None => Self::reach(&host, context)?,
        };
        let device = match reached {
            Ok(Reached { windows, shares_gpu, .. }) => {
                Self::over_windows(windows, (rank, host.size()), context, &config, Some(host), shares_gpu, None)?
            }
            Err(why) if config.cuda_path == CudaPath::Peer => return Err(refused(why)),
            Err(_) if config.cuda_path == CudaPath::Hosts && !host.is_one_host() => {
                match Self::inside(&host, context)? {
                    Ok((division, inner)) => Self::over_lanes(host, context, division, inner)?,
                    Err(why) => return Err(not_divided(why)),
                }
            }
            Err(why) => Self::hosted(host, context, why, None)?,
        };
        device.meet()?;
        Ok(device)
    }

    /// One rank, which needs no memory.
    fn alone(context: &Arc<CudaContext>, config: &Config, host: Option<Comm>) -> Result<DeviceComm> {
        let registry = Registry::new(context, 0, false);
        let chooser = Arc::new(Chooser::new(0, Layout::new(1, 1, config), registry, config));
        let path = (Arc::new(Alone::default()) as Arc<dyn DataPath>, "there is one rank: calls are copies".to_owned());
        Self::assemble((0, 1), context, config, host, path, chooser, None)
    }

    /// The windows of all ranks, checked. The inner error is the reason why kernels do not reach them.
    pub(super) fn reach(host: &Comm, context: &Arc<CudaContext>) -> Result<Result<Reached, String>> {
        let reached = match Reached::open(host, context)? {
            Ok(reached) => reached,
            Err(why) => return Ok(Err(why)),
        };
        let asked = host.config().cuda_path_check;
        let verdict = path_check::check(&reached.windows, context, host, asked, reached.shares_gpu)?;
        Ok(verdict.fault(&reached.names).map_or(Ok(reached), Err))
    }

    /// The ranks of one process, rank `r` with the device of `contexts[r]`; one thread may drive them all. Ranks may
    /// share a GPU; each then needs a separate stream, and their kernels have fewer blocks, so that all of them are
    /// resident.
    ///
    /// # Errors
    /// As [`DeviceComm::new`].
    pub fn local(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Vec<DeviceComm>> {
        available()?;
        let size = contexts.len();
        if size == 0 {
            return Err(Error::invalid("DeviceComm::local", "no contexts, expected one for each rank"));
        }
        if let [context] = contexts {
            return Ok(vec![Self::alone(context, config, None)?]);
        }
        let reached = match path::obstacle(config.cuda_path, true, size) {
            Some(why) => Err(why),
            None => Self::reach_within_process(contexts, config)?,
        };
        match reached {
            Ok(windows) => {
                let one = |(windows, context): (Windows, &Arc<CudaContext>)| {
                    let ranks = (windows.rank, size);
                    Self::over_windows(windows, ranks, context, config, None, false, None)
                };
                windows.into_iter().zip(contexts).map(one).collect()
            }
            Err(why) if config.cuda_path == CudaPath::Peer => Err(refused(why)),
            Err(why) => Self::hosted_within_process(contexts, config, &why),
        }
    }

    /// [`DeviceComm::reach`] for the ranks of one process: each rank's.
    fn reach_within_process(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Result<Vec<Windows>, String>> {
        let gpus = contexts.iter().map(RankGpu::of).collect::<Result<Vec<RankGpu>>>()?;
        let layout = peer_access(contexts)
            .and_then(|()| RankGpu::layout(&gpus, false, config).map_err(|error| error.to_string()));
        let layout = match layout {
            Ok(layout) => layout,
            Err(why) => return Ok(Err(why)),
        };
        let memory = contexts.iter().map(|context| Window::new(context, layout.bytes()));
        let memory = Arc::new(memory.collect::<Result<Vec<Window>>>()?);
        let ranks: Vec<Windows> =
            (0..contexts.len()).map(|rank| Windows::within_process(rank, layout, &memory)).collect();
        let names: Vec<String> = gpus.iter().map(RankGpu::name).collect();
        let verdict = path_check::check_within_process(&ranks, contexts, config.cuda_path_check)?;
        Ok(verdict.fault(&names).map_or(Ok(ranks), Err))
    }

    /// The hosted path, because of `why`.
    pub(super) fn hosted(
        host: Comm,
        context: &Arc<CudaContext>,
        why: String,
        part: Option<&Part<'_>>,
    ) -> Result<DeviceComm> {
        let comms = Self::workers(&host)?;
        Self::over_hosts(comms, context, Some(host), why, part.map(|part| part.names.clone()))
    }

    /// A communicator of these ranks for each worker.
    pub(super) fn workers(host: &Comm) -> Result<Vec<Comm>> {
        let wanted = hosted::workers(host.config(), host.ranks_here());
        let workers: Vec<usize> = host.exchange("DeviceComm: workers", &wanted)?;
        (0..workers.into_iter().min().unwrap_or(1)).map(|_| part_of(host, 0)).collect()
    }

    /// As [`DeviceComm::hosted`] for ranks that one thread drives. Each is made by its own thread, because they
    /// synchronise.
    fn hosted_within_process(contexts: &[Arc<CudaContext>], config: &Config, why: &str) -> Result<Vec<DeviceComm>> {
        let size = contexts.len();
        let same = |one: &Arc<CudaContext>| contexts.iter().filter(|c| c.ordinal() == one.ordinal()).count();
        let (sharing, most) = (contexts.iter().map(same).max().unwrap_or(1), hosted::most_sharing());
        if sharing > most {
            return Err(Error::Unsupported {
                what: format!("a GPU for {sharing} ranks of one process, through the host's memory ({why})"),
                detail: format!(
                    "their streams' waits would block each other: expected at most {most} ranks; set \
                     CUDA_DEVICE_MAX_CONNECTIONS to twice their number (32 at most), or start them as processes"
                ),
            });
        }
        let mut comms: Vec<Vec<Comm>> = (0..size).map(|_| Vec::new()).collect();
        for _ in 0..hosted::workers(config, size) {
            for (rank, comm) in Comm::threads(size, config.clone())?.into_iter().enumerate() {
                comm.hide();
                comms[rank].push(comm);
            }
        }
        std::thread::scope(|scope| {
            let make =
                |(comms, context)| scope.spawn(move || Self::over_hosts(comms, context, None, why.to_owned(), None));
            let threads: Vec<_> = comms.into_iter().zip(contexts).map(make).collect();
            let lost = || Err(Error::invalid("DeviceComm::local", "a thread that made a rank panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
        })
    }

    fn over_hosts(
        comms: Vec<Comm>,
        context: &Arc<CudaContext>,
        host: Option<Comm>,
        why: String,
        names: Option<Names>,
    ) -> Result<DeviceComm> {
        let Some(first) = comms.first() else { return Err(Error::invalid("DeviceComm", "no communicators")) };
        let (rank, size, config) = (first.rank(), first.size(), first.config().clone());
        if rank == 0 {
            let level = if config.cuda_path == CudaPath::Hosted { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "collectives on GPUs go through the hosts' memory: {why}");
        }
        let registry = Registry::new(context, rank, host.is_some());
        let chooser = Chooser::new(rank, Layout::new(size.min(MAX_RANKS), 1, &config), registry, &config);
        let lanes = comms.into_iter().map(|comm| Lanes { all: Reach::new(comm, names.clone()), lane: None });
        let path = Arc::new(Hosted::new(lanes.collect(), context)?);
        Self::assemble((rank, size), context, &config, host, (path, why), chooser.into(), None)
    }

    /// By kernels. `in_turns`: ranks of several processes have one GPU.
    pub(super) fn over_windows(
        windows: Windows,
        (rank, size): (usize, usize),
        context: &Arc<CudaContext>,
        config: &Config,
        host: Option<Comm>,
        in_turns: bool,
        part: Option<&Part<'_>>,
    ) -> Result<DeviceComm> {
        let (layout, patience) = (windows.layout, config.timeout);
        let names = part.map(|part| part.names.clone());
        let report = Arc::new(Report::new(context, rank, names, patience, config.cuda_failure)?);
        // Of a part the whole tells, whose errors name the ranks that the caller knows.
        if let Some(host) = part.map(|part| part.whole).or(host.as_ref()) {
            let weak: Weak<Report> = Arc::downgrade(&report);
            host.attach(weak);
        }
        let team = Team {
            windows: windows.addresses,
            extensions: windows.extension.addresses(),
            report: report.address,
            patience: u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX),
            call: 0,
            rank: rank as u32,
            number: 0,
            guarded: part.is_some().into(),
            unused: 0,
        };
        let kernels = Kernels::shared(context, layout)?;
        let registry = Registry::new(context, rank, host.is_some());
        let chooser = Arc::new(Chooser::new(rank, layout, registry, config));
        let path: (Arc<dyn DataPath>, _) = if in_turns {
            let phased = Phased::new(context, kernels, report, layout, team, patience)?;
            (Arc::new(phased), "ranks of several processes have one GPU".to_owned())
        } else {
            let (chooser, extension) = (chooser.clone(), windows.extension.clone());
            let window_bytes = windows.own_bytes();
            let scratch = Scratch::new(context);
            let peer = Peer { kernels, team, report, chooser, window_bytes, extension, scratch };
            (Arc::new(peer), "all ranks reach each other's memory".to_owned())
        };
        Self::assemble((rank, size), context, config, host, path, chooser, Some(windows))
    }

    pub(super) fn assemble(
        (rank, size): (usize, usize),
        context: &Arc<CudaContext>,
        config: &Config,
        host: Option<Comm>,
        (path, why): (Arc<dyn DataPath>, String),
        chooser: Arc<Chooser>,
        windows: Option<Windows>,
    ) -> Result<DeviceComm> {
        let event = context.new_event(None).map_err(|e| cuda("DeviceComm", "making an event", e))?;
        let ledger = Arc::new(Ledger::new(context.ordinal(), path.clone()));
        if let Some(host) = &host {
            let weak: Weak<Ledger> = Arc::downgrade(&ledger);
            host.show_device(weak);
        }
        let verifier = Verifier::new(context, (rank, size), config)?;
        let exchanges = verifier.as_ref().map(Verifier::exchanges);
        let device = DeviceComm {
            rank,
            size,
            path,
            why,
            chooser,
            checks_memory: config.cuda_check,
            ledger,
            order: Mutex::new(Order { number: 0, last: None, thread: None, event }),
            refused: AtomicBool::new(false),
            context: context.clone(),
            origin: Origin::here(),
            host,
            windows,
            verifier,
        };
        if let Some(exchanges) = exchanges {
            device.prepare(&exchanges)?;
        }
        Ok(device)
    }
}

/// Enables peer access between all devices of this process; the error names a pair without it.
fn peer_access(contexts: &[Arc<CudaContext>]) -> Result<(), String> {
    for context in contexts {
        for other in contexts.iter().filter(|other| other.ordinal() != context.ordinal()) {
            enable(context, other.ordinal()).map_err(|e| {
                let detail = format!("peer access, GPU {} to GPU {}", context.ordinal(), other.ordinal());
                cuda("DeviceComm::local", detail, e).to_string()
            })?;
        }
    }
    Ok(())
}

/// A communicator of the ranks of `host` that give this number: it fails when `host` does, and reports leave it out.
pub(super) fn part_of(host: &Comm, number: usize) -> Result<Comm> {
    let none = || Error::invalid("DeviceComm", "the split returned no communicator");
    let comm = host.split(Some(number as u32), 0)?.ok_or_else(none)?;
    host.attach_child(&comm);
    comm.hide();
    Ok(comm)
}

fn refused(why: String) -> Error {
    Error::Unsupported {
        what: "a device communicator over the peers' memory".to_owned(),
        detail: format!("{why}: with TINYNCCL_CUDA_PATH=auto calls would go through the hosts' memory"),
    }
}
