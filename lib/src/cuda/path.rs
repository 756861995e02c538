//! Which way a communicator's data takes, and why.

use std::fmt;

use super::window::MAX_RANKS;
use crate::config::CudaPath;

/// How the calls of a [`DeviceComm`](super::DeviceComm) reach the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Kernels write into the other ranks' memory.
    Peer,
    /// The same by kernels that never wait: ranks of several processes have one GPU.
    Phased,
    /// Through page-locked memory of the hosts and the links of the host communicator.
    Hosted,
}

impl Path {
    /// Whether calls can be captured in a CUDA graph.
    pub fn captures(self) -> bool {
        self == Path::Peer
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Path::Peer => "kernels over the peers' memory",
            Path::Phased => "kernels in turns over shared GPUs",
            Path::Hosted => "through the hosts' memory",
        })
    }
}

/// Why the peers' memory is not even tried; `None` if it is.
pub(super) fn obstacle(asked: CudaPath, one_host: bool, ranks: usize) -> Option<String> {
    match asked {
        CudaPath::Hosted => Some("TINYNCCL_CUDA_PATH=hosted asks for it".to_owned()),
        _ if !one_host => Some("the ranks are on several hosts".to_owned()),
        _ if ranks > MAX_RANKS => Some(format!("there are {ranks} ranks, and kernels join {MAX_RANKS} at most")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peers_memory_is_tried_where_it_may_work() {
        for asked in [CudaPath::Auto, CudaPath::Peer] {
            assert_eq!(obstacle(asked, true, MAX_RANKS), None);
            assert!(obstacle(asked, true, MAX_RANKS + 1).unwrap().contains("9 ranks"));
            assert!(obstacle(asked, false, 2).unwrap().contains("several hosts"));
        }
        assert!(obstacle(CudaPath::Hosted, true, 2).unwrap().contains("TINYNCCL_CUDA_PATH"));
    }
}
