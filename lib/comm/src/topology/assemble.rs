//! One graph of what all ranks have found and measured: sites with their NUMA nodes, GPUs and ports, and networks.
//!
//! ```text
//! host ── port ── subnet ── port ── host         a port's speed is the card's, or what was measured over it
//!  ├── gpu ── nvswitch                           ranks are at the host, or at its NUMA nodes where it has several
//!  └── pcie ── gpu                               a subnet whose sites fall into groups, with less between them than
//!                                                within, is a switch per group
//! ```

use super::gpus::{End, Gpu};
use super::machine::{Machine, Port};
use super::pairs::{Network, Site, Told, class};
use super::pcie::{Slot, Switch, switches};
use crate::topology::CostModel;
use serde::{Deserialize, Serialize};
use tinynccl_plan::simulate::machine::graph::{CostsDescription, Description, Duplex, Inside, Link, Node};
use tinynccl_plan::simulate::machine::nominal::{
    NVLINK_US, PCIE_US, SOCKET_US, UNKNOWN_MBIT, nvlink_gb_s, pcie_gb_s, port_gb_s,
};

/// A measured pair of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) ranks: [usize; 2],
    /// Time of an empty message.
    pub(crate) alpha_ns: f64,
    /// Each way, while both send.
    pub(crate) gb_s: f64,
}

/// All that is known.
pub(crate) struct Found<'a> {
    pub(crate) told: &'a [Told],
    pub(crate) sites: &'a [Site],
    pub(crate) networks: &'a [Network],
    pub(crate) measured: &'a [Measured],
    pub(crate) model: &'a CostModel,
    /// A link takes all ports that two sites have in common, and not one.
    pub(crate) rails: bool,
}

/// Sites of a subnet are in one group if what was measured between two of them is at least this share of what their
/// ports can do.
const TOGETHER: f64 = 0.6;

/// The graph.
pub(crate) fn assemble(found: &Found<'_>) -> Description {
    let mut graph = Description { name: found.title(), costs: costs(found.model), ..Description::default() };
    for at in 0..found.sites.len() {
        found.site(&mut graph, at);
    }
    for at in 0..found.networks.len() {
        found.network(&mut graph, at);
    }
    // Numbers that follow the nodes need not be said.
    if graph.node.iter().flat_map(|node| &node.numbers).copied().eq(0..found.told.len()) {
        graph.node.iter_mut().for_each(|node| node.numbers.clear());
    }
    graph
}

fn costs(model: &CostModel) -> CostsDescription {
    let gb_s = |ns_per_byte: f64| if ns_per_byte > 0.0 { short(1.0 / ns_per_byte) } else { 0.0 };
    CostsDescription {
        call_us: short(model.call_ns / 1e3),
        overhead_us: 0.0,
        reduce_gb_s: gb_s(model.reduce.l3),
        copy_gb_s: gb_s(model.copy.l3),
    }
}

/// Three significant digits: what a measurement is good for.
fn short(value: f64) -> f64 {
    if !value.is_finite() || value <= 0.0 {
        return 0.0;
    }
    let scale = 10f64.powf(2.0 - value.log10().floor());
    (value * scale).round() / scale
}

