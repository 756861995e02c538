//! Settings on which the ranks' messages and choices depend, compared before the first call.
//!
//! Others may differ: deadlines, listening addresses, spinning times. For tuning, only rank 0's settings count;
//! connections over rails compare the window themselves.

use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::config::Config;

/// This rank's values, in a fixed order.
pub(super) fn values(config: &Config) -> Vec<String> {
    let all = config.values();
    Config::same().filter_map(|name| all.iter().find(|(n, _)| *n == name).map(|(_, v)| v.clone())).collect()
}

/// Compares the values of all ranks, in rank order. Every rank gets the same result.
///
/// # Errors
/// [`Error::Config`] naming the first setting that differs, the first rank whose value differs from rank 0's, and both
/// values.
pub(super) fn check(values: &[&[String]], rank: usize) -> Result<()> {
    let value = |rank: usize, setting: usize| values.get(rank).and_then(|v| v.get(setting)).map_or("", String::as_str);
    for (setting, name) in Config::same().enumerate() {
        let first = value(0, setting);
        if let Some(other) = (1..values.len()).find(|&r| value(r, setting) != first) {
            return Err(Error::Config {
                name: name.to_owned(),
                value: value(rank, setting).to_owned(),
                detail: format!(
                    "rank 0 has {first}, rank {other} has {}: expected the same on all ranks; set it for all of them",
                    value(other, setting)
                ),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_with_both_ranks_and_values() {
        let ours = values(&Config::default());
        let other = Config::default().with(|c| {
            c.shm_chunk = 64 << 10;
            c.verify = tinynccl_sys::config::Verify::All;
        });
        let theirs = values(&other);
        assert!(check(&[&ours, &ours, &ours], 1).is_ok());
        for rank in 0..3 {
            let text = check(&[&ours, &ours, &theirs], rank).unwrap_err().to_string();
            for word in ["TINYNCCL_SHM_CHUNK", "rank 0 has 128K", "rank 2 has 64K"] {
                assert!(text.contains(word), "{text}");
            }
        }
    }
}
