//! The options that choose a device, a port, a GID and an MTU, shared by every verbs program.

use std::time::Duration;

use clap::Args;

use crate::words;

/// The requested device, port, GID and MTU. The program chooses the missing ones and explains its choice.
#[derive(Debug, Clone, Args)]
pub struct Choice {
    /// RDMA device, by name [default: the first with a port that is up and a usable GID].
    #[arg(long, global = true)]
    pub device: Option<String>,
    /// Port of the device, from 1.
    #[arg(long, global = true, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    pub port: u8,
    /// Index of the GID table [default: the entry of type RoCE v2 with an IPv4 address].
    #[arg(long, global = true)]
    pub gid_index: Option<u32>,
    /// Payload bytes per packet: 256, 512, 1024, 2048 or 4096 [default: the port's active MTU]. The smaller of the two
    /// sides' values applies.
    #[arg(long, global = true, value_parser = parse_mtu)]
    pub mtu: Option<u32>,
    /// Fail when a single wait takes longer than this many seconds.
    #[arg(long, global = true, default_value = "10", value_parser = parse_seconds)]
    pub timeout: Duration,
    /// Begin every line of output with this text.
    #[arg(long, global = true, hide = true, overrides_with = "side")]
    pub side: Option<String>,
}

/// 256, 512, 1024, 2048 or 4096.
pub fn parse_mtu(text: &str) -> Result<u32, String> {
    let bytes = text.parse().ok().filter(|&bytes| words::mtu_number(bytes).is_some());
    bytes.ok_or_else(|| "expected 256, 512, 1024, 2048 or 4096".to_owned())
}

/// Seconds, with or without a fraction: 1 ms to a day.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected seconds, like 2.5".to_owned())?;
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|d| (Duration::from_millis(1)..=Duration::from_secs(86_400)).contains(d))
        .ok_or_else(|| "expected 0.001 to 86400 seconds".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        choice: Choice,
    }

    #[test]
    fn options_have_bounds() {
        assert_eq!(parse_mtu("1024"), Ok(1024));
        for bad in ["", "0", "1500", "8192", "1k", "-256"] {
            assert!(parse_mtu(bad).is_err(), "{bad}");
        }
        for bad in ["", "soon", "0", "-1", "inf", "NaN", "1e99"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_option_is_read() {
        let given =
            ["x", "--device=rxe1", "--port=2", "--gid-index=3", "--mtu=512", "--timeout=2.5", "--side=a", "--side=b"];
        let Choice { device, port, gid_index, mtu, timeout, side } = Cli::try_parse_from(given).expect("valid").choice;
        assert_eq!((device.as_deref(), port, gid_index, mtu), (Some("rxe1"), 2, Some(3), Some(512)));
        assert_eq!((timeout, side.as_deref()), (Duration::from_millis(2500), Some("b")));
    }
}
