//! `ncclConfig_t`: a program's settings of one communicator.

use std::ffi::{CStr, c_char, c_int};

use tinynccl::config::CudaFailure;

use super::error::{Error, Result};
use super::types::{self, UNDEFINED};
use crate::env::{settings, variables};

/// The settings of a configuration that have an effect here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// True if calls return only when they are done.
    pub(crate) blocking: bool,
    /// Name in logs and errors.
    pub(crate) name: Option<String>,
    /// Blocks of a kernel at most.
    pub(crate) blocks: Option<usize>,
}

impl Options {
    /// Returns the options without a configuration.
    pub(crate) fn standard() -> Options {
        Options { blocking: settings::blocking().unwrap_or(true), name: None, blocks: None }
    }

    /// Reads the options from a configuration; fields that it leaves undefined come from `otherwise`.
    ///
    /// # Errors
    /// `ncclInvalidArgument` for one that was not initialised, and for values out of range.
    ///
    /// # Safety
    /// `config` is NULL, or points to as many bytes as its field `size` says.
    pub(crate) unsafe fn of(config: *const types::Config, otherwise: &Options) -> Result<Options> {
        if config.is_null() {
            return Ok(otherwise.clone());
        }
        // SAFETY: forwarded from the caller.
        let config = unsafe { read(config) }?;
        check(&config)?;
        log_unused(&config);
        let defined = |value: c_int| (value != UNDEFINED).then_some(value);
        Ok(Options {
            blocking: settings::blocking()
                .or_else(|| defined(config.blocking).map(|blocking| blocking == 1))
                .unwrap_or(otherwise.blocking),
            // SAFETY: NULL or a text, as NCCL has it.
            name: unsafe { text(config.comm_name) }.or_else(|| otherwise.name.clone()),
            blocks: defined(config.max_ctas).and_then(settings::blocks).or(otherwise.blocks),
        })
    }

    /// Returns the library's settings for a communicator with these options.
    ///
    /// # Errors
    /// `ncclInvalidUsage` for variables that do not parse.
    pub(crate) fn settings(&self) -> Result<tinynccl::Config> {
        settings::check().map_err(Error::usage)?;
        let mut config = settings::config()?;
        // NCCL's own variable is in `config` already, and counts before a communicator's configuration.
        if ["TINYNCCL_CUDA_BLOCKS", "NCCL_MAX_CTAS"].iter().all(|name| variables::get(name).is_none())
            && let Some(blocks) = self.blocks
        {
            config.cuda_blocks = blocks;
        }
        // A program with a non-blocking communicator polls for failures and aborts it. What it has on its streams
        // behind a failed call (an optimizer's step) must not run before.
        if !self.blocking && variables::get("TINYNCCL_CUDA_FAILURE").is_none() {
            config.cuda_failure = CudaFailure::Hold;
        }
        Ok(config)
    }
}

/// Reads as many bytes as both sides know: older programs pass less, newer ones more.
///
/// # Safety
/// As [`Options::of`], and not NULL.
unsafe fn read(config: *const types::Config) -> Result<types::Config> {
    // SAFETY: size and magic are in every version.
    let (size, magic) =
        unsafe { ((&raw const (*config).size).read_unaligned(), (&raw const (*config).magic).read_unaligned()) };
    if magic != types::CONFIG_MAGIC || size < std::mem::offset_of!(types::Config, blocking) {
        return Err(Error::argument(format!(
            "the configuration has magic {magic:#x} and {size} bytes, expected {:#x}: initialise it with \
             NCCL_CONFIG_INITIALIZER",
            types::CONFIG_MAGIC
        )));
    }
    let mut ours = types::Config::NOTHING;
    let length = size.min(size_of::<types::Config>());
    // SAFETY: the caller's has `size` bytes; any bytes are integers and pointers, which are not followed here.
    unsafe { std::ptr::copy_nonoverlapping(config.cast::<u8>(), (&raw mut ours).cast::<u8>(), length) };
    Ok(ours)
}

