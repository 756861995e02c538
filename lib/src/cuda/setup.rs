//! How a device communicator comes to be: which path its data takes, and what that path needs.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::CudaContext;

use super::comm::{Carrier, DeviceComm, Order};
use super::decide::Asked;
use super::driver::{available, cuda};
use super::hosted::{self, Hosted};
use super::kernels::Kernels;
use super::launch::Team;
use super::path;
use super::peers::{Mapped, Peer, Place, enable};
use super::phased::Phased;
use super::registry::Registry;
use super::report::Report;
use super::schedules::Schedules;
use super::window::{Layout, MAX_RANKS, Window};
use crate::comm::Comm;
use crate::config::{Config, CudaPath};
use crate::error::{Error, Result};
use crate::fork::Origin;

impl DeviceComm {
    /// Joins the ranks of `comm`, each with the device of its `context`. Every rank must call it.
    ///
    /// Calls go through the peers' memory where all ranks reach each other's, else through the memory of the hosts: see
    /// [`DeviceComm::path`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the peers' memory is asked for (`TINYNCCL_CUDA_PATH=peer`) and cannot be reached.
    pub fn new(comm: &Comm, context: &Arc<CudaContext>) -> Result<DeviceComm> {
        available()?;
        let op = "DeviceComm::new";
        let (rank, size) = (comm.rank(), comm.size());
        // Of its own, so that what it sends does not mix with the caller's calls.
        let host = comm.split(Some(0), 0)?.ok_or_else(|| Error::invalid(op, "no communicator came of the split"))?;
        comm.attach_child(&host);
        let asked = host.config().cuda_path;
        let mapped = match path::obstacle(asked, host.is_one_host(), size) {
            Some(why) => Err(why),
            None => Mapped::open(&host, context)?,
        };
        let Mapped { layout, shares_gpu, gpus, addresses, peers, window } = match mapped {
            Ok(mapped) => mapped,
            Err(why) if asked == CudaPath::Peer => return Err(refused(why)),
            Err(why) => return Self::hosted(host, context, why),
        };
        let config = host.config().clone();
        let mut device = Self::assemble(
            (rank, size),
            context,
            layout,
            addresses,
            &config,
            Some(host),
            peers,
            Arc::new(vec![window]),
        )?;
        if shares_gpu {
            let (kernels, report) = (&device.kernels, &device.report);
            let phased = Phased::new(context, kernels, report, layout, addresses[rank], config.timeout)?;
            device.carrier = Carrier::Phased(phased);
            device.why = "ranks of several processes have one GPU".to_owned();
        }
        if let Some(why) = device.check_path()?.fault(&gpus) {
            return match device.host.take() {
                Some(host) if asked != CudaPath::Peer => {
                    drop(device);
                    Self::hosted(host, context, why)
                }
                _ => Err(refused(why)),
            };
        }
        device.meet()?;
        Ok(device)
    }

