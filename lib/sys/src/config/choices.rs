//! Settings whose values are words.

use std::fmt;
use std::str::FromStr;

use super::value::Value;

/// An enum whose values are words: the first one is shown, others are understood too.
macro_rules! words {
    ($(#[$about:meta])* $name:ident, $expected:literal {
        $($(#[$doc:meta])* $value:ident = $word:literal $(| $also:literal)*,)+
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $value,)+
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $($name::$value => $word,)+
                })
            }
        }

        impl FromStr for $name {
            type Err = String;
            fn from_str(s: &str) -> Result<Self, String> {
                match s {
                    $($word $(| $also)* => Ok($name::$value),)+
                    _ => Err(concat!("expected ", $expected).to_owned()),
                }
            }
        }

        impl Value for $name {
            fn parse(text: &str) -> Result<Self, String> {
                text.parse()
            }
            fn show(&self) -> String {
                self.to_string()
            }
        }
    };
}

words! {
    /// Backend of the links.
    TransportChoice, "auto, tcp, shm or verbs" {
        /// Shared memory between processes of one host, TCP otherwise.
        Auto = "auto",
        /// TCP everywhere, loopback included.
        Tcp = "tcp",
        /// Shared memory; an error between hosts.
        Shm = "shm",
        /// RDMA everywhere, between ranks of one host too: over the software RDMA device in user space, or in a build
        /// with the feature `verbs` over the system's devices, and an error without one.
        Verbs = "verbs",
    }
}

words! {
    /// Rounding of sums and averages of f16, bf16 and f32.
    Sums, "pairwise or exact" {
        /// After every addition.
        Pairwise = "pairwise",
        /// Once, after all of them.
        Exact = "exact",
    }
}

words! {
    /// Calls whose data is verified from buffer to buffer.
    Verify, "off, sample or all" {
        /// None.
        Off = "off" | "0",
        /// One of `TINYNCCL_VERIFY_EVERY`.
        Sample = "sample",
        /// All.
        All = "all" | "1",
    }
}

words! {
    /// Source of the cost model's figures. Rank 0's setting counts for all ranks.
    Tune, "off, cached or measure" {
        /// Built-in figures.
        Off = "off" | "0",
        /// Figures measured by an earlier run on a machine and a setup like this; measured, and kept, when there are
        /// none.
        Cached = "cached" | "1",
        /// Measured at every start, and kept.
        Measure = "measure",
    }
}

words! {
    /// Check of GPUs at the start that they reach each other's memory.
    PathCheck, "off, on or fail" {
        /// No check.
        Off = "off" | "0",
        /// Check.
        On = "on" | "1",
        /// Check in which every rank writes something wrong: it must fail.
        Fail = "fail",
    }
}

words! {
    /// Use of protocol LL128 by kernels, for which links must keep 128 bytes together.
    Ll128, "auto, on or off" {
        /// LL128 if all links between GPUs are NVLink.
        Auto = "auto",
        /// On any link.
        On = "on" | "1",
        /// Never.
        Off = "off" | "0",
    }
}

words! {
    /// Protocol of the kernels of calls on GPUs.
    CudaProto, "auto, ll, ll128, simple or schedule" {
        /// The fastest for the size.
        Auto = "auto",
        /// Lines with flags beside the data.
        Ll = "ll",
        /// Lines of 128 bytes with one flag each.
        Ll128 = "ll128",
        /// Slots, or registered buffers.
        Simple = "simple",
        /// The schedules that the CPU executes.
        Schedule = "schedule",
    }
}

words! {
    /// Fate of kernels and streams that wait for another rank once the communicator has failed.
    CudaFailure, "end or hold" {
        /// They end, and their outputs are undefined.
        End = "end",
        /// They wait until the communicator is aborted, dropped or waited for, so that nothing behind them on the
        /// stream reads an output that was never written.
        Hold = "hold",
    }
}

words! {
    /// Means by which processes map each other's device memory.
    CudaHandles, "auto, ipc or fd" {
        /// By CUDA IPC; by descriptors where that fails.
        Auto = "auto",
        /// By CUDA IPC (`cuIpcGetMemHandle`).
        Ipc = "ipc",
        /// By file descriptors (`cuMemExportToShareableHandle`).
        Fd = "fd",
    }
}

words! {
    /// Path of collectives on GPUs to the other ranks.
    CudaPath, "auto, peer, hosted or hosts" {
        /// Through the peers' memory where all ranks reach each other's, through the hosts' memory otherwise.
        Auto = "auto",
        /// Through the peers' memory, or not at all.
        Peer = "peer",
        /// Through page-locked memory of the hosts and the links between them.
        Hosted = "hosted",
        /// As auto, but over several hosts divided: inside each host and between them.
        Hosts = "hosts",
    }
}

/// Messages that a receiver in shared memory fetches from the sender's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SingleCopy {
    /// Messages for which it is likely to be faster.
    Auto,
    /// None.
    Off,
    /// All that are longer than 32 KiB and have at least this many bytes.
    From(usize),
}

impl fmt::Display for SingleCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SingleCopy::Auto => f.write_str("auto"),
            SingleCopy::Off => f.write_str("off"),
            SingleCopy::From(bytes) => f.write_str(&Value::show(bytes)),
        }
    }
}

impl FromStr for SingleCopy {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(SingleCopy::Auto),
            "off" => Ok(SingleCopy::Off),
            _ => Value::parse(s).map(SingleCopy::From).map_err(|_| "expected auto, off or bytes".to_owned()),
        }
    }
}

/// Socket at which a process shows the state of its communicators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatusPlace {
    /// In the user's folder of run-time files.
    Auto,
    /// None.
    Off,
    /// In this folder.
    Folder(String),
}

impl Value for StatusPlace {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "auto" => StatusPlace::Auto,
            "off" => StatusPlace::Off,
            folder if folder.starts_with('/') => StatusPlace::Folder(folder.to_owned()),
            _ => return Err("expected auto, off or the absolute path of a folder".to_owned()),
        })
    }
    fn show(&self) -> String {
        match self {
            StatusPlace::Auto => "auto".to_owned(),
            StatusPlace::Off => "off".to_owned(),
            StatusPlace::Folder(folder) => folder.clone(),
        }
    }
}

impl Value for SingleCopy {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
    }
    fn show(&self) -> String {
        self.to_string()
    }
}
