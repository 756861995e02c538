//! A communicator over several hosts that is divided by them: one inside each host, and lanes between.

use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::setup::part_of;
use crate::comm::DeviceComm;
use crate::hosted::Hosted;
use crate::hosted::reach::{Lanes, Reach};
use crate::hosts::Hosts;
use crate::hosts::division::Division;
use crate::path;
use crate::path::names::Names;
use crate::peer::{Chooser, Registry};
use crate::window::{Layout, MAX_RANKS, Reached};
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::CudaPath;

/// A communicator of a host's ranks, as a part of one over several hosts.
pub(super) struct Part<'a> {
    pub(super) whole: &'a Comm,
    /// The ranks' numbers in that one.
    pub(super) names: Names,
}

impl DeviceComm {
    /// The communicator of our host's ranks. The inner error is the reason why calls are not divided by hosts, the same
    /// on all ranks.
    pub(super) fn inside(host: &Comm, context: &Arc<CudaContext>) -> Result<Result<(Division, DeviceComm), String>> {
        let division = match Division::of(&host.hosts(), host.rank()) {
            Ok(division) => division,
            Err(why) => return Ok(Err(why)),
        };
        let config = host.config().clone();
        let comm = part_of(host, division.host)?;
        let part = Part { whole: host, names: Names::new(division.inside()) };
        let reached = match path::obstacle(CudaPath::Auto, comm.is_one_host(), comm.size()) {
            Some(why) => Err(why),
            // The other hosts must learn of an error, too.
            None => Self::reach(&comm, context).unwrap_or_else(|error| Err(error.to_string())),
        };
        let verdict = reached.as_ref().map(|_| ()).map_err(Clone::clone);
        let verdicts: Vec<Result<(), String>> = host.exchange("DeviceComm: inside the hosts", &verdict)?;
        let failed = |(rank, verdict): (usize, Result<(), String>)| {
            verdict.err().map(|why| format!("on the host of rank {rank} kernels do not join the GPUs: {why}"))
        };
        let mut inner = match (reached, verdicts.into_iter().enumerate().find_map(failed)) {
            (Ok(Reached { windows, shares_gpu, .. }), None) => {
                let ranks = (comm.rank(), comm.size());
                Self::over_windows(windows, ranks, context, &config, Some(comm), shares_gpu, Some(&part))?
            }
            (_, why) => Self::hosted(comm, context, why.unwrap_or_default(), Some(&part))?,
        };
        inner.meet()?;
        // Calls are verified as a whole.
        inner.verifier = None;
        Ok(Ok((division, inner)))
    }

    /// Calls inside the host by `inner`, and through the hosts' memory between them.
    pub(super) fn over_lanes(
        host: Comm,
        context: &Arc<CudaContext>,
        division: Division,
        inner: DeviceComm,
    ) -> Result<DeviceComm> {
        let (rank, size, config) = (host.rank(), host.size(), host.config().clone());
        let lane = |all| {
            let (comm, names) = (part_of(&host, division.local)?, Names::new(division.lane()));
            Ok(Lanes { all: Reach::new(all, None), lane: Some(Reach::new(comm, Some(names))) })
        };
        let lanes = Self::workers(&host)?.into_iter().map(lane).collect::<Result<Vec<Lanes>>>()?;
        let outer = Hosted::new(lanes, context)?;
        let Division { hosts, each, .. } = division;
        let mut why = format!(
            "{hosts} hosts of {each} ranks: inside each {} ({}), between them the hosts' memory",
            inner.path(),
            inner.path_reason()
        );
        if let Some(undivided) = Hosts::undivided(&config) {
            why = format!("{why}; {undivided}");
        }
        if rank == 0 {
            log::info!("collectives on GPUs: {why}");
        }
        let registry = Registry::new(context, rank, true);
        let chooser = Chooser::new(rank, Layout::new(size.min(MAX_RANKS), 1, &config), registry, &config);
        let path = Arc::new(Hosts::new(context, division, inner, outer, &config)?);
        Self::assemble((rank, size), context, &config, Some(host), (path, why), chooser.into(), None)
    }
}

pub(super) fn not_divided(why: String) -> Error {
    Error::Unsupported {
        what: "a device communicator divided by hosts".to_owned(),
        detail: format!("{why}; with TINYNCCL_CUDA_PATH=auto calls go through the hosts' memory"),
    }
}
