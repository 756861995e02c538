//! The settings of NCCL's users, as settings of this library.

use std::time::Duration;

use tinynccl::Config;
use tinynccl::config::{Environment, Tune};

use crate::fault::Result;

/// NCCL's kernels wait for ever, so a program may well compute for minutes on one rank while the others wait in a
/// collective. Longer than the library's default, and still finite.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// The ranks of a job may start this long one after the other.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// A variable of NCCL that has a meaning here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    /// NCCL's variable.
    pub(crate) name: &'static str,
    /// What it is here, for people.
    pub(crate) meaning: &'static str,
}

macro_rules! settings {
    ($($name:literal: $meaning:literal;)*) => { &[$(Setting { name: $name, meaning: $meaning }),*] };
}

/// The variables of NCCL that are read here.
pub(crate) const HONOURED: &[Setting] = settings! {
    "NCCL_DEBUG": "what is logged: VERSION, WARN, INFO or TRACE";
    "NCCL_DEBUG_FILE": "where the log goes: a file (%h: host, %p: process), stdout or stderr; standard output if empty";
    "NCCL_COMM_ID": "ip:port at which the rank 0 of every communicator waits; ncclGetUniqueId gives the same id everywhere";
    "NCCL_SOCKET_IFNAME": "network interfaces: prefixes, = before exact names, ^ before names to leave out; TINYNCCL_IFNAME";
    "NCCL_ALGO": "Ring or Tree fixes the algorithm; TINYNCCL_ALGO";
    "NCCL_PROTO": "LL, LL128 or Simple fixes the protocol; TINYNCCL_CUDA_PROTO";
    "NCCL_MAX_CTAS": "most blocks of a kernel; TINYNCCL_CUDA_BLOCKS";
    "NCCL_MIN_CTAS": "checked, and no more: the number of blocks depends on the size of the call";
    "NCCL_P2P_DISABLE": "1: calls go through the hosts' memory; TINYNCCL_CUDA_PATH";
    "NCCL_SHM_DISABLE": "1: between processes of a host, TCP instead of shared memory; TINYNCCL_TRANSPORT";
    "NCCL_COMM_BLOCKING": "0: communicators are non-blocking, 1: blocking, whatever their configurations say";
};

/// A variable of the environment.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The settings of a communicator, from the environment.
///
/// # Errors
/// A variable of tinynccl that does not parse.
pub(crate) fn config() -> Result<Config> {
    let environment = Environment::default();
    let config = from(&|name| environment.get(name));
    environment.check()?;
    config
}

