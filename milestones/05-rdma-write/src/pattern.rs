//! Bytes that differ between positions and between steps, so that the check finds a shifted or stale copy.

/// Byte `at` of the data of step `step`. 251 is prime, so successive pages and packets begin at different values.
fn byte(step: u8, at: usize) -> u8 {
    (at % 251) as u8 ^ step.wrapping_mul(37).wrapping_add(11)
}

/// `len` bytes for step `step`.
pub fn bytes(step: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| byte(step, at)).collect()
}

/// Compares every byte with step `step`. The error names the first that differs.
pub fn check(step: u8, got: &[u8]) -> Result<(), String> {
    match got.iter().enumerate().find(|&(at, &b)| b != byte(step, at)) {
        None => Ok(()),
        Some((at, b)) => Err(format!("byte {at} of {} is {b:#04x}, expected {:#04x}", got.len(), byte(step, at))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_byte_is_found() {
        let mut data = bytes(3, 5000);
        assert_eq!(check(3, &data), Ok(()));
        data[4321] ^= 1;
        assert!(check(3, &data).expect_err("changed").starts_with("byte 4321 of 5000 is "));
    }

    #[test]
    fn other_steps_and_shifted_copies_differ() {
        for step in 0..8 {
            assert!(check(step, &bytes(step + 1, 100)).is_err());
            assert!(check(step, &bytes(step, 9000)[4096..]).is_err());
        }
    }
}
