//! Addresses at which the other ranks reach one.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::VerbsAddress;
use crate::bootstrap::Host;

/// Addresses at which other ranks reach a rank. The rendezvous sends them to all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// Addresses and ports, loopback included.
    pub tcp: Vec<SocketAddr>,
    /// Name of the Unix socket in the abstract namespace; `None` without shared memory.
    pub unix: Option<String>,
    /// Ports of RDMA devices; empty when RDMA is not asked for.
    #[serde(default)]
    pub verbs: Vec<VerbsAddress>,
    /// Descriptions by the caller's own fabrics ([`Endpoint::with_fabrics`](super::Endpoint::with_fabrics)), by
    /// [`Fabric::kind`](super::Fabric::kind).
    #[serde(default)]
    pub other: BTreeMap<String, String>,
    /// Name of the process's beacon, which proves its death to processes of its host.
    #[serde(default)]
    pub beacon: Option<String>,
    /// Machine, network namespace and user.
    pub host: Host,
    /// Process id, for messages.
    pub pid: u32,
}
