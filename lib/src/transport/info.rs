//! The ways in which the other ranks reach one.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::VerbsAddress;
use crate::bootstrap::Host;

/// How others reach a rank. The rendezvous tells it to all of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointInfo {
    /// Addresses and ports, loopback included.
    pub tcp: Vec<SocketAddr>,
    /// Name of the Unix socket in the abstract namespace; `None` without shared memory.
    pub unix: Option<String>,
    /// Ports of RDMA devices; empty when RDMA is not asked for.
    #[serde(default)]
    pub verbs: Vec<VerbsAddress>,
    /// What fabrics of the caller's own say ([`Endpoint::with_fabrics`](super::Endpoint::with_fabrics)), by [`Fabric::kind`](super::Fabric::kind).
    #[serde(default)]
    pub other: BTreeMap<String, String>,
    /// Machine, network namespace and user.
    pub host: Host,
    /// Process id, for messages.
    pub pid: u32,
}