fn plural(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

fn link(graph: &mut Description, between: [&str; 2], kind: &str, latency_us: f64, gb_s: f64) {
    let (between, kind) = (between.map(str::to_owned), Some(kind.to_owned()));
    let bandwidth_gb_s = short(gb_s).max(1e-6);
    graph.link.push(Link { between, latency_us, bandwidth_gb_s, duplex: Duplex::Full, kind, shared: None });
}

fn node(graph: &mut Description, name: &str, kind: &str, note: String) {
    let note = (!note.is_empty()).then_some(note);
    graph.node.push(Node { name: name.to_owned(), kind: Some(kind.to_owned()), note, ..Node::default() });
}

impl Found<'_> {
    fn title(&self) -> String {
        match self.sites {
            [one] => one.name.clone(),
            many => plural(many.len(), "host"),
        }
    }

    fn machine(&self, site: &Site) -> Option<&Machine> {
        self.told.get(site.host)?.machine.as_ref()
    }

    /// The NUMA nodes of a site, as the names of their nodes.
    fn homes(&self, site: &Site) -> Vec<String> {
        match self.machine(site) {
            Some(machine) if machine.numa.len() > 1 => {
                machine.numa.iter().map(|numa| format!("{}/numa{}", site.name, numa.number)).collect()
            }
            _ => vec![site.name.clone()],
        }
    }

    fn site(&self, graph: &mut Description, at: usize) {
        let site = &self.sites[at];
        let homes = self.homes(site);
        let first = graph.node.len();
        let unknown = Machine::default();
        let machine = self.machine(site).unwrap_or(&unknown);
        for (index, home) in homes.iter().enumerate() {
            let cores = match homes.len() {
                1 => machine.numa.iter().map(|numa| numa.cores.len()).sum(),
                _ => machine.numa[index].cores.len(),
            };
            let words = [machine.processor.clone(), plural(cores, "core")];
            node(graph, home, if homes.len() > 1 { "numa" } else { "host" }, words.join(", "));
        }
        for &rank in &site.ranks {
            let index = self.told[rank].numa.min(homes.len() - 1);
            graph.node[first + index].numbers.push(rank);
        }
        for (index, node) in graph.node[first..].iter_mut().enumerate() {
            node.ranks = node.numbers.len();
            let cores = machine.numa.get(index).map_or(1, |numa| numa.cores.len());
            node.inside = (node.ranks > 1).then(|| self.inside([node.numbers[0], node.numbers[1]], node.ranks, cores));
        }
        for high in 1..homes.len() {
            for low in 0..high {
                let (latency_us, gb_s) = self.between_sockets([first + low, first + high], graph, machine);
                link(graph, [&homes[low], &homes[high]], "socket", latency_us, gb_s);
            }
        }
        // Namespaces share the machine's devices; the first shows them.
        let owner = self.sites.iter().position(|other| other.host == site.host) == Some(at);
        let gpus: &[Gpu] = if owner { &machine.gpus } else { &[] };
        let ports = &self.told[site.ranks[0]].ports;
        let slots = gpus.iter().filter_map(|gpu| gpu.slot.as_ref());
        let switches = switches(slots.chain(ports.iter().filter_map(|port| port.slot.as_ref())));
        let tree = Tree { site: &site.name, homes: &homes, machine, switches: &switches };
        tree.draw(graph, gpus);
        for (index, port) in ports.iter().enumerate() {
            let gb_s = self.port_gb_s(at, index);
            let name = port_name(site, port);
            let parent = tree.parent(port.slot.as_ref(), None);
            node(graph, &name, "port", self.port_note(port, gb_s));
            let below = port.slot.as_ref().filter(|slot| slot.lanes > 0).map_or(f64::INFINITY, Slot::gb_s);
            let gb_s = gb_s.unwrap_or_else(|| port_gb_s(UNKNOWN_MBIT)).min(below);
            link(graph, [&parent, &name], "network", 0.0, gb_s);
        }
    }

    fn port_note(&self, port: &Port, gb_s: Option<f64>) -> String {
        let addresses: Vec<String> = port.addresses.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
        let speed = match (port.mbit, gb_s) {
            (Some(mbit), _) => format!("{} Gbit/s", f64::from(mbit) / 1e3),
            (None, Some(gb_s)) => format!("{} GB/s measured", short(gb_s)),
            (None, None) => "speed unknown, 10 Gbit/s assumed".to_owned(),
        };
        format!("{}, {speed}", addresses.join(", "))
    }

    /// The connection of `ranks` ranks on `cores` cores: of a pair, times the pairs that run at once.
    fn inside(&self, pair: [usize; 2], ranks: usize, cores: usize) -> Inside {
        let wanted = class(self.told, pair);
        let same = |measured: &&Measured| class(self.told, measured.ranks) == wanted && self.is_inside(measured);
        let (alpha_ns, gb_s) = match self.measured.iter().find(same) {
            Some(measured) => (measured.alpha_ns, measured.gb_s),
            None => (self.model.shm.alpha_ns, 1.0 / self.model.shm.beta.l3),
        };
        let pairs = (ranks.min(cores) / 2).max(1) as f64;
        Inside { latency_us: short(alpha_ns / 1e3), bandwidth_gb_s: short(2.0 * gb_s * pairs).max(1e-6) }
    }

    fn is_inside(&self, measured: &Measured) -> bool {
        let [a, b] = measured.ranks.map(|rank| self.site_of(rank));
        a == b
    }

    fn site_of(&self, rank: usize) -> usize {
        self.sites.iter().position(|site| site.ranks.contains(&rank)).unwrap_or(0)
    }

    /// Latency and bandwidth between two NUMA nodes.
    fn between_sockets(&self, nodes: [usize; 2], graph: &Description, machine: &Machine) -> (f64, f64) {
        let [a, b] = nodes.map(|node| graph.node[node].numbers.first().copied());
        let measured = a.zip(b).and_then(|(a, b)| {
            let wanted = class(self.told, [a, b]);
            self.measured.iter().find(|m| class(self.told, m.ranks) == wanted && self.is_inside(m))
        });
        match measured {
            Some(measured) => (short(measured.alpha_ns / 1e3), measured.gb_s.max(machine.socket_gb_s)),
            None => (SOCKET_US, machine.socket_gb_s),
        }
    }

    /// The measurements over a network, with the sites.
    fn over(&self, network: usize) -> impl Iterator<Item = ([usize; 2], Measured)> {
        self.measured.iter().filter_map(move |measured| {
            let sites = measured.ranks.map(|rank| self.site_of(rank));
            let common = || {
                let all = self.networks.iter().enumerate();
                all.filter(|(_, network)| sites.iter().all(|&site| network.has(site))).map(|(at, _)| at)
            };
            if sites[0] == sites[1] || !common().any(|at| at == network) {
                return None;
            }
            // Which of several networks a single link takes is not known: each counts as if it were that one.
            let share = if self.rails { common().count().max(1) as f64 } else { 1.0 };
            Some((sites, Measured { gb_s: measured.gb_s / share, ..*measured }))
        })
    }

    /// Speed of a port, from its card or from measurements with others of its networks; `None` without both.
    fn port_gb_s(&self, site: usize, port: usize) -> Option<f64> {
        if let Some(mbit) = self.told[self.sites[site].ranks[0]].ports[port].mbit {
            return Some(port_gb_s(f64::from(mbit)));
        }
        let of_port = |(_, network): &(usize, &Network)| network.members.contains(&(site, Some(port)));
        let over = self.networks.iter().enumerate().filter(of_port).flat_map(|(at, _)| self.over(at));
        over.filter(|(sites, _)| sites.contains(&site)).map(|(_, measured)| measured.gb_s).reduce(f64::max)
    }

    fn network(&self, graph: &mut Description, at: usize) {
        let network = &self.networks[at];
        let measured: Vec<([usize; 2], Measured)> = self.over(at).collect();
        let gb_s = |&(site, port): &(usize, Option<usize>)| {
            let own = || measured.iter().filter(|(sites, _)| sites.contains(&site)).map(|(_, m)| m.gb_s);
            port.and_then(|port| self.port_gb_s(site, port))
                .or_else(|| own().reduce(f64::max))
                .unwrap_or_else(|| port_gb_s(UNKNOWN_MBIT))
        };
        let fastest = |site: usize| network.members.iter().filter(|m| m.0 == site).map(gb_s).fold(0.0, f64::max);
        let knows = |member: &(usize, Option<usize>)| {
            let port = |port: usize| self.told[self.sites[member.0].ranks[0]].ports[port].mbit.is_some();
            member.1.is_some_and(port)
        };
        let mut groups = Groups::new(self.sites.len());
        // Cards that know their speed are measured with one pair, which shows no groups.
        let know = network.members.iter().all(knows);
        for &(site, _) in &network.members {
            if know || !measured.iter().any(|(sites, _)| sites.contains(&site)) {
                groups.join(network.members[0].0, site);
            }
        }
        for ([a, b], measured) in &measured {
            if measured.gb_s >= TOGETHER * fastest(*a).min(fastest(*b)) {
                groups.join(*a, *b);
            }
        }
        let mut switches: Vec<usize> = network.members.iter().map(|(site, _)| groups.of(*site)).collect();
        switches.sort_unstable();
        switches.dedup();
        let name = |group: usize| match switches.iter().position(|&switch| switch == group) {
            Some(number) if switches.len() > 1 => format!("{} switch {number}", network.name),
            _ => network.name.clone(),
        };
        for &group in &switches {
            node(graph, &name(group), "network", String::new());
        }
        let least = measured.iter().map(|(_, measured)| measured.alpha_ns).reduce(f64::min);
        for member in &network.members {
            let site = &self.sites[member.0];
            let own = measured.iter().filter(|(sites, _)| sites.contains(&member.0)).map(|(_, m)| m.alpha_ns);
            let alpha_ns = own.reduce(f64::min).or(least).unwrap_or(self.model.tcp.alpha_ns);
            let from = match member.1 {
                Some(port) => port_name(site, &self.told[site.ranks[0]].ports[port]),
                None => self.homes(site).swap_remove(0),
            };
            link(graph, [&from, &name(groups.of(member.0))], "network", short(alpha_ns / 2e3), gb_s(member));
        }
        // What was measured between groups is what joins them.
        for (number, &high) in switches.iter().enumerate() {
            for &low in &switches[..number] {
                let between = measured.iter().filter(|([a, b], _)| {
                    let ends = [groups.of(*a), groups.of(*b)];
                    ends == [low, high] || ends == [high, low]
                });
                if let Some(gb_s) = between.map(|(_, measured)| measured.gb_s).reduce(f64::max) {
                    link(graph, [&name(low), &name(high)], "network", 0.0, gb_s);
                }
            }
        }
    }
}

