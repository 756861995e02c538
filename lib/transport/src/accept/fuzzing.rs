//! See [`crate::fuzzing`].

use super::handshake::{Hello, Reply};
use super::link::LinkHello;
use crate::LinkOptions;

/// The first bytes on a connection, read as a hello and as a reply.
pub fn handshake(data: &[u8]) {
    let rank = data.get(44..48).and_then(|t| t.try_into().ok()).map_or(0, u32::from_le_bytes) as usize;
    if let Ok(hello) = Hello::parse(data) {
        assert_eq!(bytemuck::bytes_of(&hello), data);
        if let Ok(link) = LinkHello::of(&hello, rank) {
            assert_eq!(link.to as usize, rank);
            assert!(LinkHello::of(&hello, rank + 1).is_err());
            let _ = link.differs(&LinkOptions { max_message: 1, depth: 1 }, 1, false);
        }
    }
    if let Ok(reply) = Reply::parse(data) {
        let again = Reply::parse(&reply.to_bytes());
        match (&reply, &again) {
            // What was not UTF-8 grows as it is replaced, and is cut.
            (Reply::Refused(a), Ok(Reply::Refused(b))) | (Reply::Stranger(a), Ok(Reply::Stranger(b))) => {
                assert!(a.starts_with(b.as_str()))
            }
            _ => assert_eq!(again.as_ref(), Ok(&reply)),
        }
        assert!(reply.to_bytes().len() <= Reply::MAX);
    }
    if let Some(head) = data.get(..Reply::HEAD)
        && let Ok(len) = Reply::detail_len(head)
    {
        assert!(len <= Reply::MAX - Reply::HEAD);
    }
}
