//! Byte counts on the command line and in the table.

/// Parses `4096`, `64K`, `1M`, `2G`: a multiple of 4, because elements are f32.
pub(crate) fn parse(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let bytes = digits
        .parse::<usize>()
        .ok()
        .and_then(|n| n.checked_mul(1 << shift))
        .ok_or_else(|| "expected a whole number of bytes; K, M or G may follow".to_owned())?;
    if bytes.is_multiple_of(4) {
        Ok(bytes)
    } else {
        Err(format!("{bytes} bytes are not a whole number of f32: expected a multiple of 4"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("4096"), Ok(4096));
        assert_eq!(parse("64k"), Ok(65536));
        assert_eq!(parse("1G"), Ok(1 << 30));
        for bad in ["", "K", "-4", "1.5M", "3", "99999999999999G", "1KB", "1é"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