/// Flags `NCCL_CTA_POLICY_EFFICIENCY` and `NCCL_CTA_POLICY_ZERO`.
const MOST_POLICY: c_int = 3;
/// NCCL's `MAXCHANNELS`.
const MOST_CHANNELS: c_int = 64;

/// Checks the values, as NCCL does.
fn check(config: &types::Config) -> Result<()> {
    let within = |name: &str, value: c_int, low: c_int, high: c_int| match value {
        UNDEFINED => Ok(()),
        value if (low..=high).contains(&value) => Ok(()),
        _ if high == c_int::MAX => Err(Error::argument(format!("{name} is {value}, expected {low} or more"))),
        _ => Err(Error::argument(format!("{name} is {value}, expected {low} to {high}"))),
    };
    within("blocking", config.blocking, 0, 1)?;
    within("cgaClusterSize", config.cga_cluster_size, 0, c_int::MAX)?;
    within("minCTAs", config.min_ctas, 1, c_int::MAX)?;
    within("maxCTAs", config.max_ctas, 1, c_int::MAX)?;
    within("splitShare", config.split_share, 0, 1)?;
    within("collnetEnable", config.collnet_enable, 0, 1)?;
    within("CTAPolicy", config.cta_policy, 0, MOST_POLICY)?;
    within("shrinkShare", config.shrink_share, 0, 1)?;
    within("nvlsCTAs", config.nvls_ctas, 1, c_int::MAX)?;
    within("nChannelsPerNetPeer", config.n_channels_per_net_peer, 1, MOST_CHANNELS)?;
    within("nvlinkCentricSched", config.nvlink_centric_sched, 0, 1)?;
    within("graphUsageMode", config.graph_usage_mode, 0, 2)?;
    within("numRmaCtx", config.num_rma_ctx, 0, c_int::MAX)?;
    within("maxP2pPeers", config.max_p2p_peers, 1, c_int::MAX)?;
    within("graphStreamOrdering", config.graph_stream_ordering, 0, 1)?;
    if config.max_ctas != UNDEFINED && config.min_ctas > config.max_ctas {
        let (min, max) = (config.min_ctas, config.max_ctas);
        return Err(Error::argument(format!("minCTAs is {min}, above maxCTAs, which is {max}")));
    }
    Ok(())
}

/// Logs the fields that are set and have no effect here.
fn log_unused(config: &types::Config) {
    let fields = [
        ("cgaClusterSize", config.cga_cluster_size),
        ("minCTAs", config.min_ctas),
        ("splitShare", config.split_share),
        ("trafficClass", config.traffic_class),
        ("collnetEnable", config.collnet_enable),
        ("CTAPolicy", config.cta_policy),
        ("shrinkShare", config.shrink_share),
        ("nvlsCTAs", config.nvls_ctas),
        ("nChannelsPerNetPeer", config.n_channels_per_net_peer),
        ("nvlinkCentricSched", config.nvlink_centric_sched),
        ("graphUsageMode", config.graph_usage_mode),
        ("numRmaCtx", config.num_rma_ctx),
        ("maxP2pPeers", config.max_p2p_peers),
        ("graphStreamOrdering", config.graph_stream_ordering),
    ];
    let set: Vec<String> =
        fields.iter().filter(|(_, value)| *value != UNDEFINED).map(|(name, value)| format!("{name}={value}")).collect();
    if !set.is_empty() {
        log::info!("the configuration sets what is not used by tinynccl: {}", set.join(" "));
    }
}

