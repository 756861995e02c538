//! Settings of the environment, read once.

use std::sync::LazyLock;
use std::time::Duration;

/// The physical number of each device that the program sees.
pub(crate) static DEVICES: LazyLock<Vec<usize>> =
    LazyLock::new(|| visible(number("TINYNCCL_STANDIN_DEVICES", 2), std::env::var("CUDA_VISIBLE_DEVICES").ok()));

/// Bytes of each device.
pub(crate) static MEMORY: LazyLock<usize> = LazyLock::new(|| number("TINYNCCL_STANDIN_MEMORY", 16 << 10) << 20);

/// The longest wait of a stream.
pub(crate) static PATIENCE: LazyLock<Duration> =
    LazyLock::new(|| Duration::from_secs(number("TINYNCCL_STANDIN_PATIENCE", 300) as u64));

fn number(name: &str, otherwise: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

/// CUDA's rule: the list ends at the first entry that is no device.
fn visible(devices: usize, list: Option<String>) -> Vec<usize> {
    match list {
        None => (0..devices).collect(),
        Some(list) => list.split(',').map_while(|one| one.trim().parse().ok().filter(|&n| n < devices)).collect(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn devices_can_be_hidden_and_turned_around() {
        let visible = |list: &str| super::visible(3, Some(list.to_owned()));
        assert_eq!(super::visible(3, None), [0, 1, 2]);
        assert_eq!(
            (visible("2,0"), visible("1,9,0"), visible(""), visible("-1")),
            (vec![2, 0], vec![1], vec![], vec![])
        );
    }
}
