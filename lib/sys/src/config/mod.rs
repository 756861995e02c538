//! Every setting in one typed place: its environment variable, type, default and meaning.
//!
//! The documentation page is generated from the same table (`Config::describe`), so that no setting is undocumented.

mod choices;
mod environment;
mod port_range;
mod unknown;
mod value;

use std::time::Duration;

pub use choices::{
    CudaFailure, CudaHandles, CudaPath, CudaProto, Ll128, PathCheck, SingleCopy, StatusPlace, Sums, TransportChoice,
    Tune, Verify,
};
pub use environment::Environment;
pub use port_range::PortRange;
use value::Value;
pub use value::secret;

use crate::secret::Secret;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Algorithm;

/// One row of the documentation table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Environment variable.
    pub env: &'static str,
    /// Accepted values.
    pub values: &'static str,
    /// Default, as the variable would spell it.
    pub default: String,
    /// Meaning.
    pub doc: &'static str,
    /// True if all ranks must set the same; the communicator compares it when it starts.
    pub same: bool,
    /// True for a setting of experiments, and of hardware and networks that the defaults do not fit.
    pub advanced: bool,
}

/// Most connections of a link over TCP.
pub const MAX_STREAMS: usize = 16;
/// Most queue pairs of a link over RDMA.
pub const MAX_QPS: usize = 16;

/// Its value is not shown.
const SECRET: &str = "TINYNCCL_SECRET";
use value::HIDDEN;

/// The value that a variable's text stands for.
fn parse<T: Value>(text: &str) -> Result<T, String> {
    let value = text.trim();
    // Empty means unset, for a secret, too. Blanks were meant to be something.
    if value.is_empty() && !text.is_empty() {
        Err("expected a value, not white space alone".to_owned())
    } else {
        T::parse(value)
    }
}

/// The value of `TINYNCCL_VERIFY` that its older name stands for.
fn older_name(lookup: &impl Fn(&str) -> Option<String>) -> Result<Verify> {
    let name = "TINYNCCL_CHECKSUM";
    let text = lookup(name).unwrap_or_default();
    match text.is_empty() || !parse::<bool>(&text).map_err(|detail| Error::config(name, &text, detail))? {
        true => Ok(Verify::Off),
        false => Ok(Verify::All),
    }
}

macro_rules! config {
    ($($field:ident : $ty:ty = $default:expr, $env:literal, $values:literal, $doc:literal, $ranks:ident $(, $level:ident)?;)*) => {
        /// Settings of a communicator. [`Config::default`] holds the documented defaults, [`Config::from_env`] applies
        /// the environment.
        #[derive(Debug, Clone, PartialEq)]
        #[non_exhaustive]
        pub struct Config {
            $(#[doc = $doc] #[doc = concat!("\n\nEnvironment: `", $env, "` (", $values, ").")] pub $field: $ty,)*
        }

        impl Default for Config {
            fn default() -> Self {
                Config { $($field: $default,)* }
            }
        }

        impl Config {
    /// Returns these settings as `change` changes them: `Config::default().with(|c| c.channels = 2)`.
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

            /// The defaults, overridden by the environment. A variable that does not parse is an error. A variable
            /// `TINYNCCL_…` that nothing reads is a warning in the log, once, with the nearest name.
            pub fn from_env() -> Result<Self> {
                unknown::warn();
                let environment = Environment::default();
                let config = Self::from_lookup(|name| environment.get(name));
                environment.check().and(config)
            }

            /// As [`Config::from_env`] over any source of variables.
            pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
                let mut config = Config::default();
                $(if let Some(text) = lookup($env) {
                    config.$field = parse(&text).map_err(|detail| Error::Config {
                        name: $env.to_owned(), value: if $env == SECRET { HIDDEN.to_owned() } else { text }, detail,
                    })?;
                })*
                if config.verify == Verify::Off {
                    config.verify = older_name(&lookup)?;
                }
                config.check()?;
                Ok(config)
            }

            /// Every setting's environment variable and value, as the variable would spell it. A secret is not shown.
            pub fn values(&self) -> Vec<(&'static str, String)> {
                vec![$(($env, Value::show(&self.$field)),)*]
            }

            /// Variables of the settings that all ranks must have in common.
            pub fn same() -> impl Iterator<Item = &'static str> {
                [$(($env, config!(@ $ranks)),)*].into_iter().filter(|(_, same)| *same).map(|(env, _)| env)
            }

            /// Every setting, for documentation.
            pub fn describe() -> Vec<Setting> {
                let config = Config::default();
                vec![$(Setting {
                    env: $env,
                    values: $values,
                    default: Value::show(&config.$field),
                    doc: $doc,
                    same: config!(@ $ranks),
                    advanced: config!(@ $($level)?),
                },)*]
            }
        }
    };
    (@ $(own)?) => { false };
    (@ same) => { true };
    (@ advanced) => { true };
}

