//! Names and secrets that ranks compute from what they know already.

use sha2::{Digest, Sha256};

use crate::abi::error::Result;

/// Returns a digest of `purpose` and `parts`, with their lengths: no two lists of parts are the same bytes.
pub(crate) fn of(purpose: &str, parts: &[&[u8]]) -> [u8; 32] {
    let mut digest = Sha256::new();
    for part in [purpose.as_bytes()].iter().chain(parts) {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

/// Returns 32 random bytes of the operating system.
pub(crate) fn random() -> Result<[u8; 32]> {
    let mut bytes = [0; 32];
    // SAFETY: writes `bytes.len()` bytes; up to 256 come at once, or an error.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if usize::try_from(got) == Ok(bytes.len()) {
        return Ok(bytes);
    }
    Err(tinynccl::Error::io("ncclGetUniqueId", "asking the system for random bytes", &std::io::Error::last_os_error())
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_has_another_digest() {
        let all = [of("a", &[b"bc"]), of("ab", &[b"c"]), of("a", &[b"b", b"c"]), of("a", &[])];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
        assert_ne!(random().unwrap(), random().unwrap());
    }
}