/// Copies a C string; `None` for NULL.
///
/// # Safety
/// NULL, or a text that ends with a zero.
unsafe fn text(pointer: *const c_char) -> Option<String> {
    // SAFETY: by the caller.
    (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::types::Status;

    fn of(config: &types::Config) -> Result<Options> {
        let otherwise = Options { blocking: true, name: Some("parent".to_owned()), blocks: Some(7) };
        // SAFETY: a whole one.
        unsafe { Options::of(config, &otherwise) }
    }

    #[test]
    fn what_is_undefined_is_as_before() {
        let otherwise = Options { blocking: true, name: Some("parent".to_owned()), blocks: Some(7) };
        assert_eq!(of(&types::Config::NOTHING).unwrap(), otherwise);
        let config =
            types::Config { blocking: 0, max_ctas: 16, comm_name: c"ranks".as_ptr(), ..types::Config::NOTHING };
        assert_eq!(of(&config).unwrap(), Options { blocking: false, name: Some("ranks".to_owned()), blocks: Some(16) });
    }

    #[test]
    fn only_the_bytes_of_the_callers_version_are_read() {
        // As a program of NCCL 2.14, which knew no field behind `blocking`; the bytes behind it are not the
        // configuration's.
        let size = std::mem::offset_of!(types::Config, cga_cluster_size);
        let config = types::Config { size, blocking: 0, cga_cluster_size: 99, max_ctas: -5, ..types::Config::NOTHING };
        assert!(!of(&config).unwrap().blocking);
        // As one of a newer version: more bytes than we know.
        #[repr(C)]
        struct Newer {
            ours: types::Config,
            more: [c_int; 6],
        }
        let ours = types::Config { size: size_of::<Newer>(), blocking: 0, ..types::Config::NOTHING };
        assert!(!of(&Newer { ours, more: [1; 6] }.ours).unwrap().blocking);
    }

    #[test]
    fn what_has_a_meaning_for_nccl_is_taken() {
        for config in [
            types::Config {
                cga_cluster_size: 16,
                cta_policy: 3,
                nvls_ctas: 1,
                n_channels_per_net_peer: 64,
                ..types::Config::NOTHING
            },
            types::Config {
                nvlink_centric_sched: 1,
                graph_usage_mode: 2,
                num_rma_ctx: 0,
                max_p2p_peers: 1,
                ..types::Config::NOTHING
            },
            types::Config {
                graph_stream_ordering: 0,
                traffic_class: -5,
                split_share: 1,
                collnet_enable: 0,
                ..types::Config::NOTHING
            },
        ] {
            assert!(of(&config).is_ok(), "{config:?}");
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for (config, word) in [
            (types::Config { magic: 0, ..types::Config::NOTHING }, "NCCL_CONFIG_INITIALIZER"),
            (types::Config { size: 8, ..types::Config::NOTHING }, "NCCL_CONFIG_INITIALIZER"),
            (types::Config { blocking: 2, ..types::Config::NOTHING }, "blocking is 2, expected 0 to 1"),
            (types::Config { max_ctas: 0, ..types::Config::NOTHING }, "maxCTAs is 0, expected 1 or more"),
            (types::Config { min_ctas: 9, max_ctas: 8, ..types::Config::NOTHING }, "minCTAs is 9, above maxCTAs"),
            (types::Config { cga_cluster_size: -1, ..types::Config::NOTHING }, "cgaClusterSize is -1"),
            (types::Config { cta_policy: 77, ..types::Config::NOTHING }, "CTAPolicy is 77, expected 0 to 3"),
            (types::Config { cta_policy: -1, ..types::Config::NOTHING }, "CTAPolicy is -1"),
            (types::Config { nvls_ctas: -3, ..types::Config::NOTHING }, "nvlsCTAs is -3"),
            (
                types::Config { n_channels_per_net_peer: 0, ..types::Config::NOTHING },
                "nChannelsPerNetPeer is 0, expected 1 to 64",
            ),
            (types::Config { n_channels_per_net_peer: 65, ..types::Config::NOTHING }, "nChannelsPerNetPeer is 65"),
            (types::Config { nvlink_centric_sched: 2, ..types::Config::NOTHING }, "nvlinkCentricSched is 2"),
            (types::Config { graph_usage_mode: 3, ..types::Config::NOTHING }, "graphUsageMode is 3"),
            (types::Config { num_rma_ctx: -1, ..types::Config::NOTHING }, "numRmaCtx is -1"),
            (types::Config { max_p2p_peers: 0, ..types::Config::NOTHING }, "maxP2pPeers is 0"),
            (types::Config { graph_stream_ordering: 7, ..types::Config::NOTHING }, "graphStreamOrdering is 7"),
        ] {
            let error = of(&config).unwrap_err();
            assert!(error.status == Status::InvalidArgument && error.text.contains(word), "{error:?}");
        }
    }
}
