//! The settings of NCCL's users, as settings of this library.

use std::time::Duration;

use tinynccl::config::{Environment, Tune};
use tinynccl::simulate::machine::description::Description;
use tinynccl::{Config, Result};

use super::{conf, lists, variables, version};

/// Default timeout of a communicator. NCCL's kernels wait forever, so a program may well compute for minutes on one
/// rank while the others wait in a collective: longer than the library's default, and still finite.
const TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// The ranks of a job may start this long one after the other.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// A variable of NCCL that has a meaning here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Setting {
    /// NCCL's variable.
    pub(crate) name: &'static str,
    /// Text for the user: its effect here.
    pub(crate) meaning: &'static str,
}

macro_rules! settings {
    ($($name:literal: $meaning:literal;)*) => { &[$(Setting { name: $name, meaning: $meaning }),*] };
}

/// The variables of NCCL that are read here.
pub(crate) const HONOURED: &[Setting] = settings! {
    "NCCL_DEBUG": "what is logged: VERSION, WARN, INFO or TRACE";
    "NCCL_DEBUG_FILE": "where the log goes: a file (%h: host, %p: process), stdout or stderr; standard output if empty";
    "NCCL_CONF_FILE": "a file of variables, in place of ~/.nccl.conf; then /etc/nccl.conf";
    "NCCL_COMM_ID": "address:port or name:port at which the rank 0 of every communicator waits; ncclGetUniqueId gives \
        the same id everywhere";
    "NCCL_SOCKET_IFNAME": "network interfaces: prefixes, = before exact names, ^ before names to leave out; \
        TINYNCCL_IFNAME";
    "NCCL_ALGO": "algorithms that may be taken, as NCCL's lists have them; where Ring or Tree alone is left, \
        TINYNCCL_ALGO";
    "NCCL_PROTO": "the same for LL, LL128 and Simple; TINYNCCL_CUDA_PROTO, and TINYNCCL_CUDA_LL128 without LL128";
    "NCCL_MAX_CTAS": "most blocks of a kernel; TINYNCCL_CUDA_BLOCKS";
    "NCCL_MIN_CTAS": "checked, and no more: the number of blocks depends on the size of the call";
    "NCCL_P2P_DISABLE": "1: calls go through the hosts' memory; TINYNCCL_CUDA_PATH";
    "NCCL_SHM_DISABLE": "1: between processes of a host, TCP instead of shared memory; TINYNCCL_TRANSPORT";
    "NCCL_TOPO_FILE": "NCCL's XML of a host, where a communicator has a rank for each of its GPUs; TINYNCCL_TOPOLOGY";
    "NCCL_MULTI_RANK_GPU_ENABLE": "1: ncclCommInitAll takes a GPU several times";
    "NCCL_HOSTID": "name of the host: ranks with different names count as ranks of different hosts; TINYNCCL_HOST_ID";
    "NCCL_RAS_ENABLE": "0: no server for ncclras";
    "NCCL_RAS_ADDR": "address:port or name:port of that server; localhost:28028";
    "NCCL_COMM_BLOCKING": "0: communicators are non-blocking, 1: blocking, whatever their configurations say";
};

/// Checks what NCCL checks when a communicator is created.
///
/// # Errors
/// A text about a list that it does not understand, or about a version that does not parse.
pub(crate) fn check() -> Result<(), String> {
    for (name, names) in [("NCCL_ALGO", &lists::ALGORITHMS[..]), ("NCCL_PROTO", &lists::PROTOCOLS[..])] {
        let text = variables::get(name).unwrap_or_default();
        lists::parse(text.trim(), names).map_err(|why| format!("{name}={text:?}: {why}"))?;
    }
    version::checked().map(drop)
}

/// The settings of a communicator, from the environment.
///
/// # Errors
/// A variable of tinynccl that does not parse.
pub(crate) fn config() -> Result<Config> {
    let environment = Environment::default();
    let config = from(&|name| environment.get(name).or_else(|| conf::variables().get(name).cloned()));
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

/// The value that a setting of tinynccl gets from NCCL's variables; `None` if they are not set, or have no value that
/// it can take.
fn counterpart(name: &str, lookup: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let given = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    let on = |name: &str| given(name).is_some_and(|value| value != "0");
    match name {
        "TINYNCCL_IFNAME" => given("NCCL_SOCKET_IFNAME"),
        "TINYNCCL_ALGO" => match algorithms(&given("NCCL_ALGO")?)[..] {
            ["Ring"] => Some("ring".to_owned()),
            ["Tree"] => Some("double-tree".to_owned()),
            _ => None,
        },
        "TINYNCCL_CUDA_PROTO" => match protocols(&given("NCCL_PROTO")?)[..] {
            [one] => Some(one.to_ascii_lowercase()),
            _ => None,
        },
        "TINYNCCL_CUDA_LL128" => (protocols(&given("NCCL_PROTO")?) == ["LL", "Simple"]).then(|| "off".to_owned()),
        "TINYNCCL_CUDA_BLOCKS" => blocks(given("NCCL_MAX_CTAS")?.parse().ok()?).map(|blocks| blocks.to_string()),
        "TINYNCCL_CUDA_PATH" => (on("NCCL_P2P_DISABLE") || given("NCCL_P2P_LEVEL").is_some_and(|level| level == "LOC"))
            .then(|| "hosted".to_owned()),
        "TINYNCCL_TOPOLOGY" => given("NCCL_TOPO_FILE").filter(|path| topology(path).is_ok()),
        "TINYNCCL_HOST_ID" => given("NCCL_HOSTID"),
        "TINYNCCL_TRANSPORT" => on("NCCL_SHM_DISABLE").then(|| "tcp".to_owned()),
        _ => None,
    }
}

/// Returns the names among Tree and Ring that every function may take.
fn algorithms(text: &str) -> Vec<&'static str> {
    let allowed = lists::parse(text, &lists::ALGORITHMS).map(|lists| lists.everywhere(&lists::ALGORITHMS));
    let mut allowed = allowed.unwrap_or_default();
    allowed.retain(|name| matches!(*name, "Tree" | "Ring"));
    allowed
}

