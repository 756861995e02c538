//! `mesh`: the nodes of a job, their ports, the port pairs in one subnet, and the routes between nodes without such a
//! pair.

mod node;
mod ping;
mod plan;
mod svg;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;
use program_kit::output::Output;
use tinynccl::Config;
use tinynccl::bootstrap::{Rendezvous, Session, is_rank, rendezvous_from_env};

use node::Node;
use ping::Ping;
use plan::{Cable, Way};

/// Draws the mesh of a job's nodes: ports, subnets, speeds, and the route between every two nodes. Nodes without a
/// common subnet reach each other through others, by the routes that links over RDMA and NCCL's plugin take. Any
/// launcher starts it once per node; by hand: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Alone it lists the ports
/// of this node.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Pings over every pair of ports from both ends. Exit status 1 if a port does not answer or two nodes have no
    /// route.
    #[arg(long)]
    check: bool,
    /// Writes the mesh as a picture, too.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The nodes, and their port pairs.
#[derive(Debug)]
struct Mesh {
    nodes: Vec<Node>,
    cables: Vec<Cable>,
    /// Empty without `--check`.
    pings: Vec<Ping>,
}

/// The exit status; the first node prints.
///
/// # Errors
/// This node's interfaces cannot be listed, or the nodes do not find each other.
pub(crate) fn run(options: &Options) -> Result<i32> {
    let config = Config::from_env()?;
    let mut node = Node::here(&config)?;
    if options.check {
        ping::answer(&mut node)?;
    }
    let job = is_rank().then(|| rendezvous_from_env(&config)).transpose()?;
    let (rank, mesh) = match job {
        None => (0, Mesh { nodes: vec![node], cables: Vec::new(), pings: Vec::new() }),
        Some(job) => (job.rank, meet(job, &node, options.check, &config)?),
    };
    if rank == 0 {
        let picture = options.svg.as_deref().map(Output::create).transpose()?;
        crate::print(&mesh.text())?;
        if let Some(picture) = picture {
            picture.finish(svg::page(&mesh).as_bytes())?;
        }
    }
    Ok(i32::from(options.check && !mesh.is_whole()))
}

/// Joins the rendezvous, receives all nodes' descriptions and, with `check`, pings them and exchanges the results.
fn meet(job: Rendezvous, node: &Node, check: bool, config: &Config) -> Result<Mesh> {
    let Rendezvous { rank, world_size, id, server, .. } = job;
    let session = Session::join(&id, rank, world_size, serde_json::to_value(node)?, config)?;
    let read = |info: &serde_json::Value| serde_json::from_value(info.clone());
    let nodes: Vec<Node> = session.infos().iter().map(read).collect::<Result<_, _>>().context("another version")?;
    let cables = plan::cables(&nodes);
    let mut pings = Vec::new();
    if check {
        let ours = serde_json::to_vec(&ping::all(&nodes, &cables, rank))?;
        let everyone: Vec<usize> = (0..world_size).collect();
        for theirs in session.exchange("pings", &everyone, ours, config.timeout)? {
            let theirs: Vec<Ping> = serde_json::from_slice(&theirs).context("another version")?;
            pings.extend(theirs);
        }
    }
    session.leave();
    drop((session, server));
    Ok(Mesh { nodes, cables, pings })
}

impl Mesh {
    fn title(&self) -> String {
        let count = |n: usize, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
        format!("{}, {}", count(self.nodes.len(), "node"), count(self.cables.len(), "cable"))
    }

    fn pings<'a>(&'a self, cable: &'a Cable) -> impl Iterator<Item = &'a Ping> {
        let Cable { nodes: [a, b], ports: [i, j] } = *cable;
        let over = move |ping: &&Ping| {
            (ping.nodes, ping.ports) == ([a, b], [i, j]) || (ping.nodes, ping.ports) == ([b, a], [j, i])
        };
        self.pings.iter().filter(over)
    }

    /// The pings of a port pair that failed: the node that pinged, and the reason.
    fn failures<'a>(&'a self, cable: &'a Cable) -> impl Iterator<Item = (usize, &'a str)> {
        self.pings(cable).filter_map(|ping| Some((ping.nodes[0], ping.outcome.as_ref().err()?.as_str())))
    }

    /// Returns true if every ping was answered and every two nodes have a route.
    fn is_whole(&self) -> bool {
        self.pings.iter().all(|ping| ping.outcome.is_ok())
            && plan::ways(&self.nodes, &self.cables).iter().all(|(_, way)| *way != Way::None)
    }

    fn text(&self) -> String {
        let mut out = format!("{}\n", self.title());
        for (number, node) in self.nodes.iter().enumerate() {
            let _ = writeln!(out, "\nnode {number}: {}", node.host.hostname);
            for port in &node.ports {
                let _ = writeln!(out, "  {}", port.describe());
            }
            if node.ports.is_empty() {
                out.push_str("  no port that is up\n");
            }
        }
        for ([a, b], way) in plan::ways(&self.nodes, &self.cables) {
            let _ = write!(out, "\nnode {a} - node {b}: ");
            match way {
                Way::Same => out.push_str("one machine, by shared memory or loopback\n"),
                Way::Cables(cables) => {
                    out.push_str(if cables.len() == 1 { "a cable\n" } else { "several cables, for stripes\n" });
                    cables.iter().for_each(|cable| self.cable(&mut out, cable));
                }
                Way::Through(relays) => {
                    let relays: Vec<String> = relays.iter().map(|node| format!("node {node}")).collect();
                    let _ = writeln!(out, "no common subnet, through {}", relays.join(" and "));
                }
                Way::None => out.push_str("no way: no common subnet, and no nodes between them that have one\n"),
            }
        }
        out
    }

    fn cable(&self, out: &mut String, cable: &Cable) {
        let Some([ours, theirs]) = cable.ends(&self.nodes) else { return };
        let speed = node::speed(cable.speed(&self.nodes));
        let _ = write!(
            out,
            "  {} {} - {} {}, {}, {speed}",
            ours.interface,
            ours.ip,
            theirs.interface,
            theirs.ip,
            ours.subnet()
        );
        let times: Vec<f64> = self.pings(cable).filter_map(|ping| ping.outcome.as_ref().ok().copied()).collect();
        if let Some(slowest) = times.iter().copied().reduce(f64::max) {
            let _ = write!(out, ", ping {slowest:.0} us");
        }
        out.push('\n');
        for (from, why) in self.failures(cable) {
            let _ = writeln!(out, "    FAILED: the ping of node {from}: {why}; look for a firewall, and at the cable");
        }
    }
}
