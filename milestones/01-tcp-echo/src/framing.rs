//! Frames over a byte stream: an 8-byte header (magic, length), then the payload.
//!
//! TCP delivers bytes, not messages. One `write` of 100 bytes may arrive as three `read`s of 1, 60 and 39 bytes, and
//! two writes may arrive as one read. So the frame itself must say where it ends, and both sides must expect every call
//! to move less than they asked for.

use std::fmt;
use std::io::{self, ErrorKind, IoSlice, Read, Write};

/// First bytes of every frame. They expose a peer with another protocol at once.
pub(crate) const MAGIC: [u8; 4] = *b"ECHO";
/// Length of the header: magic, then the payload's length as little-endian `u32`.
pub(crate) const HEADER: usize = 8;
/// `read_frame` allocates in steps of this size as bytes arrive, never for a length that is merely announced.
const GROW: usize = 1 << 20;

/// Why a frame could not be read or written.
#[derive(Debug)]
pub(crate) enum FrameError {
    /// The stream ended within a frame.
    Closed { part: &'static str, got: usize, expected: usize },
    /// The frame begins with other bytes than [`MAGIC`].
    Magic([u8; 4]),
    /// The announced payload is longer than we accept.
    TooLong { length: usize, limit: usize },
    /// Nothing moved within the stream's timeout.
    Timeout { part: &'static str, got: usize, expected: usize },
    /// The operating system refused.
    Io { part: &'static str, source: io::Error },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::Closed { part, got, expected } => {
                write!(f, "the peer closed the connection within a frame's {part}: {got} of {expected} bytes")
            }
            FrameError::Magic(bytes) => write!(
                f,
                "the peer does not speak our protocol: a frame begins with \"{}\", expected \"{}\"",
                bytes.escape_ascii(),
                MAGIC.escape_ascii()
            ),
            FrameError::TooLong { length, limit } => {
                write!(f, "the peer announces a frame of {length} bytes, the limit is {limit}")
            }
            FrameError::Timeout { part, got, expected } => {
                write!(f, "no byte moved within the timeout, in a frame's {part}: {got} of {expected} bytes")
            }
            FrameError::Io { part, source } => write!(f, "in a frame's {part}: {source}"),
        }
    }
}

impl std::error::Error for FrameError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        None // `Display` includes the cause already; anyhow would print it twice.
    }
}

fn stopped(part: &'static str, got: usize, expected: usize, source: io::Error) -> FrameError {
    match source.kind() {
        // On Linux, a socket reports its read or write timeout as WouldBlock.
        ErrorKind::WouldBlock | ErrorKind::TimedOut => FrameError::Timeout { part, got, expected },
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => FrameError::Closed { part, got, expected },
        _ => FrameError::Io { part, source },
    }
}

/// Fills `buffer`, however many reads that takes: `Read::read_exact` spelled out.
///
/// Returns the number of bytes read, which is less than asked for only at the end of the stream.
// EXERCISE 1 (How it works): read into the rest of the buffer until it is full. 0 bytes mean that the stream has
// ended: return how many bytes came. Continue after an interruption; make any other error one of ours with `stopped`.
fn read_full(stream: &mut impl Read, part: &'static str, buffer: &mut [u8]) -> Result<usize, FrameError> {
    let expected = buffer.len();
    let mut got = 0;
    while got < expected {
        match stream.read(&mut buffer[got..]) {
            Ok(0) => break,                                    // end of stream: the peer closed its sending side
            Ok(n) => got += n,                                 // often less than asked for: a short read
            Err(e) if e.kind() == ErrorKind::Interrupted => {} // a signal arrived: nothing was lost, ask again
            Err(e) => return Err(stopped(part, got, expected, e)),
        }
    }
    Ok(got)
}

/// Writes `first` and then `second`, however many calls that takes, handing both to the kernel at once.
///
/// One `writev` instead of two `write`s: half the system calls, and no small segment that waits for an acknowledgement.
// EXERCISE 2 (How it works): hand both pieces to the kernel in one `write_vectored`, then the rest of them in the next,
// until all is written. 0 bytes mean that the peer has closed.
fn write_full(stream: &mut impl Write, first: &[u8], second: &[u8]) -> Result<(), FrameError> {
    let expected = first.len() + second.len();
    let mut sent = 0;
    while sent < expected {
        let head = first.get(sent..).unwrap_or_default();
        let tail = second.get(sent.saturating_sub(first.len())..).unwrap_or_default();
        let wrote = if head.is_empty() {
            stream.write(tail)
        } else {
            stream.write_vectored(&[IoSlice::new(head), IoSlice::new(tail)])
        };
        match wrote {
            Ok(0) => return Err(FrameError::Closed { part: "sending", got: sent, expected }),
            Ok(n) => sent += n, // a short write: the socket's buffer is full
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(stopped("sending", sent, expected, e)),
        }
    }
    Ok(())
}

/// The header of a payload of this length; `None` when the length does not fit its field.
pub(crate) fn encode(length: usize) -> Option<[u8; HEADER]> {
    let [m0, m1, m2, m3] = MAGIC;
    let [l0, l1, l2, l3] = u32::try_from(length).ok()?.to_le_bytes();
    Some([m0, m1, m2, m3, l0, l1, l2, l3])
}

/// The payload's length, if the header is one of ours and the length is at most `limit`.
// EXERCISE 3 (How it works): check the magic before you trust the length, and the limit before you return the length.
pub(crate) fn decode(header: [u8; HEADER], limit: usize) -> Result<usize, FrameError> {
    let [m0, m1, m2, m3, l0, l1, l2, l3] = header;
    let magic = [m0, m1, m2, m3];
    if magic != MAGIC {
        return Err(FrameError::Magic(magic));
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if length > limit { Err(FrameError::TooLong { length, limit }) } else { Ok(length) }
}

/// Sends one frame. `split` sends the header in a separate call, as naive programs do (see the README on Nagle).
pub(crate) fn write_frame(stream: &mut impl Write, payload: &[u8], split: bool) -> Result<(), FrameError> {
    let header =
        encode(payload.len()).ok_or(FrameError::TooLong { length: payload.len(), limit: u32::MAX as usize })?;
    if split {
        write_full(stream, &header, &[])?;
        write_full(stream, payload, &[])
    } else {
        write_full(stream, &header, payload)
    }
}

/// Receives one frame into `payload`, reusing its memory. Returns `false` when the stream ended between two frames.
pub(crate) fn read_frame(stream: &mut impl Read, payload: &mut Vec<u8>, limit: usize) -> Result<bool, FrameError> {
    let mut header = [0; HEADER];
    match read_full(stream, "header", &mut header)? {
        0 => return Ok(false),
        HEADER => {}
        got => return Err(FrameError::Closed { part: "header", got, expected: HEADER }),
    }
    let expected = decode(header, limit)?;
    payload.truncate(expected);
    let mut got = 0;
    while got < expected {
        let end = expected.min((got + GROW).max(payload.len()));
        payload.resize(end, 0);
        let came = read_full(stream, "payload", &mut payload[got..])?;
        got += came;
        if got < end {
            return Err(FrameError::Closed { part: "payload", got, expected });
        }
    }
    Ok(true)
}

#[cfg(test)]
#[path = "framing_tests.rs"]
mod tests;
