//! NCCL's description of one host, or of the hosts of one NVLink domain: the XML of `NCCL_TOPO_FILE` and
//! `NCCL_TOPO_DUMP_FILE`. A GPU is a rank.
//!
//! ```text
//! system > cpu > pci (a bridge) > pci > gpu > nvlink          cpu: a NUMA node     pci, by its class: bridge, GPU, NIC
//!                               > pci > nic > net             nvlink: links to a GPU, a processor, or NVSwitches
//! ```
//! Elements that are not of the list are left out, as NCCL does. NVSwitches are one node: each GPU's links are spread
//! over all of them. Facts: NCCL `src/graph/xml.cc`, `topo.cc`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::str::FromStr;

use roxmltree::{Document, Node as Element, ParsingOptions};

use super::description::{Description, Duplex, Link, Node};
use super::nominal::{NETWORK_US, NVLINK_US, PCIE_US, SOCKET_US, nvlink_gb_s, pcie_gb_s, port_gb_s, socket_gb_s};

/// Most elements, and most bridges in a row, of a file.
const MOST_ELEMENTS: u32 = 100_000;
const DEEPEST: usize = 32;
/// Most links that an element may stand for.
const MOST_LINKS: u32 = 1024;
/// Name of the node that stands for all NVSwitches, and of the one that joins the ports of several hosts.
const NVSWITCH: &str = "nvswitch";
const NETWORK: &str = "network";
/// Generation of a GPU that the file names by its class alone.
const UNKNOWN_SM: u32 = 80;

type Read<T> = Result<T, String>;

/// Reads the text of a file.
pub(super) fn read(text: &str) -> Read<Description> {
    let options = ParsingOptions { nodes_limit: MOST_ELEMENTS, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        let (line, words) = (error.pos().row, error.to_string());
        // The words end with the position.
        let words = words.split(" at ").next().unwrap_or_default().to_owned();
        format!("line {line}: {words}")
    })?;
    let system = document.root_element();
    if system.tag_name().name() != "system" {
        return wrong(system, format!("<{}>, expected NCCL's <system>", system.tag_name().name()));
    }
    let version: u32 = number(system, "version")?.unwrap_or(1);
    if version != 1 {
        return wrong(system, format!("version {version}, expected 1"));
    }
    let cpus: Vec<Element<'_, '_>> = elements(system, "cpu").collect();
    let mut hosts: Vec<&str> = Vec::new();
    for cpu in &cpus {
        let host = cpu.attribute("host_hash").unwrap_or_default();
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let mut reader = Reader { several: hosts.len() > 1, ..Reader::default() };
    for cpu in cpus {
        let host = cpu.attribute("host_hash").unwrap_or_default();
        reader.cpu(cpu, hosts.iter().position(|&known| known == host).unwrap_or(0))?;
    }
    reader.join_sockets();
    reader.join_gpus()?;
    let name = system.attribute("name").unwrap_or("NCCL's topology").to_owned();
    reader.finish(system, name)
}

fn wrong<T>(at: Element<'_, '_>, detail: String) -> Read<T> {
    Err(format!("line {}: {detail}", line(at)))
}

fn line(at: Element<'_, '_>) -> u32 {
    at.document().text_pos_at(at.range().start).row
}

fn elements<'a, 'input>(of: Element<'a, 'input>, name: &'static str) -> impl Iterator<Item = Element<'a, 'input>> {
    of.children().filter(move |child| child.has_tag_name(name))
}

/// A kind of number, in words.
trait Number: FromStr {
    const WORDS: &'static str;
}

impl Number for u32 {
    const WORDS: &'static str = "a whole number from 0 to 4294967295";
}

impl Number for i32 {
    const WORDS: &'static str = "a whole number";
}

impl Number for f64 {
    const WORDS: &'static str = "a number";
}

/// An attribute that is a number; `None` where it is not there.
fn number<T: Number>(at: Element<'_, '_>, name: &str) -> Read<Option<T>> {
    let Some(text) = at.attribute(name) else { return Ok(None) };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => {
            let (tag, expected) = (at.tag_name().name(), T::WORDS);
            wrong(at, format!("<{tag}> has {name}={text:?}, expected {expected}"))
        }
    }
}