    /// The ranks of one process, rank `r` with the device of `contexts[r]`; one thread may drive them all. Ranks may share a
    /// GPU; each then needs a stream of its own, and their kernels have fewer blocks, so that all of them are resident.
    ///
    /// # Errors
    /// As [`DeviceComm::new`].
    pub fn local(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Vec<DeviceComm>> {
        available()?;
        let size = contexts.len();
        if size == 0 {
            return Err(Error::invalid("DeviceComm::local", "no contexts, expected one for each rank"));
        }
        let reached = match path::obstacle(config.cuda_path, true, size) {
            Some(why) => Err(why),
            None => Self::over_peers(contexts, config)?,
        };
        match reached {
            Ok(ranks) => Ok(ranks),
            Err(why) if config.cuda_path == CudaPath::Peer => Err(refused(why)),
            Err(why) => Self::hosted_within_process(contexts, config, &why),
        }
    }

    /// The ranks of one process by kernels. The inner error says why that does not work.
    fn over_peers(contexts: &[Arc<CudaContext>], config: &Config) -> Result<Result<Vec<DeviceComm>, String>> {
        let size = contexts.len();
        let places = contexts.iter().map(Place::of).collect::<Result<Vec<Place>>>()?;
        let layout = reach_within_process(contexts)
            .and_then(|()| Place::layout(&places, false, config).map_err(|error| error.to_string()));
        let layout = match layout {
            Ok(layout) => layout,
            Err(why) => return Ok(Err(why)),
        };
        let windows =
            Arc::new(contexts.iter().map(|c| Window::new(c, layout.bytes())).collect::<Result<Vec<Window>>>()?);
        let mut addresses = [0; MAX_RANKS];
        for (address, window) in addresses.iter_mut().zip(windows.iter()) {
            *address = window.address;
        }
        let one = |(rank, context): (usize, &Arc<CudaContext>)| {
            let ranks = (rank, size);
            Self::assemble(ranks, context, layout, addresses, config, None, Vec::new(), windows.clone())
        };
        let ranks = contexts.iter().enumerate().map(one).collect::<Result<Vec<DeviceComm>>>()?;
        let gpus: Vec<String> = places.iter().map(Place::gpu).collect();
        Ok(match Self::check_paths(&ranks)?.fault(&gpus) {
            None => Ok(ranks),
            Some(why) => Err(why),
        })
    }

    /// Through the hosts' memory, because of `why`.
    fn hosted(host: Comm, context: &Arc<CudaContext>, why: String) -> Result<DeviceComm> {
        let wanted = hosted::lanes(host.config(), host.ranks_here());
        let lanes: Vec<usize> = host.exchange("DeviceComm: lanes", &wanted)?;
        let lane = |_| {
            let lane = host.split(Some(0), 0)?.ok_or_else(|| Error::invalid("DeviceComm", "a split gave nothing"))?;
            host.attach_child(&lane);
            Ok(lane)
        };
        let comms = (0..lanes.into_iter().min().unwrap_or(1)).map(lane).collect::<Result<_>>()?;
        let device = Self::over_hosts(comms, context, Some(host), why)?;
        device.meet()?;
        Ok(device)
    }

    /// As [`DeviceComm::hosted`] for ranks that one thread may drive, and make: each is made by a thread, because they meet.
    fn hosted_within_process(contexts: &[Arc<CudaContext>], config: &Config, why: &str) -> Result<Vec<DeviceComm>> {
        let size = contexts.len();
        let same = |one: &Arc<CudaContext>| contexts.iter().filter(|c| c.ordinal() == one.ordinal()).count();
        let (sharing, most) = (contexts.iter().map(same).max().unwrap_or(1), hosted::most_sharing());
        if sharing > most {
            return Err(Error::Unsupported {
                what: format!("a GPU for {sharing} ranks of one process, through the host's memory ({why})"),
                detail: format!(
                    "their streams' waits would hold up each other: expected at most {most} ranks; set \
                     CUDA_DEVICE_MAX_CONNECTIONS to twice their number (32 at most), or start them as processes"
                ),
            });
        }
        let mut comms: Vec<Vec<Comm>> = (0..size).map(|_| Vec::new()).collect();
        for _ in 0..hosted::lanes(config, size) {
            for (rank, comm) in Comm::threads(size, config.clone())?.into_iter().enumerate() {
                comms[rank].push(comm);
            }
        }
        std::thread::scope(|scope| {
            let make = |(comms, context)| scope.spawn(move || Self::over_hosts(comms, context, None, why.to_owned()));
            let threads: Vec<_> = comms.into_iter().zip(contexts).map(make).collect();
            let lost = || Err(Error::invalid("DeviceComm::local", "a thread that made a rank panicked"));
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
        })
    }

    fn over_hosts(comms: Vec<Comm>, context: &Arc<CudaContext>, host: Option<Comm>, why: String) -> Result<DeviceComm> {
        let Some(first) = comms.first() else { return Err(Error::invalid("DeviceComm", "no lanes")) };
        let (rank, size, config) = (first.rank(), first.size(), first.config().clone());
        if rank == 0 {
            let level = if config.cuda_path == CudaPath::Hosted { log::Level::Info } else { log::Level::Warn };
            log::log!(level, "collectives on GPUs go through the hosts' memory: {why}");
        }
        let layout = Layout::new(size.min(MAX_RANKS), 1, &config);
        let hosted = Hosted::new(comms, context)?;
        let (none, memory) = (Vec::new(), Arc::default());
        let ranks = (rank, size);
        let mut device = Self::assemble(ranks, context, layout, [0; MAX_RANKS], &config, host, none, memory)?;
        device.carrier = Carrier::Hosted(hosted);
        device.why = why;
        Ok(device)
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a communicator, put together in one place")]
    fn assemble(
        (rank, size): (usize, usize),
        context: &Arc<CudaContext>,
        layout: Layout,
        windows: [u64; MAX_RANKS],
        config: &Config,
        host: Option<Comm>,
        peers: Vec<Peer>,
        memory: Arc<Vec<Window>>,
    ) -> Result<DeviceComm> {
        let report = Arc::new(Report::new(context)?);
        let patience = config.timeout;
        let event = context.new_event(None).map_err(|e| cuda("DeviceComm", "making an event", e))?;
        let team = Team {
            windows,
            report: report.address,
            patience: u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX),
            call: 0,
            rank: rank as u32,
            number: 0,
        };
        if let Some(host) = &host {
            let weak: Weak<Report> = Arc::downgrade(&report);
            host.attach(weak);
        }
        Ok(DeviceComm {
            rank,
            size,
            layout,
            kernels: Kernels::shared(context, layout)?,
            team,
            report,
            carrier: Carrier::Peer,
            why: "all ranks reach each other's memory".to_owned(),
            checks_memory: config.cuda_check,
            path_check: config.cuda_path_check,
            patience,
            order: Mutex::new(Order { number: 0, last: None, event }),
            choices: Mutex::new(None),
            asked: Asked::of(config),
            warned: AtomicU32::new(0),
            registry: Registry::new(context, rank, host.is_some()),
            schedules: Schedules::new(rank, layout),
            context: context.clone(),
            origin: Origin::here(),
            host,
            peers,
            _windows: memory,
        })
    }
}

/// Lets every device of this process reach the others' memory, or says which one does not.
fn reach_within_process(contexts: &[Arc<CudaContext>]) -> Result<(), String> {
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

fn refused(why: String) -> Error {
    Error::Unsupported {
        what: "a device communicator over the peers' memory".to_owned(),
        detail: format!("{why}: leave TINYNCCL_CUDA_PATH at auto to go through the hosts' memory then"),
    }
}
