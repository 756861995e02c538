//! A fat tree of three levels of equal switches with k ports, after Al-Fares, Loukissas and Vahdat (2008).
//!
//! ```text
//!  core             (k/2)² switches
//!                  /      |       \
//!  pods         pod 0   pod 1 ... pod k-1      k/2 aggregation switches in each
//!                 |
//!  leaves       k/2 in each pod, with k/2 hosts each: k³/4 hosts, one rank on each
//! ```
//! The destination fixes the route, as in InfiniBand's subnet managers (d-mod-k, E. Zahavi 2010): a leaf sends to host
//! d through aggregation switch d mod k/2, which sends through core (d / (k/2)) mod k/2. With an oversubscription of o,
//! every link above the leaves has 1/o of a host's bandwidth.
//!
//! The built-in figures: 50 GB/s (400 Gb/s, NVIDIA's data sheets of Quantum-2 and ConnectX-7); 1.5 µs of latency and
//! 0.3 µs per switch are assumptions.

use super::{Costs, LinkId, Machine, Translation, divides};

/// A k-ary fat tree.
#[derive(Debug, Clone, PartialEq)]
pub struct FatTree {
    /// Half of the ports of a switch.
    half: usize,
    oversubscription: f64,
    /// Seconds of a message without switches.
    pub latency: f64,
    /// Seconds for each switch.
    pub per_switch: f64,
    /// Bytes per second of a host's link, each way.
    pub bandwidth: f64,
    /// Costs of the ranks' processors.
    pub costs: Costs,
}

const KINDS: [&str; 6] = ["host out", "host in", "leaf up", "leaf down", "pod up", "pod down"];
const HOST_OUT: u16 = 0;
const HOST_IN: u16 = 1;
const LEAF_UP: u16 = 2;
const LEAF_DOWN: u16 = 3;
const POD_UP: u16 = 4;
const POD_DOWN: u16 = 5;

impl FatTree {
    /// The smallest one with places for `ranks`.
    pub fn new(ranks: usize, oversubscription: f64) -> FatTree {
        let half = (1..).find(|half: &usize| 2 * half.pow(3) >= ranks).unwrap_or(1);
        FatTree::of(2 * half, oversubscription)
    }

    /// Returns a fat tree of switches with `ports` ports, an even number.
    pub fn of(ports: usize, oversubscription: f64) -> FatTree {
        let costs = Costs { call: 2e-6, overhead: 0.0, reduce: 3.0 / 1.2e12, copy: 2.0 / 1.2e12 };
        let (latency, per_switch) = (1.5e-6, 0.3e-6);
        FatTree { half: (ports / 2).max(1), oversubscription, latency, per_switch, bandwidth: 50e9, costs }
    }
}

impl Machine for FatTree {
    fn name(&self) -> String {
        format!("fat tree of {}-port switches, oversubscription {}", 2 * self.half, self.oversubscription)
    }

    fn ranks(&self) -> usize {
        2 * self.half.pow(3)
    }

    fn costs(&self) -> Costs {
        self.costs
    }

    fn kinds(&self) -> Vec<String> {
        KINDS.map(String::from).to_vec()
    }

    fn bandwidth(&self, link: LinkId) -> f64 {
        if matches!(link.kind, HOST_OUT | HOST_IN) { self.bandwidth } else { self.bandwidth / self.oversubscription }
    }

    fn link_name(&self, link: LinkId) -> String {
        let (at, half) = (link.at as usize, self.half);
        let kind = KINDS.get(usize::from(link.kind)).unwrap_or(&"?");
        match link.kind {
            HOST_OUT | HOST_IN => format!("{kind}, host {at}"),
            LEAF_UP | LEAF_DOWN => format!("{kind}, leaf {} port {}", at / half, at % half),
            _ => format!("{kind}, pod {} switch {} port {}", at / half.pow(2), at / half % half, at % half),
        }
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        let half = self.half;
        let mut link = |kind, at: usize| links.push(LinkId { kind, at: at as u32 });
        let (leaf_from, leaf_to) = (from / half, to / half);
        let (pod_from, pod_to) = (leaf_from / half, leaf_to / half);
        let (aggregation, core) = (to % half, leaf_to % half);
        let mut switches = 1;
        link(HOST_OUT, from);
        if leaf_from != leaf_to {
            switches = 3;
            link(LEAF_UP, leaf_from * half + aggregation);
            if pod_from != pod_to {
                switches = 5;
                link(POD_UP, (pod_from * half + aggregation) * half + core);
                link(POD_DOWN, (pod_to * half + aggregation) * half + core);
            }
            link(LEAF_DOWN, leaf_to * half + aggregation);
        }
        link(HOST_IN, to);
        self.latency + f64::from(switches) * self.per_switch
    }

    fn period(&self, translation: Translation, ranks: usize) -> Option<usize> {
        let pod = self.half * self.half;
        // Within a leaf all hosts are alike; within a pod all leaves; above, all pods.
        let block = match ranks {
            n if n <= self.half => 1,
            n if n <= pod => self.half,
            _ => pod,
        };
        divides(translation, block, ranks)
    }
}