/// An attribute that must be there.
fn text<'a>(at: Element<'a, '_>, name: &str) -> Read<&'a str> {
    match at.attribute(name) {
        Some(text) => Ok(text),
        None => wrong(at, format!("<{}> has no {name}", at.tag_name().name())),
    }
}

/// A NUMA node.
struct Cpu {
    host: usize,
    name: String,
    socket_gb_s: f64,
}

/// A GPU, and what orders the ranks.
struct Gpu {
    node: Node,
    rank: Option<u32>,
    dev: u32,
    host: usize,
    cpu: String,
    busid: String,
    links: Vec<NvLink>,
}

/// Links of one GPU to one target.
struct NvLink {
    line: u32,
    /// Bus id; lower case.
    target: String,
    class: String,
    gb_s: f64,
    /// To the processor's memory.
    coherent: bool,
}

#[derive(Default)]
struct Reader {
    /// Names begin with that of the host.
    several: bool,
    cpus: Vec<Cpu>,
    gpus: Vec<Gpu>,
    /// All but the GPUs.
    nodes: Vec<Node>,
    links: Vec<Link>,
    names: HashSet<String>,
    /// With the host.
    busids: HashSet<(usize, String)>,
    ports: Vec<String>,
}

impl Reader {
    /// A name that no node has yet.
    fn name(&mut self, host: usize, name: &str) -> String {
        let name = if self.several { format!("host{host}/{name}") } else { name.to_owned() };
        let mut free = name.clone();
        let mut number = 1;
        while !self.names.insert(free.clone()) {
            number += 1;
            free = format!("{name}.{number}");
        }
        free
    }

    fn node(&mut self, name: &str, kind: &str, note: Option<String>) {
        self.nodes.push(labelled(name, kind, note));
    }

    fn link(&mut self, between: [&str; 2], kind: &str, latency_us: f64, bandwidth_gb_s: f64) {
        let between = between.map(str::to_owned);
        let (duplex, kind) = (Duplex::Full, Some(kind.to_owned()));
        self.links.push(Link { between, latency_us, bandwidth_gb_s, duplex, kind, shared: None });
    }

    fn cpu(&mut self, cpu: Element<'_, '_>, host: usize) -> Read<()> {
        let numa: i32 = number(cpu, "numaid")?.unwrap_or(0);
        let name = self.name(host, &format!("numa{}", numa.max(0)));
        let (arch, vendor) = (cpu.attribute("arch").unwrap_or_default(), cpu.attribute("vendor").unwrap_or_default());
        let (family, model) = (number(cpu, "familyid")?.unwrap_or(0), number(cpu, "modelid")?.unwrap_or(0));
        let words: Vec<&str> = [arch, vendor].into_iter().filter(|word| !word.is_empty()).collect();
        self.node(&name, "numa", (!words.is_empty()).then(|| words.join(", ")));
        self.cpus.push(Cpu { host, name: name.clone(), socket_gb_s: socket_gb_s(arch, vendor, family, model) });
        for pci in elements(cpu, "pci") {
            self.pci(pci, host, &name, &name, 0)?;
        }
        for nic in elements(cpu, "nic") {
            self.nic(nic, host, &name, f64::INFINITY)?;
        }
        Ok(())
    }

