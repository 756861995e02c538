//! The machine that `--topology` names.

use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::simulate::Costs;
use tinynccl_plan::simulate::machine::{self as machines, Dgx, FatTree, Graph, Host, Machine, Switch, Torus};
use tinynccl_plan::topology::CostModel;
use tinynccl_plan::wire::{Algorithm, Collective};

use super::{Options, Protocol};

/// Bytes that 128 blocks send at once in slots of 128 KiB (TINYNCCL_CUDA_SLOT): the blocks share the work as one.
const GPU_MESSAGE: usize = 16 << 20;
/// Windows for each hop of a pipeline, and least and most bytes of its messages. A part passes through several ranks in
/// a row: the library cuts it into four windows for each hop, with messages of 8 to 64 KiB for each of the
/// blocks (`lib/cuda/src/peer/program.rs`).
const GPU_PIPELINE: (usize, usize, usize) = (4, 1 << 20, 8 << 20);
/// The library's longest message over a network (TINYNCCL_TCP_CHUNK).
const MESSAGE: usize = 1 << 20;

/// A machine for any number of ranks.
#[derive(Debug)]
pub(super) enum Topology {
    Dgx(Protocol),
    Mesh,
    FatTree { oversubscription: f64 },
    Host { model: Box<CostModel>, cores: usize, over_tcp: bool },
    Switch { latency: f64, bandwidth: f64 },
    Described(Box<Graph>),
}

impl Topology {
    pub(super) fn new(options: &Options) -> Result<Topology> {
        for (name, value) in [
            ("--oversubscription", options.oversubscription),
            ("--latency-us", options.latency_us),
            ("--bandwidth-gb-s", options.bandwidth_gb_s),
        ] {
            if !value.is_finite() || value <= 0.0 {
                bail!("{name}: expected more than 0, got {value}");
            }
        }
        let cores =
            || options.cores.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1);
        Ok(match options.topology.as_str() {
            "dgx" => Topology::Dgx(options.protocol),
            "mesh" => Topology::Mesh,
            "fat-tree" => Topology::FatTree { oversubscription: options.oversubscription },
            "host" => Topology::Host { model: Box::new(cost_model(options)?), cores: cores(), over_tcp: false },
            "host-tcp" => Topology::Host { model: Box::new(cost_model(options)?), cores: cores(), over_tcp: true },
            "switch" => {
                Topology::Switch { latency: options.latency_us * 1e-6, bandwidth: options.bandwidth_gb_s * 1e9 }
            }
            file => Topology::Described(Box::new(described(Path::new(file))?)),
        })
    }

    /// Longest message for segments of `bytes` bytes.
    pub(super) fn message(&self, algorithm: Option<Algorithm>, shape: &Shape, bytes: usize) -> usize {
        let one_way = matches!(shape.collective, Collective::Broadcast | Collective::Reduce);
        let whole = one_way || shape.collective == Collective::AllReduce;
        match self {
            // The library's settings TINYNCCL_SHM_CHUNK and TINYNCCL_TCP_CHUNK.
            Topology::Host { over_tcp: false, .. } => 128 << 10,
            Topology::Host { .. } if shape.ranks > 2 && shape.collective.reduces() => 256 << 10,
            Topology::Dgx(_)
                if (matches!(algorithm, Some(Algorithm::Tree | Algorithm::DoubleTree)) && whole)
                    || (algorithm == Some(Algorithm::Ring) && one_way) =>
            {
                let (windows, least, most) = GPU_PIPELINE;
                (bytes / (windows * (shape.ranks - 1).max(1))).clamp(least, most)
            }
            Topology::Dgx(_) => GPU_MESSAGE,
            _ => MESSAGE,
        }
    }

    /// The machines to try: one, or one for each protocol.
    pub(super) fn machines(&self, ranks: usize, footprint: usize) -> Result<Vec<Box<dyn Machine>>> {
        let one = |machine: Box<dyn Machine>| Ok(vec![machine]);
        match *self {
            Topology::Dgx(protocol) => {
                let dgx = |p| -> Box<dyn Machine> { Box::new(Dgx::new(ranks, p)) };
                Ok(match protocol {
                    Protocol::Simple => vec![dgx(machines::Protocol::Simple)],
                    Protocol::Ll => vec![dgx(machines::Protocol::LL)],
                    Protocol::Auto => vec![dgx(machines::Protocol::Simple), dgx(machines::Protocol::LL)],
                })
            }
            Topology::Mesh => one(Box::new(Torus::new(ranks))),
            Topology::FatTree { oversubscription } => one(Box::new(FatTree::new(ranks, oversubscription))),
            Topology::Host { ref model, cores, over_tcp } => {
                one(Box::new(Host::new(model, ranks, cores, footprint, over_tcp)))
            }
            Topology::Switch { latency, bandwidth } => {
                one(Box::new(Switch { ranks, latency, bandwidth, costs: Costs::default() }))
            }
            Topology::Described(ref graph) => one(Box::new(graph.as_ref().clone())),
        }
    }
}

/// The machine that a file describes.
fn described(path: &Path) -> Result<Graph> {
    let shown = path.display();
    if !path.exists() {
        bail!("topology '{shown}': expected dgx, mesh, fat-tree, host, host-tcp, switch, or a file that is there");
    }
    Graph::new(&crate::topology::read(path)?).with_context(|| shown.to_string())
}

/// Returns the cost model that `--cost-model` names, or the built-in figures.
fn cost_model(options: &Options) -> Result<CostModel> {
    let Some(path) = &options.cost_model else { return Ok(CostModel::shm()) };
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut record: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
    // The library's cache file has the model in a record; a model alone is accepted too.
    let model = record.get_mut("model").map(serde_json::Value::take).unwrap_or(record);
    let model: CostModel = serde_json::from_value(model).with_context(|| path.display().to_string())?;
    model.check().map_err(|detail| anyhow!("{}: cost model: {detail}", path.display()))?;
    Ok(model)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_over_tcp_are_shorter_where_more_than_two_ranks_reduce() {
        let tcp = Topology::Host { model: Box::new(CostModel::shm()), cores: 2, over_tcp: true };
        let shape = |collective, ranks| Shape { collective, ranks, root: 0, channels: 1 };
        assert_eq!(tcp.message(Some(Algorithm::Ring), &shape(Collective::AllReduce, 4), 1 << 20), 256 << 10);
        assert_eq!(tcp.message(Some(Algorithm::Ring), &shape(Collective::AllReduce, 2), 1 << 20), 1 << 20);
        assert_eq!(tcp.message(Some(Algorithm::Ring), &shape(Collective::AllGather, 4), 1 << 20), 1 << 20);
    }
}