fn protocols(text: &str) -> Vec<&'static str> {
    lists::parse(text, &lists::PROTOCOLS).map(|lists| lists.everywhere(&lists::PROTOCOLS)).unwrap_or_default()
}

/// Reads NCCL's description of a host, which cloud images name in `/etc/nccl.conf`: one that cannot be read is no error, as
/// with NCCL.
fn topology(path: &str) -> Result<Description, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    Description::parse(&text).map_err(|error| error.to_string())
}

/// The blocks of a kernel for at most `most` CTAs; `None` unless that is positive.
pub(crate) fn blocks(most: i32) -> Option<usize> {
    usize::try_from(most).ok().filter(|&most| most > 0).map(|most| most.clamp(2, 128))
}

/// Returns the value of `NCCL_COMM_BLOCKING`, which overrides configurations: true for blocking; `None` unless 0 or 1.
pub(crate) fn blocking() -> Option<bool> {
    match variables::get("NCCL_COMM_BLOCKING")?.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Time that a program takes to abort a non-blocking communicator without being notified when a rank is lost, and wants
/// no failure reported before: PyTorch ends a process whose communicator reports one, also where a library above it
/// (torchft) would abort and create another communicator. That library sets this variable. `None` if it is not set.
pub(crate) fn abort_delay() -> Option<Duration> {
    let seconds = variables::get("TORCH_NCCL_NONBLOCKING_TIMEOUT")?.trim().parse().ok().filter(|&s: &f64| s > 0.0)?;
    Duration::try_from_secs_f64(seconds + ABORT_MARGIN).ok()
}

/// Seconds that an abort may be late.
const ABORT_MARGIN: f64 = 10.0;

/// The variables of NCCL that are set and have no meaning here.
pub(crate) fn unused(variables: &[(String, String)]) -> Vec<String> {
    let honoured = |name: &str| name == "NCCL_P2P_LEVEL" || HONOURED.iter().any(|setting| setting.name == name);
    let mut unused: Vec<String> = variables
        .iter()
        .filter(|(name, _)| name.starts_with("NCCL_") && !honoured(name))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    unused.sort_unstable();
    unused
}

/// Returns a line for each variable that has a meaning, and a value that cannot be honoured here.
pub(crate) fn not_done(variables: &[(String, String)]) -> Vec<String> {
    let lookup = |name: &str| variables.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
    let given = |name: &str| lookup(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
    let mut all = Vec::new();
    let mut add = |name: &str, value: &str, why: &str| all.push(format!("{name}={value}: {why}"));
    if let Some(text) = given("NCCL_ALGO") {
        let differ = lists::parse(&text, &lists::ALGORITHMS).is_ok_and(|lists| lists.differ());
        match algorithms(&text)[..] {
            [] => add(
                "NCCL_ALGO",
                &text,
                "not used: there are Ring and Tree here, and one of them counts for all functions",
            ),
            [one] if differ => {
                add("NCCL_ALGO", &text, &format!("{one} is taken for all functions: one of them counts for all"))
            }
            _ => {}
        }
    }
    if let Some(text) = given("NCCL_PROTO") {
        let differ = lists::parse(&text, &lists::PROTOCOLS).is_ok_and(|lists| lists.differ());
        match protocols(&text)[..] {
            ["LL", "LL128", "Simple"] => {}
            ["LL", "Simple"] | [_] if !differ => {}
            ["LL", "Simple"] | [_] => add("NCCL_PROTO", &text, "what all functions may take is taken for all"),
            _ => add(
                "NCCL_PROTO",
                &text,
                "not used: one protocol can be fixed here for all functions, or LL128 left out",
            ),
        }
    }
    if let Some(text) = given("NCCL_MAX_CTAS").filter(|_| counterpart("TINYNCCL_CUDA_BLOCKS", &lookup).is_none()) {
        add("NCCL_MAX_CTAS", &text, "not used: expected a number, 1 or more");
    }
    if let Some(path) = given("NCCL_TOPO_FILE")
        && let Err(why) = topology(&path)
    {
        add("NCCL_TOPO_FILE", &path, &format!("not used: {why}"));
    }
    if let Some(text) = given("NCCL_P2P_LEVEL").filter(|text| text != "LOC") {
        add("NCCL_P2P_LEVEL", &text, "not used: LOC alone has a meaning here");
    }
    if let Some(text) = given("NCCL_COMM_BLOCKING").filter(|text| !matches!(text.as_str(), "0" | "1")) {
        add("NCCL_COMM_BLOCKING", &text, "not used: expected 0 or 1");
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl::config::{CudaPath, CudaProto, Ll128, TransportChoice};
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
        let lists = [("NCCL_ALGO", "^tree,nvls"), ("NCCL_PROTO", "^LL128")];
        let few = from(&|name| lists.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())).unwrap();
        assert_eq!(
            (few.algorithm, few.cuda_proto, few.cuda_ll128),
            (Some(Algorithm::Ring), CudaProto::Auto, Ll128::Off)
        );
        assert_eq!(of(&[("NCCL_ALGO", "allreduce:tree")]).unwrap().algorithm, Some(Algorithm::DoubleTree));
        assert_eq!(of(&[("NCCL_ALGO", "tree;allreduce:ring")]).unwrap().algorithm, None);
        let plain = of(&[
            ("NCCL_ALGO", "ring,tree"),
            ("NCCL_PROTO", "LL,LL128,Simple"),
            ("NCCL_P2P_DISABLE", "0"),
            ("NCCL_MAX_CTAS", "-3"),
        ])
        .unwrap();
        let mut expected = Config::default();
        (expected.timeout, expected.connect_timeout, expected.tune) = (TIMEOUT, CONNECT_TIMEOUT, Tune::Off);
        assert_eq!(plain, expected);
    }

    #[test]
    fn a_description_of_the_host_is_taken_if_it_can_be_read() {
        let good = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/topologies/dgx-1.xml");
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("broken.xml");
        std::fs::write(&broken, "<system version=\"1\">\n<cpu>").unwrap();
        let broken = broken.to_str().unwrap();
        let topology = |path: &str| from(&|name| (name == "NCCL_TOPO_FILE").then(|| path.to_owned())).unwrap().topology;
        assert_eq!(topology(good).as_deref(), Some(good));
        for (path, why) in [(broken, "not used: topology: line 1"), ("/nowhere/x.xml", "not used: No such file")] {
            assert_eq!(topology(path), None);
            let lines = not_done(&[("NCCL_TOPO_FILE".to_owned(), path.to_owned())]);
            assert!(lines.len() == 1 && lines[0].contains(why), "{lines:?}");
        }
        assert!(not_done(&[("NCCL_TOPO_FILE".to_owned(), good.to_owned())]).is_empty());
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
        let error = of(&[("TINYNCCL_CHANNELS", "many")]).unwrap_err();
        assert!(error.to_string().contains("TINYNCCL_CHANNELS"), "{error:?}");
    }

    #[test]
    fn what_is_not_used_is_listed() {
        let set = |all: &[(&str, &str)]| -> Vec<(String, String)> {
            all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
        };
        let all = set(&[
            ("NCCL_ALGO", "NVLS"),
            ("NCCL_PROTO", "LL"),
            ("NCCL_IB_HCA", "mlx5"),
            ("HOME", "/"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_MAX_CTAS", "many"),
        ]);
        assert_eq!(unused(&all), ["NCCL_IB_HCA=mlx5"]);
        let lines = not_done(&all);
        assert!(
            lines.len() == 2
                && lines[0].starts_with("NCCL_ALGO=NVLS: not used")
                && lines[1].starts_with("NCCL_MAX_CTAS=many")
        );
        for (name, value, expected) in [
            ("NCCL_ALGO", "allreduce:tree", "Tree is taken for all"),
            ("NCCL_ALGO", "tree;allreduce:ring", "not used"),
            ("NCCL_PROTO", "^Simple", "not used"),
            ("NCCL_PROTO", "LL;allreduce:Simple", "not used"),
            ("NCCL_PROTO", "allreduce:^LL128", "is taken for all"),
            ("NCCL_P2P_LEVEL", "NVL", "not used"),
            ("NCCL_COMM_BLOCKING", "yes", "not used"),
        ] {
            let lines = not_done(&set(&[(name, value)]));
            assert!(lines.len() == 1 && lines[0].contains(expected), "{name}={value}: {lines:?}");
        }
        for (name, value) in
            [("NCCL_ALGO", "ring"), ("NCCL_ALGO", "tree,ring"), ("NCCL_PROTO", "^LL128"), ("NCCL_P2P_LEVEL", "LOC")]
        {
            assert!(not_done(&set(&[(name, value)])).is_empty(), "{name}={value}");
        }
    }
}