    /// A device below `parent`, of the NUMA node `cpu`.
    fn pci(&mut self, pci: Element<'_, '_>, host: usize, cpu: &str, parent: &str, depth: usize) -> Read<()> {
        if depth > DEEPEST {
            return wrong(pci, format!("more than {DEEPEST} PCIe devices inside each other"));
        }
        let busid = text(pci, "busid")?.to_ascii_lowercase();
        if !self.busids.insert((host, busid.clone())) {
            return wrong(pci, format!("busid {busid} is there twice"));
        }
        let class = pci.attribute("class").unwrap_or_default();
        let gb_s = pcie_gb_s(pci.attribute("link_speed").unwrap_or_default(), number(pci, "link_width")?.unwrap_or(0));
        let gpus: Vec<Element<'_, '_>> = elements(pci, "gpu").collect();
        if gpus.is_empty() && class.starts_with("0x03") {
            return self.gpu(pci, None, host, [cpu, parent], &busid, gb_s);
        }
        for &gpu in &gpus {
            self.gpu(pci, Some(gpu), host, [cpu, parent], &busid, gb_s)?;
        }
        let nics: Vec<Element<'_, '_>> = elements(pci, "nic").collect();
        for &nic in &nics {
            self.nic(nic, host, parent, gb_s)?;
        }
        match class {
            _ if !gpus.is_empty() || !nics.is_empty() => Ok(()),
            // A switch that NVLinks lead to is no device of the PCIe tree for those who send.
            _ if class.starts_with("0x0680") => Ok(()),
            _ if class.starts_with("0x02") => {
                let name = self.name(host, &format!("nic {busid}"));
                self.node(&name, "port", None);
                self.link([parent, &name], "pcie", PCIE_US, gb_s);
                Ok(())
            }
            _ => {
                let name = self.name(host, &format!("pcie {busid}"));
                self.node(&name, "pcie", None);
                self.link([parent, &name], "pcie", PCIE_US, gb_s);
                elements(pci, "pci").try_for_each(|below| self.pci(below, host, cpu, &name, depth + 1))
            }
        }
    }

    fn gpu(
        &mut self,
        pci: Element<'_, '_>,
        gpu: Option<Element<'_, '_>>,
        host: usize,
        [cpu, parent]: [&str; 2],
        busid: &str,
        gb_s: f64,
    ) -> Read<()> {
        let at = gpu.unwrap_or(pci);
        let dev = number(at, "dev")?.unwrap_or(self.gpus.iter().filter(|other| other.host == host).count() as u32);
        let sm: u32 = number(at, "sm")?.unwrap_or(UNKNOWN_SM);
        let rank = number::<i32>(at, "rank")?.and_then(|rank| u32::try_from(rank).ok());
        let mut links = Vec::new();
        for link in elements(at, "nvlink") {
            let count = count(link)?;
            let class = link.attribute("tclass").unwrap_or_default().to_owned();
            let target = link.attribute("target").unwrap_or_default().to_ascii_lowercase();
            if target == busid {
                return wrong(link, format!("an NVLink of {busid} leads to {busid} itself"));
            }
            links.push(NvLink {
                line: line(link),
                target,
                class,
                gb_s: f64::from(count) * nvlink_gb_s(sm),
                coherent: false,
            });
        }
        for link in elements(at, "c2c") {
            let mb_s: f64 = number(link, "bw")?.unwrap_or(0.0);
            let gb_s = f64::from(count(link)?) * mb_s / 1e3;
            links.push(NvLink { line: line(link), target: String::new(), class: String::new(), gb_s, coherent: true });
        }
        let name = self.name(host, &format!("gpu{dev}"));
        let note = gpu.and_then(|gpu| gpu.attribute("sm")).map_or(busid.to_owned(), |sm| format!("{busid}, sm {sm}"));
        self.link([parent, &name], "pcie", PCIE_US, gb_s);
        let node = Node { ranks: 1, ..labelled(&name, "gpu", Some(note)) };
        let (cpu, busid) = (cpu.to_owned(), busid.to_owned());
        self.gpus.push(Gpu { node, rank, dev, host, cpu, busid, links });
        Ok(())
    }

    /// The ports of a network card that hangs from `parent` by `gb_s`.
    fn nic(&mut self, nic: Element<'_, '_>, host: usize, parent: &str, gb_s: f64) -> Read<()> {
        for net in elements(nic, "net") {
            // Known to the driver, and not used: without a number.
            let Some(dev) = net.attribute("dev") else { continue };
            let mbit: f64 = number(net, "speed")?.unwrap_or(0.0);
            let latency: Option<f64> = number(net, "latency")?;
            let latency = latency.filter(|us| us.is_finite() && *us > 0.0).unwrap_or(NETWORK_US);
            let name = net.attribute("name").map_or_else(|| format!("net{dev}"), str::to_owned);
            let name = self.name(host, &name);
            let known = mbit.is_finite() && mbit > 0.0;
            let note = if known { format!("{} Gbit/s", mbit / 1e3) } else { "speed unknown".to_owned() };
            self.node(&name, "port", Some(note));
            self.link([parent, &name], "pcie", PCIE_US, gb_s.min(port_gb_s(mbit)));
            // Where there is one host, a way through the network and back is none.
            if self.several {
                self.link([&name, NETWORK], "network", latency, port_gb_s(mbit));
                self.ports.push(name);
            }
        }
        Ok(())
    }

