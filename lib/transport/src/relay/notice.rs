//! The last message that a relay sends to an end: why no more will come.

use crate::accept::handshake::cut;
use tinynccl_plan::wire::Header;

/// Longest text of a notice.
const LONGEST: usize = 1024;

/// A notice with `text`, cut to what a link takes: header and payload.
pub(super) fn new(text: &str, max_message: usize) -> (Header, Vec<u8>) {
    let payload = cut(text, max_message.min(LONGEST)).as_bytes().to_vec();
    (Header { collective: Header::NOTICE, len: payload.len() as u32, ..Header::default() }, payload)
}

/// Returns true if the message with this header is a notice.
#[inline]
pub(super) fn is_one(header: &Header) -> bool {
    header.collective == Header::NOTICE
}

/// Returns the text of a notice.
pub(super) fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_notice_is_cut_at_a_whole_character() {
        let (header, payload) = new("größer", 3);
        assert_eq!((header.len, text(&payload).as_str(), is_one(&header)), (2, "gr", true));
        let (header, payload) = new("rank 2 is gone", 70_000);
        assert_eq!((header.len as usize, text(&payload).as_str()), (payload.len(), "rank 2 is gone"));
        assert!(!is_one(&Header::default()));
    }
}
