//! Nodes of eight GPUs: NVSwitch inside, a NIC per GPU between them, NIC i of every node on rail i.
//!
//! ```text
//!   node 0                     node 1
//!   GPU 0 ... GPU 7            GPU 0 ... GPU 7      out and in: each GPU's NVLinks to the NVSwitch
//!     | \_NVSwitch_/ |
//!   NIC 0 ... NIC 7            NIC 0 ... NIC 7      out and in: each GPU's NIC
//!     |          |               |          |
//!   rail 0 ... rail 7: one switch each; the switches are joined by a spine that never blocks
//! ```
//! Messages within a node take NVLink, others the NICs of both GPUs. Between different rails they go through the spine,
//! which takes longer. (NCCL would first go over NVLink to the GPU on the right rail, "PXN".)
//!
//! | figure | value | source |
//! |---|---|---|
//! | NVLink, each way per GPU | 360 GB/s | what a kernel that only writes to the other GPU reached between two H200 (`docs/benchmarks/2026-11-21-gpu-collectives.md`); nominal 450 |
//! | call, hop: Simple | 5.4 and 2.9 µs | `docs/benchmarks/2026-11-22-gpu-schedules.md`, 8 to 512 bytes: one hop (direct) 8.3, two (ring) 11.2 µs |
//! | call, hop: LL | 3.8 and 1.2 µs | the same: 5.0 and 6.2 µs |
//! | LL | half the bandwidth | 4 of 8 bytes are flags (NCCL `src/device/prims_ll.h`) |
//! | combining a byte | 0.625 ps | three bytes of memory traffic at 4.8 TB/s (NVIDIA's data sheet of the H200) |
//! | NIC | 50 GB/s, 400 Gb/s | NVIDIA's data sheet of the DGX H200 (ConnectX-7); nothing was measured |
//! | between nodes | 2 µs more, 1 µs more through the spine | assumed: RDMA write 1 to 2 µs, a switch 0.2 to 0.5 |

use super::{Costs, LinkId, Machine, Translation, divides};

/// GPUs of a node.
const NODE: usize = 8;
const GPU_OUT: u16 = 0;
const GPU_IN: u16 = 1;
const NIC_OUT: u16 = 2;
const NIC_IN: u16 = 3;

/// Protocol by which a message signals its arrival, with NCCL's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// A flag after the data.
    Simple,
    /// A flag in every 8 bytes: half of the bandwidth, and less than half of the latency.
    LL,
}

/// Nodes of eight GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Dgx {
    ranks: usize,
    protocol: Protocol,
}

impl Dgx {
    /// `ranks` GPUs, eight in a node.
    pub fn new(ranks: usize, protocol: Protocol) -> Dgx {
        Dgx { ranks, protocol }
    }
}

impl Machine for Dgx {
    fn name(&self) -> String {
        format!("dgx, {} nodes of {NODE} GPUs, {:?}", self.ranks.div_ceil(NODE), self.protocol)
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn costs(&self) -> Costs {
        let call = match self.protocol {
            Protocol::Simple => 5.4e-6,
            Protocol::LL => 3.8e-6,
        };
        Costs { call, overhead: 0.0, reduce: 3.0 / 4.8e12, copy: 2.0 / 4.8e12 }
    }

    fn kinds(&self) -> Vec<String> {
        ["NVLink out", "NVLink in", "NIC out", "NIC in"].map(String::from).to_vec()
    }

    fn bandwidth(&self, link: LinkId) -> f64 {
        let full = if matches!(link.kind, GPU_OUT | GPU_IN) { 360e9 } else { 50e9 };
        full / if self.protocol == Protocol::LL { 2.0 } else { 1.0 }
    }

    fn link_name(&self, link: LinkId) -> String {
        let (node, gpu) = (link.at as usize / NODE, link.at as usize % NODE);
        let what = ["NVLink out", "NVLink in", "NIC out", "NIC in"];
        format!("node {node} GPU {gpu} {}", what.get(usize::from(link.kind)).unwrap_or(&"?"))
    }

    fn route(&self, from: usize, to: usize, links: &mut Vec<LinkId>) -> f64 {
        let hop = match self.protocol {
            Protocol::Simple => 2.9e-6,
            Protocol::LL => 1.2e-6,
        };
        let (a, b) = (from as u32, to as u32);
        if from / NODE == to / NODE {
            links.extend([LinkId { kind: GPU_OUT, at: a }, LinkId { kind: GPU_IN, at: b }]);
            return hop;
        }
        links.extend([LinkId { kind: NIC_OUT, at: a }, LinkId { kind: NIC_IN, at: b }]);
        hop + if from % NODE == to % NODE { 2e-6 } else { 3e-6 }
    }

    fn period(&self, translation: Translation, ranks: usize) -> Option<usize> {
        let block = if ranks <= NODE { 1 } else { NODE };
        divides(translation, block, ranks)
    }
}
