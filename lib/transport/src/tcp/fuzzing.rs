//! See [`crate::fuzzing`].

use super::frame::{Inbox, TooLong};
use tinynccl_plan::wire::Header;

const MAX: usize = 3000;
const DEPTH: usize = 2;

/// A stream of messages, taken in and handed out alternately. First byte: how many steps are described. Then two bytes
/// a step: how many bytes come, and whether the receiver takes a whole message, asks for the unfinished one, or does
/// nothing. The rest is the stream. What comes out is what a plain parser makes of it, in order.
pub fn tcp_frame(data: &[u8]) {
    let Some((&turns, rest)) = data.split_first() else { return };
    let (turns, mut stream) = rest.split_at(rest.len().min(2 * usize::from(turns)));
    let (mut expected, broken) = plain(stream);
    expected.reverse();
    let mut inbox = Inbox::new(MAX, DEPTH, 1).expect("memory");
    for turn in turns.chunks_exact(2).chain(std::iter::repeat_n([255, 1].as_slice(), 64)) {
        let [bytes, action] = turn else { continue };
        if !inbox.is_full() {
            put(&mut inbox, &mut stream, usize::from(*bytes) * 16 + 1);
        }
        match inbox.digest().expect("memory for a slot") {
            Ok(_) => {}
            Err(TooLong(header)) => {
                assert!(broken && header.len as usize > MAX);
                // The whole messages before it are still handed out.
                assert_eq!(inbox.ready.len(), expected.len());
                return;
            }
        }
        assert!(inbox.ready.len() <= DEPTH);
        match action % 3 {
            1 => {
                if let Some(staged) = inbox.ready.front() {
                    let (header, payload) = expected.pop().expect("a message of the stream");
                    assert_eq!((staged.header, staged.payload()), (header, &payload[..]));
                    inbox.pop();
                }
            }
            2 => {
                // The receiver's memory takes the place of the slot; the stream goes on into it.
                if let Some(header) = inbox.unfinished() {
                    let mut dst = vec![0; header.len as usize];
                    let mut got = inbox.hand_over(&mut dst);
                    got += inbox.take(&mut dst[got..]);
                    let direct = stream.len().min(dst.len() - got);
                    dst[got..got + direct].copy_from_slice(&stream[..direct]);
                    stream = &stream[direct..];
                    if got + direct < dst.len() {
                        return;
                    }
                    assert_eq!(expected.pop(), Some((header, dst)));
                }
            }
            _ => {}
        }
    }
    let _ = inbox.cut_off();
}

/// Puts up to `most` bytes of the stream where the inbox wants them.
fn put(inbox: &mut Inbox, stream: &mut &[u8], most: usize) {
    let (rest, ahead) = inbox.space(usize::MAX);
    let n = stream.len().min(most).min(rest.len() + ahead.len());
    let (now, later) = stream.split_at(n);
    let (first, second) = now.split_at(n.min(rest.len()));
    rest[..first.len()].copy_from_slice(first);
    ahead[..second.len()].copy_from_slice(second);
    *stream = later;
    inbox.filled(n);
}

/// The whole messages at the front of the stream, and whether a header that is too long follows.
fn plain(mut stream: &[u8]) -> (Vec<(Header, Vec<u8>)>, bool) {
    let mut messages = Vec::new();
    while let Some((head, rest)) = stream.split_first_chunk::<{ Header::BYTES }>() {
        let header: Header = bytemuck::pod_read_unaligned(head);
        if header.len as usize > MAX {
            return (messages, true);
        }
        let Some((payload, rest)) = rest.split_at_checked(header.len as usize) else { break };
        messages.push((header, payload.to_vec()));
        stream = rest;
    }
    (messages, false)
}