fn port_name(site: &Site, port: &Port) -> String {
    format!("{}/{}", site.name, port.interface)
}

/// Sets of sites.
struct Groups(Vec<usize>);

impl Groups {
    fn new(sites: usize) -> Groups {
        Groups((0..sites).collect())
    }

    /// The lowest site of a set.
    fn of(&self, mut site: usize) -> usize {
        while self.0[site] != site {
            site = self.0[site];
        }
        site
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.of(a), self.of(b));
        self.0[a.max(b)] = a.min(b);
    }
}

/// The devices of a machine.
struct Tree<'a> {
    site: &'a str,
    homes: &'a [String],
    machine: &'a Machine,
    switches: &'a [Switch],
}

impl Tree<'_> {
    fn switch_name(&self, switch: &Switch) -> String {
        format!("{}/pcie {}", self.site, switch.busid())
    }

    /// The name of what a device hangs from: the nearest switch, but for `but` and those below it, or its NUMA node.
    fn parent(&self, slot: Option<&Slot>, but: Option<&Switch>) -> String {
        let path = but.map_or_else(|| slot.map_or(&[][..], |slot| &slot.path), |switch| &switch.path);
        match self.switches.iter().rev().find(|switch| switch.holds(path)) {
            Some(switch) => self.switch_name(switch),
            None => self.homes[self.machine.numa_of_slot(slot).min(self.homes.len() - 1)].clone(),
        }
    }

    /// Switches, GPUs and NVLinks.
    fn draw(&self, graph: &mut Description, gpus: &[Gpu]) {
        for switch in self.switches {
            let name = self.switch_name(switch);
            node(graph, &name, "pcie", String::new());
            // The devices below are in the same NUMA node, and its link is as wide as theirs.
            let below = gpus.iter().filter_map(|gpu| gpu.slot.as_ref()).find(|slot| switch.holds(&slot.path));
            let gb_s = below.map_or_else(|| pcie_gb_s("", 0), Slot::gb_s);
            link(graph, [&self.parent(below, Some(switch)), &name], "pcie", PCIE_US, gb_s);
        }
        let name = |at: usize| format!("{}/gpu{at}", self.site);
        for (at, gpu) in gpus.iter().enumerate() {
            node(graph, &name(at), "gpu", format!("{}, {}", gpu.name, gpu.busid));
            let gb_s = gpu.slot.as_ref().map_or_else(|| pcie_gb_s("", 0), Slot::gb_s);
            link(graph, [&self.parent(gpu.slot.as_ref(), None), &name(at)], "pcie", PCIE_US, gb_s);
        }
        let nvswitch = format!("{}/nvswitch", self.site);
        if gpus.iter().any(|gpu| gpu.nvlinks.iter().any(|(end, _)| *end == End::Switch)) {
            node(graph, &nvswitch, "nvswitch", String::new());
        }
        for (at, gpu) in gpus.iter().enumerate() {
            for (end, count) in &gpu.nvlinks {
                let gb_s = f64::from(*count) * nvlink_gb_s(gpu.sm);
                let to = match end {
                    End::Switch => nvswitch.clone(),
                    End::Processor => self.parent(gpu.slot.as_ref(), None),
                    End::Gpu(busid) => match gpus.iter().position(|gpu| gpu.busid == *busid) {
                        // Both ends tell; a GPU that is not there is hidden from us.
                        Some(other) if at < other => name(other),
                        _ => continue,
                    },
                };
                link(graph, [&name(at), &to], "nvlink", NVLINK_US, gb_s);
            }
        }
    }
}

#[cfg(test)]
mod tests;
