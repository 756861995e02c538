//! Variables of the environment and of NCCL's files.

use std::collections::BTreeMap;
use std::ffi::OsString;

use super::conf;

/// Returns a variable of the environment, else of NCCL's files.
pub(crate) fn get(name: &str) -> Option<String> {
    let set = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    set.or_else(|| conf::variables().get(name).cloned())
}

/// All variables of the environment and of the files, by name.
pub(crate) fn all() -> Vec<(String, String)> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let mut all: BTreeMap<String, String> = conf::variables().iter().map(|(n, v)| (n.clone(), v.clone())).collect();
    all.extend(std::env::vars_os().map(|(name, value)| (text(name), text(value))));
    all.into_iter().collect()
}

/// Returns the name under which the user has set a setting of tinynccl: its own, or NCCL's.
pub(crate) fn spelt(name: String) -> String {
    let theirs = match name.as_str() {
        "TINYNCCL_IFNAME" => "NCCL_SOCKET_IFNAME",
        "TINYNCCL_ALGO" => "NCCL_ALGO",
        "TINYNCCL_CUDA_PROTO" | "TINYNCCL_CUDA_LL128" => "NCCL_PROTO",
        "TINYNCCL_CUDA_BLOCKS" => "NCCL_MAX_CTAS",
        "TINYNCCL_CUDA_PATH" => "NCCL_P2P_DISABLE",
        "TINYNCCL_TOPOLOGY" => "NCCL_TOPO_FILE",
        "TINYNCCL_TRANSPORT" => "NCCL_SHM_DISABLE",
        _ => return name,
    };
    if get(&name).is_none() && get(theirs).is_some() { theirs.to_owned() } else { name }
}