config! {
    timeout: Duration = Duration::from_secs(120), "TINYNCCL_TIMEOUT", "seconds",
        "Longest time a wait may pass without any progress before it fails and names the ranks that have not arrived.", own;
    connect_timeout: Duration = Duration::from_secs(60), "TINYNCCL_CONNECT_TIMEOUT", "seconds",
        "Longest time for the rendezvous and for each connection to a peer.", own;
    heartbeat: Duration = Duration::from_millis(250), "TINYNCCL_HEARTBEAT", "seconds",
        "Period of the heartbeat to the rendezvous store; a rank silent for four periods is named when something times out.", own, advanced;
    transport: TransportChoice = TransportChoice::Auto, "TINYNCCL_TRANSPORT", "auto, tcp, shm, verbs",
        "Transport of the links; RDMA (verbs) is taken only on request.", same;
    algorithm: Option<Algorithm> = None, "TINYNCCL_ALGO", "auto, ring, tree, double-tree, direct, halving-doubling, all-pairs, one-shot, two-shot, recursive-doubling, staged, hierarchical",
        "Fixes the algorithm where it can do the collective; auto takes the cost model's choice. On GPUs that reach each other's memory too: one-shot and two-shot are kernels of one and of two steps, staged and hierarchical have no kernel, the others are executed as schedules.", same;
    fixed_order: bool = false, "TINYNCCL_FIXED_ORDER", "0 or 1",
        "Reductions combine the values in rank order, ((x0 + x1) + x2) + ..., whatever the sizes, the links and the timing: the same bits every time. \
         Algorithms in another order are not taken, TINYNCCL_ALGO included. On GPUs too, where 16- and 8-bit floats are added in f32 and rounded once, and on the CPU after every step.", same;
    topology: Option<String> = None, "TINYNCCL_TOPOLOGY", "a file, or auto",
        "Description of the machine and its network (docs/topologies, TOML or JSON; or NCCL's XML of a host, a GPU for each rank), in the order of the ranks. auto: it is discovered when the communicator starts, which takes about 20 ms for each pair of ranks that measures. Calls over links of 16 KiB and more then take trees that are packed for these links, or an algorithm with the ranks in another order, where they are predicted to be faster than the cost model's choice. Rank 0's file counts. Empty: none.", own, advanced;
    sum: Sums = Sums::Pairwise, "TINYNCCL_SUM", "pairwise, exact",
        "exact: sums and averages of f16, bf16 and f32 are those of the exact numbers, rounded once, to nearest even. The bits follow from the ranks' values alone: not from order, algorithm, size, packing or processor. \
         pairwise: every addition is rounded. On GPUs as on the CPU; algorithms that pass partial sums on are not taken, TINYNCCL_ALGO included.", same;
    interface: Option<String> = None, "TINYNCCL_IFNAME", "names or prefixes, comma-separated; = in front: whole names; ^ in front excludes",
        "Network interfaces whose addresses are advertised to the peers; empty: all that are up. If all ranks are on one host, they use loopback alone.", own;
    host_id: Option<String> = None, "TINYNCCL_HOST_ID", "a name",
        "Name of the host, besides the running kernel: ranks with different names count as ranks of different hosts, which share no memory and no GPU (as NCCL_HOSTID). For containers that must not reach each other's GPUs, and for tests. Empty: all ranks under one kernel are on one host.", own, advanced;
    port_range: Option<PortRange> = None, "TINYNCCL_PORT_RANGE", "LOW-HIGH, 1 to 65535",
        "TCP ports at which ranks listen for links (RDMA links begin there, too): one for each rank of a host. Empty: any free port. The rendezvous is at MASTER_PORT.", own;
    secret: Option<Secret> = None, "TINYNCCL_SECRET", "16 characters or more",
        "Shared secret of the job's ranks: the same random text for all of them (openssl rand -hex 32), preferably another for each start. It is never sent: ranks prove that they have it. Empty: any client that reaches MASTER_PORT can take a rank's place, while jobs with another rendezvous (this library's launcher, mpirun on one host, a unique id) have a random secret of their own. With torch.distributed the unique id is in torch's store, which is open: set it there, too.", own;
    secret_file: Option<String> = None, "TINYNCCL_SECRET_FILE", "a file",
        "File that holds the secret, in place of TINYNCCL_SECRET; other users should not be able to read it.", own;
    encrypt: bool = false, "TINYNCCL_ENCRYPT", "0 or 1",
        "Encrypts and authenticates the control plane, TCP links and rails (Noise, AES-256-GCM) with keys that only holders of the job's secret have. Shared memory and NVLink stay unencrypted, within one host; RDMA is not used. A rendezvous whose secret is public (MASTER_ADDR, NCCL_COMM_ID) needs TINYNCCL_SECRET, too. For several hosts over a network that others can reach.", same;
    channels: usize = 1, "TINYNCCL_CHANNELS", "1 to 16",
        "Sets of links (TCP streams, shared-memory FIFOs) that a collective is spread over.", same;
    shm_chunk: usize = 128 << 10, "TINYNCCL_SHM_CHUNK", "bytes, 4K to 16M",
        "Largest message when all ranks share memory.", same, advanced;
    single_copy: SingleCopy = SingleCopy::Auto, "TINYNCCL_SHM_SINGLE_COPY", "auto, off, or bytes",
        "Messages that a receiver in shared memory fetches from the sender's buffer (process_vm_readv), with one copy instead of two: auto, those from 128 KiB on whose buffer lies on huge pages (Linux 6.7 or later), and on small pages those from which one copy was measured to be faster when the communicator started, one way up to 1 MiB; bytes: the smallest such message, whatever its pages. Where a process may not read the other's memory all messages are copied twice.", same, advanced;
    tcp_chunk: usize = 1 << 20, "TINYNCCL_TCP_CHUNK", "bytes, 4K to 16M",
        "Largest message when any pair of ranks uses TCP; collectives that reduce on more than two ranks send at most 256 KiB at once.", same, advanced;
    tcp_streams: usize = 1, "TINYNCCL_TCP_STREAMS", "1 to 16",
        "TCP streams of a link; messages of 32 KiB and more are split over them. For networks where one stream is limited; no gain over loopback.", same;
    tcp_rails: bool = false, "TINYNCCL_TCP_RAILS", "0 or 1",
        "TCP links take all pairs of interfaces in common subnets, each as much of a message as its measured speed allows, and survive the loss of all but one of them (docs/nccl-net.md, TINYNCCL_NET_STREAMS and its relatives). Short messages take longer. A rank then takes two ports of TINYNCCL_PORT_RANGE.", same;
    verbs_device: Option<String> = None, "TINYNCCL_VERBS_DEVICE", "names or prefixes, comma-separated; = in front: whole names; ^ in front excludes",
        "RDMA devices to use; empty: all that have an active port with a RoCE v2 or InfiniBand address.", own;
    verbs_port: usize = 0, "TINYNCCL_VERBS_PORT", "0 to 255",
        "Port of the RDMA devices; 0: all active ones.", own;
    verbs_gid_index: Option<String> = None, "TINYNCCL_VERBS_GID_INDEX", "0 to 255",
        "Entry of the port's GID table; empty: every RoCE v2 entry of an IPv4 address, or of a global IPv6 one where there is none.", own;
    verbs_chunk: usize = 256 << 10, "TINYNCCL_VERBS_CHUNK", "bytes, 4K to 16M",
        "Largest message over RDMA. A rank pins 3 * TINYNCCL_FIFO_DEPTH times as much memory for every peer and channel.", same, advanced;
    verbs_qps: usize = 1, "TINYNCCL_VERBS_QPS", "1 to 16",
        "Queue pairs of a link over RDMA, on all pairs of ports in common subnets in turn; messages of 32 KiB and more are split over them. As many as there are such pairs uses all of them for one message; more, for networks that choose a path per queue pair.", same;
    verbs_timeout: usize = 14, "TINYNCCL_VERBS_TIMEOUT", "8 to 22",
        "The device waits 4.096 us times 2 to the power of this for an acknowledgement (14: 67 ms) before it repeats a packet.", own, advanced;
    verbs_retries: usize = 6, "TINYNCCL_VERBS_RETRIES", "0 to 6",
        "Repetitions of a packet before the peer counts as lost. 7 is left out: software devices repeat forever then.", own, advanced;
    one_shot: usize = 16 << 10, "TINYNCCL_ONE_SHOT", "bytes, 0 to 1M",
        "Largest input that ranks which share memory pass through one-shot slots; 0 turns these slots off, and with them symmetric buffers.", same, advanced;
    stage: usize = 256 << 10, "TINYNCCL_STAGE", "bytes, 0 or 4K to 16M",
        "Largest chunk in which more than two ranks that share memory pass large ordinary buffers through it, four chunks per rank; 0: over links instead.", same, advanced;
    cuda_blocks: usize = 128, "TINYNCCL_CUDA_BLOCKS", "2 to 128",
        "Largest number of blocks of a collective's kernel, about one per multiprocessor; fewer leave more of the GPU to other kernels and use less of the links.", same;
    cuda_slot: usize = 0, "TINYNCCL_CUDA_SLOT", "bytes, 4K to 1M; 0: by the number of ranks",
        "Largest chunk that a block of a collective's kernel sends to another GPU at once.", same, advanced;
    cuda_memory: usize = 0, "TINYNCCL_CUDA_MEMORY", "bytes, 4M or more; 0: no limit",
        "Limit of a communicator's GPU memory for calls between GPUs that reach each other's memory, without registered buffers: slots become shorter until it suffices, then kernels take fewer blocks. Communicators that only make small calls take 2 to 5 MiB anyway (without LL128 up to 30); schedules that keep partial sums take 16 MiB more.", same;
    cuda_ll128: Ll128 = Ll128::Auto, "TINYNCCL_CUDA_LL128", "auto, on, off",
        "Middle sizes are sent in lines of 128 bytes with one flag each (NCCL's protocol LL128), each of which the link between GPUs must keep whole; auto: where all of them are NVLink.", same, advanced;
    cuda_proto: CudaProto = CudaProto::Auto, "TINYNCCL_CUDA_PROTO", "auto, ll, ll128, simple, schedule",
        "Fixes how kernels send between GPUs that reach each other's memory, where it can do the call; auto: by size. schedule: the CPU's schedules, those of TINYNCCL_ALGO.", same, advanced;
    cuda_check: bool = true, "TINYNCCL_CUDA_CHECK", "0 or 1",
        "Asks CUDA about every buffer of a call on a GPU: is it memory that the GPU reaches, and long enough? Takes 0.1 to 0.2 us a call; a kernel that touches other memory costs the whole process its GPU.", own;
    cuda_path_check: PathCheck = PathCheck::On, "TINYNCCL_CUDA_PATH_CHECK", "off, on, fail",
        "GPUs write a pattern into each other's memory at the start, and verify it; fail corrupts the pattern, for tests.", same, advanced;
    cuda_path: CudaPath = CudaPath::Auto, "TINYNCCL_CUDA_PATH", "auto, peer, hosted, hosts",
        "Data path of collectives on GPUs: kernels over the peers' memory (peer), or through page-locked memory of the hosts and the links between them (hosted). auto: peer where all ranks reach each other's memory. hosts: as auto, but several hosts with as many GPUs each take kernels inside each host (without kernels its memory) and the network between; not yet tried with GPUs of several hosts.", same;
    cuda_divide: usize = 1 << 20, "TINYNCCL_CUDA_DIVIDE", "bytes",
        "With TINYNCCL_CUDA_PATH=hosts: smallest buffer of an all_reduce, a broadcast or a reduce that is divided by hosts; all_gather and reduce_scatter are from twice as many bytes of all ranks together on. Shorter calls, and all_to_all, go through the hosts' memory.", same, advanced;
    cuda_failure: CudaFailure = CudaFailure::End, "TINYNCCL_CUDA_FAILURE", "end, hold",
        "Calls on a GPU that wait for another rank when it fails: end: they end, and their outputs are undefined; hold: they wait until the communicator is aborted, destroyed or waited for, so that nothing behind them on the stream reads an output that was never written. Either way the error is there at once. libnccl.so holds those of non-blocking communicators unless this is set.", own;
    cuda_handles: CudaHandles = CudaHandles::Auto, "TINYNCCL_CUDA_HANDLES", "auto, ipc, fd",
        "Handles by which processes map each other's device memory: CUDA's older inter-process handles (ipc), or file descriptors (fd); auto: fd where ipc fails. Registered buffers go by ipc alone.", same, advanced;
    cuda_chunk: usize = 2 << 20, "TINYNCCL_CUDA_CHUNK", "bytes, 64K to 64M",
        "Largest chunk of a collective on GPUs that goes through the hosts' memory; each worker page-locks three times as much.", same, advanced;
    cuda_threads: usize = 0, "TINYNCCL_CUDA_THREADS", "0 to 16; 0: by the number of cores, 4 at most",
        "Workers of such a collective: threads that carry chunks between the hosts, each over links of its own. The ranks take the smallest number that one of them has.", own, advanced;
    nccl_library: Option<String> = None, "TINYNCCL_NCCL_LIB", "a file",
        "NVIDIA's NCCL for process groups' backend nccl; empty: libnccl.so.2 as the loader finds it, then the copies in Python's packages.", own;
    net_streams: usize = 4, "TINYNCCL_NET_STREAMS", "1 to 16",
        "Over rails (TINYNCCL_TCP_RAILS) and under NVIDIA's NCCL (docs/nccl-net.md): TCP streams of a connection, on all its pairs of ports in turn. Messages over 32 KiB are cut into fragments, and each stream takes the next one when it has sent one.", own, advanced;
    net_threads: usize = 0, "TINYNCCL_NET_THREADS", "0 to 16; 0: half of the cores, at most 8, some of them for long messages alone; 1 over rails",
        "Over rails and under NVIDIA's NCCL: threads of a process that read and write its connections.", own, advanced;
    net_chunk: usize = 256 << 10, "TINYNCCL_NET_CHUNK", "bytes, 32K to 4M",
        "Over rails and under NVIDIA's NCCL: largest fragment of a message.", own, advanced;
    net_inline: usize = 32 << 10, "TINYNCCL_NET_INLINE", "bytes, 0 to 32K",
        "Over rails and under NVIDIA's NCCL: largest message that the thread which sends it writes itself (it never waits); longer ones, and those that find the streams busy, are left to the threads of TINYNCCL_NET_THREADS.", own, advanced;
    net_window: usize = 16 << 20, "TINYNCCL_NET_WINDOW", "bytes, 1M to 1G, 4 * TINYNCCL_NET_CHUNK at least",
        "Over rails and under NVIDIA's NCCL: bytes of one tag of a connection that may be under way to receives which are not posted yet, and so the limit of their memory. All processes need the same value.", own, advanced;
    net_speed: usize = 0, "TINYNCCL_NET_SPEED", "Mbit/s; 0: the sum of the interfaces' speeds",
        "Under NVIDIA's NCCL: the speed reported to NCCL, from which it chooses algorithms and the number of channels.", own;
    net_rail_timeout: Duration = Duration::from_millis(100), "TINYNCCL_NET_RAIL_TIMEOUT", "seconds, 0.01 to 60",
        "Longest time without an acknowledgement on one of several rails to a peer before its traffic fails over to the others; at least the time in which TCP retransmits a lost segment and has its acknowledgement, 0.3 s over short cables. Rails are pairs of interfaces in common subnets; a lost one is dialed again every few seconds.", own;
    net_rdma: bool = cfg!(feature = "verbs"), "TINYNCCL_NET_RDMA", "0 or 1",
        "Over rails and under NVIDIA's NCCL: messages over 32 KiB go by RDMA where both ends of a NIC pair have a port for it (TINYNCCL_VERBS_DEVICE and its relatives). 1 by default where the library is built with the feature verbs; without it, 1 takes softroce, the RDMA device in user space, which is slower than TCP.", own, advanced;
    net_relay_port: usize = 29_477, "TINYNCCL_NET_RELAY_PORT", "0 to 65535; 0: no relays",
        "Under NVIDIA's NCCL: UDP port at which the nodes of a job find each other when two of them have no subnet in common and a third one has to relay. All nodes need the same value; jobs that share nodes differ in TINYNCCL_SECRET.", own, advanced;
    fifo_depth: usize = 4, "TINYNCCL_FIFO_DEPTH", "2 to 64",
        "Messages a link holds per direction.", same, advanced;
    socket_buffer: usize = 0, "TINYNCCL_SOCKET_BUFFER", "bytes; 0 leaves it to the kernel",
        "SO_SNDBUF and SO_RCVBUF of TCP links.", own, advanced;
    congestion: Option<String> = None, "TINYNCCL_TCP_CONGESTION", "a name, like reno, cubic or bbr",
        "Congestion control of TCP links; empty: the kernel's, but reno instead of bbr between processes of a host.", own, advanced;
    spin: Duration = Duration::from_micros(60), "TINYNCCL_SPIN", "seconds",
        "Time that a wait spins before it yields and then sleeps; at most 2 microseconds where ranks or threads share cores.", own, advanced;
    verify: Verify = Verify::Off, "TINYNCCL_VERIFY", "off, sample, all",
        "Finds bits that changed in memory, on a link or in a processor: checksums of the data at its source are compared with checksums at its destination, and the ranks compare their results; an error names the link or the rank, the call and the offset. sample: one call of TINYNCCL_VERIFY_EVERY; all: every call. TINYNCCL_CHECKSUM=1 is an older name of all.", same;
    verify_every: usize = 64, "TINYNCCL_VERIFY_EVERY", "1 to 1M",
        "Calls of which TINYNCCL_VERIFY=sample verifies one, on average.", same, advanced;
    tune: Tune = Tune::Cached, "TINYNCCL_TUNE", "off, cached, measure",
        "Source of the cost model's figures when the communicator starts: built in, from the cache (measured and kept when it has none), or measured in any case. No measurement begins that would end later than 35 ms after the start, so the start takes up to 50 ms, more only where other programs keep a rank off its core; ranks that share cores take the built-in figures. Rank 0's setting counts.", own;
    tune_cache: Option<String> = None, "TINYNCCL_TUNE_CACHE", "a folder, a file (*.json), or off; empty: $XDG_CACHE_HOME/tinynccl or ~/.cache/tinynccl",
        "Place of measured figures. Rank 0 reads and writes it; a file of another version, machine or setup is replaced; a place that cannot be written is no error.", own;
    trace: Option<String> = None, "TINYNCCL_TRACE", "path; %r stands for the rank",
        "Records every call, step and wait into this file, for Perfetto (ui.perfetto.dev); one file for all ranks of a host. Empty: no recording.", own;
    status: StatusPlace = StatusPlace::Auto, "TINYNCCL_STATUS", "auto, off, or a folder",
        "Folder of the Unix socket at which a process answers `tinynccl-cli status` while it has a communicator: its calls, the ranks that they wait for, and since when. Only processes of the same user are answered. auto: $XDG_RUNTIME_DIR/tinynccl, or /tmp/tinynccl-UID; off: no socket, and no thread for it.", own;
    dump: Option<String> = None, "TINYNCCL_DUMP", "a folder",
        "Folder for the last 4,096 calls of each rank, which it writes to JOB/rank_RANK.json when a communicator fails, and at SIGUSR1 unless the program handles that signal itself. `tinynccl-cli status FOLDER` reads the files. Empty: only where `tinynccl-cli status --dump` asks for them. Needs TINYNCCL_STATUS.", own;
    trace_events: usize = 1 << 20, "TINYNCCL_TRACE_EVENTS", "1 to 256M",
        "Events that a communicator keeps while TINYNCCL_TRACE is set, 64 bytes each: the most recent ones.", own, advanced;
}