/// [`config`] over any source of variables.
fn from(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Config> {
    let mut config = Config::from_lookup(|name| lookup(name).or_else(|| counterpart(name, lookup)))?;
    if lookup("TINYNCCL_TIMEOUT").is_none() {
        config.timeout = TIMEOUT;
    }
    if lookup("TINYNCCL_CONNECT_TIMEOUT").is_none() {
        config.connect_timeout = CONNECT_TIMEOUT.min(config.timeout);
    }
    if lookup("TINYNCCL_TUNE").is_none() {
        // Measures links of the hosts, which calls on GPUs hardly use; starting takes up to 50 ms less without.
        config.tune = Tune::Off;
    }
    Ok(config)
}

/// The value that a setting of tinynccl gets from NCCL's variables; `None` where they say nothing, or nothing that it
/// can take.
fn counterpart(name: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let given = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    let on = |name: &str| given(name).is_some_and(|value| value != "0");
    match name {
        "TINYNCCL_IFNAME" => given("NCCL_SOCKET_IFNAME"),
        "TINYNCCL_ALGO" => match given("NCCL_ALGO")?.to_ascii_lowercase().as_str() {
            "ring" => Some("ring".to_owned()),
            "tree" => Some("double-tree".to_owned()),
            _ => None,
        },
        "TINYNCCL_CUDA_PROTO" => match given("NCCL_PROTO")?.to_ascii_lowercase().as_str() {
            one @ ("ll" | "ll128" | "simple") => Some(one.to_owned()),
            _ => None,
        },
        "TINYNCCL_CUDA_BLOCKS" => blocks(given("NCCL_MAX_CTAS")?.parse().ok()?).map(|blocks| blocks.to_string()),
        "TINYNCCL_CUDA_PATH" => (on("NCCL_P2P_DISABLE") || given("NCCL_P2P_LEVEL").is_some_and(|level| level == "LOC"))
            .then(|| "hosted".to_owned()),
        "TINYNCCL_TRANSPORT" => on("NCCL_SHM_DISABLE").then(|| "tcp".to_owned()),
        _ => None,
    }
}

/// The blocks of a kernel for so many CTAs at most; `None` for a number that means nothing.
pub(crate) fn blocks(most: i32) -> Option<usize> {
    usize::try_from(most).ok().filter(|&most| most > 0).map(|most| most.clamp(2, 128))
}

/// Whether communicators are blocking, whatever their configurations say.
pub(crate) fn blocking() -> Option<bool> {
    match variable("NCCL_COMM_BLOCKING")?.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Time that a program takes to abort a non-blocking communicator of its own accord when a rank is lost, and wants no
/// failure reported before: PyTorch ends a process whose communicator reports one, also where a library above it
/// (torchft) would abort and make another communicator. That library sets this variable.
pub(crate) fn abort_delay() -> Option<Duration> {
    let seconds = variable("TORCH_NCCL_NONBLOCKING_TIMEOUT")?.trim().parse().ok().filter(|&s: &f64| s > 0.0)?;
    Duration::try_from_secs_f64(seconds + ABORT_MARGIN).ok()
}

/// Seconds that an abort may come after its time.
const ABORT_MARGIN: f64 = 10.0;

/// The variables of NCCL that are set and have no meaning here, or a value that has none.
pub(crate) fn unused(variables: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let all: Vec<(String, String)> = variables.filter(|(name, _)| name.starts_with("NCCL_")).collect();
    let lookup = |name: &str| all.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
    let taken = |name: &str, value: &str| match name {
        "NCCL_ALGO" => counterpart("TINYNCCL_ALGO", &lookup).is_some(),
        "NCCL_PROTO" => counterpart("TINYNCCL_CUDA_PROTO", &lookup).is_some(),
        "NCCL_MAX_CTAS" => counterpart("TINYNCCL_CUDA_BLOCKS", &lookup).is_some(),
        "NCCL_P2P_LEVEL" => value.trim() == "LOC",
        _ => HONOURED.iter().any(|setting| setting.name == name),
    };
    let mut unused: Vec<String> =
        all.iter().filter(|(name, value)| !taken(name, value)).map(|(name, value)| format!("{name}={value}")).collect();
    unused.sort_unstable();
    unused
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl::config::{CudaPath, CudaProto, TransportChoice};
    use tinynccl::wire::Algorithm;

    fn of(variables: &'static [(&'static str, &'static str)]) -> Result<Config> {
        from(&move |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn variables_of_nccl_mean_what_their_users_expect() {
        let config = of(&[
            ("NCCL_ALGO", "Tree"),
            ("NCCL_PROTO", "LL128"),
            ("NCCL_MAX_CTAS", "1"),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_SOCKET_IFNAME", "^lo"),
        ])
        .unwrap();
        assert_eq!(config.algorithm, Some(Algorithm::DoubleTree));
        assert_eq!((config.cuda_proto, config.cuda_blocks), (CudaProto::Ll128, 2));
        assert_eq!((config.cuda_path, config.transport), (CudaPath::Hosted, TransportChoice::Tcp));
        assert_eq!(config.interface.as_deref(), Some("^lo"));
        let plain = of(&[("NCCL_ALGO", "ring,tree"), ("NCCL_P2P_DISABLE", "0"), ("NCCL_MAX_CTAS", "-3")]).unwrap();
        let mut expected = Config::default();
        (expected.timeout, expected.connect_timeout, expected.tune) = (TIMEOUT, CONNECT_TIMEOUT, Tune::Off);
        assert_eq!(plain, expected);
    }

    #[test]
    fn variables_of_tinynccl_win() {
        let config = of(&[
            ("NCCL_ALGO", "Ring"),
            ("TINYNCCL_ALGO", "auto"),
            ("TINYNCCL_TIMEOUT", "7"),
            ("TINYNCCL_TUNE", "measure"),
        ])
        .unwrap();
        assert_eq!((config.algorithm, config.timeout, config.tune), (None, Duration::from_secs(7), Tune::Measure));
        assert_eq!(config.connect_timeout, Duration::from_secs(7));
        let fault = of(&[("TINYNCCL_CHANNELS", "many")]).unwrap_err();
        assert!(fault.text.contains("TINYNCCL_CHANNELS"), "{fault:?}");
    }

    #[test]
    fn what_is_not_used_is_told() {
        let set = [
            ("NCCL_ALGO", "NVLS"),
            ("NCCL_PROTO", "LL"),
            ("NCCL_IB_HCA", "mlx5"),
            ("HOME", "/"),
            ("NCCL_DEBUG", "INFO"),
        ];
        let set = set.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(unused(set), ["NCCL_ALGO=NVLS", "NCCL_IB_HCA=mlx5"]);
    }
}
