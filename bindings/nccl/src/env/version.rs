//! The version of NCCL that this library stands for.

use std::sync::OnceLock;

use super::variables;

/// 2.28.9, unless `TINYNCCL_NCCL_VERSION` sets another.
const VERSION: i32 = 22_809;
const VARIABLE: &str = "TINYNCCL_NCCL_VERSION";

/// Returns the version of `ncclGetVersion`, in NCCL's coding: 10000 times the major number, 100 times the minor one.
/// The usual one where the variable does not parse.
pub(crate) fn version() -> i32 {
    requested().unwrap_or(VERSION)
}

/// Returns [`version`], unless the user requests one that does not parse.
///
/// # Errors
/// A text about a variable that does not parse.
pub(crate) fn checked() -> Result<i32, String> {
    requested().ok_or_else(|| {
        let text = variables::get(VARIABLE).unwrap_or_default();
        format!("{VARIABLE}={text:?}: expected a number in NCCL's coding, like {VERSION} for 2.28.9")
    })
}

fn requested() -> Option<i32> {
    static REQUESTED: OnceLock<Option<i32>> = OnceLock::new();
    *REQUESTED.get_or_init(|| match variables::get(VARIABLE) {
        Some(text) if !text.trim().is_empty() => parsed(&text),
        _ => Some(VERSION),
    })
}

/// Parses a version from 2.0.0 on; up to 2.8 the major number was multiplied by 1000.
fn parsed(text: &str) -> Option<i32> {
    text.trim().parse().ok().filter(|version| (2_000..100_000).contains(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_a_number_in_the_coding_of_nccl() {
        for (text, expected) in [("22809", Some(22_809)), (" 23007 ", Some(23_007)), ("2804", Some(2_804))] {
            assert_eq!(parsed(text), expected, "{text}");
        }
        for text in ["abc", "2.28.9", "0", "-22809", "99999999999", "228090", "1"] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