impl Config {
    /// Returns true if the ranks are given a secret of their own.
    pub fn has_secret(&self) -> bool {
        self.secret.is_some() || self.secret_file.is_some()
    }

    /// Fails where the ranks are to encrypt with a key that anyone can compute: `rendezvous`, in words, has no secret
    /// but the one in these settings.
    pub fn check_key(&self, rendezvous: &str) -> Result<()> {
        if !self.encrypt || self.has_secret() {
            return Ok(());
        }
        let detail = format!(
            "{rendezvous} gives the ranks no secret to encrypt with: set TINYNCCL_SECRET (or TINYNCCL_SECRET_FILE) to the same random \
             text for all ranks, as `openssl rand -hex 32` makes it"
        );
        Err(Error::config("TINYNCCL_ENCRYPT", 1, detail))
    }

    fn check(&self) -> Result<()> {
        let range = |name: &str, value: usize, low: usize, high: usize| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(Error::config(name, value, format!("expected {low} to {high}")))
            }
        };
        range("TINYNCCL_CHANNELS", self.channels, 1, 16)?;
        range("TINYNCCL_SHM_CHUNK", self.shm_chunk, 4 << 10, 16 << 20)?;
        range("TINYNCCL_TCP_CHUNK", self.tcp_chunk, 4 << 10, 16 << 20)?;
        range("TINYNCCL_VERBS_CHUNK", self.verbs_chunk, 4 << 10, 16 << 20)?;
        range("TINYNCCL_VERBS_PORT", self.verbs_port, 0, 255)?;
        range("TINYNCCL_VERBS_QPS", self.verbs_qps, 1, MAX_QPS)?;
        range("TINYNCCL_VERBS_TIMEOUT", self.verbs_timeout, 8, 22)?;
        range("TINYNCCL_VERBS_RETRIES", self.verbs_retries, 0, 6)?;
        range("TINYNCCL_ONE_SHOT", self.one_shot, 0, 1 << 20)?;
        range("TINYNCCL_CUDA_BLOCKS", self.cuda_blocks, 2, 128)?;
        if self.cuda_slot > 0 {
            range("TINYNCCL_CUDA_SLOT", self.cuda_slot, 4 << 10, 1 << 20)?;
        }
        if self.cuda_memory > 0 {
            range("TINYNCCL_CUDA_MEMORY", self.cuda_memory, 4 << 20, usize::MAX)?;
        }
        range("TINYNCCL_CUDA_CHUNK", self.cuda_chunk, 64 << 10, 64 << 20)?;
        range("TINYNCCL_CUDA_THREADS", self.cuda_threads, 0, 16)?;
        if self.stage > 0 {
            range("TINYNCCL_STAGE", self.stage, 4 << 10, 16 << 20)?;
        }
        range("TINYNCCL_TCP_STREAMS", self.tcp_streams, 1, MAX_STREAMS)?;
        range("TINYNCCL_NET_STREAMS", self.net_streams, 1, MAX_STREAMS)?;
        range("TINYNCCL_NET_THREADS", self.net_threads, 0, 16)?;
        range("TINYNCCL_NET_CHUNK", self.net_chunk, 32 << 10, 4 << 20)?;
        range("TINYNCCL_NET_INLINE", self.net_inline, 0, 32 << 10)?;
        range("TINYNCCL_NET_WINDOW", self.net_window, (1 << 20).max(4 * self.net_chunk), 1 << 30)?;
        range("TINYNCCL_NET_SPEED", self.net_speed, 0, i32::MAX as usize)?;
        let rail = self.net_rail_timeout;
        if !(Duration::from_millis(10)..=Duration::from_secs(60)).contains(&rail) {
            return Err(Error::config("TINYNCCL_NET_RAIL_TIMEOUT", rail.as_secs_f64(), "expected 0.01 to 60"));
        }
        range("TINYNCCL_NET_RELAY_PORT", self.net_relay_port, 0, 65535)?;
        range("TINYNCCL_FIFO_DEPTH", self.fifo_depth, 2, 64)?;
        range("TINYNCCL_VERIFY_EVERY", self.verify_every, 1, 1 << 20)?;
        range("TINYNCCL_TRACE_EVENTS", self.trace_events, 1, 256 << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, value: &str) -> Result<Config> {
        Config::from_lookup(|n| (n == name).then(|| value.to_owned()))
    }

    #[test]
    fn every_default_parses_back() {
        for setting in Config::describe() {
            assert_eq!(parse(setting.env, &setting.default).unwrap(), Config::default(), "{}", setting.env);
        }
    }

    #[test]
    fn bad_values_name_the_variable_and_what_was_expected() {
        for (name, value) in [
            ("TINYNCCL_TIMEOUT", "soon"),
            ("TINYNCCL_TIMEOUT", "-1"),
            ("TINYNCCL_TIMEOUT", "inf"),
            ("TINYNCCL_ALGO", "rings"),
            ("TINYNCCL_TRANSPORT", "rdma"),
            ("TINYNCCL_CUDA_PATH", "pcie"),
            ("TINYNCCL_CHANNELS", "0"),
            ("TINYNCCL_SHM_CHUNK", "1"),
            ("TINYNCCL_TCP_STREAMS", "17"),
            ("TINYNCCL_VERBS_QPS", "0"),
            ("TINYNCCL_CHECKSUM", "yes"),
            ("TINYNCCL_VERIFY", "some"),
            ("TINYNCCL_VERIFY_EVERY", "0"),
            ("TINYNCCL_TRACE_EVENTS", "0"),
            ("TINYNCCL_TUNE", "always"),
            ("TINYNCCL_STATUS", "here"),
            ("TINYNCCL_PORT_RANGE", "4711"),
            ("TINYNCCL_PORT_RANGE", "4712-4711"),
            ("TINYNCCL_PORT_RANGE", "0-9"),
            ("TINYNCCL_PORT_RANGE", "1-65536"),
            ("TINYNCCL_SECRET", "password"),
            ("TINYNCCL_FIFO_DEPTH", "99999999999999999999999"),
        ] {
            let e = parse(name, value).unwrap_err().to_string();
            assert!(e.contains(name) && e.contains("expected"), "{e}");
        }
    }

    #[test]
    fn a_secret_does_not_show() {
        let config = parse("TINYNCCL_SECRET", "correct horse battery staple").unwrap();
        assert!(config.secret.is_some() && config.secret != parse("TINYNCCL_SECRET", &"x".repeat(16)).unwrap().secret);
        let e = parse("TINYNCCL_SECRET", "battery staple").unwrap_err().to_string();
        for text in [format!("{config:?} {:?}", config.values()), e] {
            assert!(!text.contains("staple"), "{text}");
        }
    }

    #[test]
    fn white_space_alone_is_no_value() {
        for setting in Config::describe() {
            for blanks in [" ", "\t\n", "                    "] {
                let e = parse(setting.env, blanks).unwrap_err().to_string();
                assert!(e.contains(setting.env) && e.contains("white space"), "{e}");
            }
        }
        assert_eq!(parse("TINYNCCL_SECRET", "").unwrap().secret, None);
    }

    #[test]
    fn values_take_effect() {
        assert_eq!(parse("TINYNCCL_SHM_CHUNK", "64K").unwrap().shm_chunk, 65536);
        assert_eq!(parse("TINYNCCL_PORT_RANGE", "4711-4711").unwrap().port_range.unwrap().ports().count(), 1);
        assert_eq!(parse("TINYNCCL_ALGO", "double-tree").unwrap().algorithm, Some(Algorithm::DoubleTree));
        assert_eq!(parse("TINYNCCL_CHECKSUM", "1").unwrap().verify, Verify::All);
        assert_eq!(parse("TINYNCCL_CHECKSUM", "0").unwrap().verify, Verify::Off);
        assert_eq!(parse("TINYNCCL_TUNE", "0").unwrap().tune, Tune::Off);
        assert_eq!(parse("TINYNCCL_TUNE", "1").unwrap().tune, Tune::Cached);
        assert_eq!(parse("TINYNCCL_TIMEOUT", "2.5").unwrap().timeout, Duration::from_millis(2500));
    }
}