    /// Every NUMA node reaches every other one of its host.
    fn join_sockets(&mut self) {
        for high in 0..self.cpus.len() {
            for low in 0..high {
                let (a, b) = (&self.cpus[low], &self.cpus[high]);
                if a.host == b.host {
                    let gb_s = a.socket_gb_s.min(b.socket_gb_s);
                    let [a, b] = [a.name.clone(), b.name.clone()];
                    self.link([&a, &b], "socket", SOCKET_US, gb_s);
                }
            }
        }
    }

    fn join_gpus(&mut self) -> Read<()> {
        // Both ends of a link name it.
        let mut pairs: BTreeMap<[usize; 2], [f64; 2]> = BTreeMap::new();
        let by_bus: HashMap<(usize, &str), usize> =
            self.gpus.iter().enumerate().rev().map(|(at, gpu)| ((gpu.host, gpu.busid.as_str()), at)).collect();
        let mut links: Vec<([String; 2], &str, f64)> = Vec::new();
        for (at, gpu) in self.gpus.iter().enumerate() {
            for link in &gpu.links {
                let name = &gpu.node.name;
                if !link.gb_s.is_finite() || link.gb_s < 0.0 {
                    return Err(format!("line {}: {} GB/s, expected a bandwidth", link.line, link.gb_s));
                }
                if link.gb_s == 0.0 {
                    continue;
                }
                match link.class.as_str() {
                    _ if link.coherent => links.push(([gpu.cpu.clone(), name.clone()], "c2c", link.gb_s)),
                    "0x068001" => links.push(([gpu.cpu.clone(), name.clone()], "nvlink", link.gb_s)),
                    class if class.starts_with("0x03") => {
                        // One that is not there is hidden from the job.
                        if let Some(&other) = by_bus.get(&(gpu.host, link.target.as_str())) {
                            let (low, high) = (at.min(other), at.max(other));
                            pairs.entry([low, high]).or_default()[usize::from(at > other)] += link.gb_s;
                        }
                    }
                    _ => links.push(([NVSWITCH.to_owned(), name.clone()], "nvlink", link.gb_s)),
                }
            }
        }
        for ([a, b], [there, back]) in pairs {
            let gb_s = if there > 0.0 && back > 0.0 { there.min(back) } else { there.max(back) };
            let name = |at: usize| self.gpus[at].node.name.clone();
            links.push(([name(a), name(b)], "nvlink", gb_s));
        }
        if links.iter().any(|([from, _], ..)| from == NVSWITCH) {
            self.node(NVSWITCH, NVSWITCH, None);
        }
        for ([a, b], kind, gb_s) in links {
            self.link([&a, &b], kind, NVLINK_US, gb_s);
        }
        Ok(())
    }

    /// The GPUs first, in the order of their ranks.
    fn finish(mut self, system: Element<'_, '_>, name: String) -> Read<Description> {
        if self.gpus.is_empty() {
            return wrong(system, "no GPU is in it: expected a <gpu>, or a <pci> of class 0x03".to_owned());
        }
        if !self.ports.is_empty() {
            self.node(NETWORK, NETWORK, None);
        }
        let ranked = self.gpus.iter().all(|gpu| gpu.rank.is_some());
        self.gpus.sort_by_key(|gpu| (gpu.rank.filter(|_| ranked), gpu.host, gpu.dev));
        let node = self.gpus.into_iter().map(|gpu| gpu.node).chain(self.nodes).collect();
        Ok(Description { name, node, link: self.links, ..Description::default() })
    }
}

fn labelled(name: &str, kind: &str, note: Option<String>) -> Node {
    Node { name: name.to_owned(), kind: Some(kind.to_owned()), note, ..Node::default() }
}

/// The number of links of an element.
fn count(link: Element<'_, '_>) -> Read<u32> {
    match number(link, "count")?.unwrap_or(1) {
        many if many > MOST_LINKS => wrong(link, format!("count is {many}, expected at most {MOST_LINKS}")),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests;
