use std::io::Cursor;

use proptest::prelude::*;

use super::*;

/// A stream whose calls move at most `step` bytes, and which is interrupted before every call that succeeds.
struct Trickle {
    input: Cursor<Vec<u8>>,
    output: Vec<u8>,
    step: usize,
    interrupted: bool,
    calls: usize,
}

impl Trickle {
    fn new(input: Vec<u8>, step: usize) -> Self {
        Trickle { input: Cursor::new(input), output: Vec::new(), step, interrupted: false, calls: 0 }
    }

    fn interrupt(&mut self) -> io::Result<()> {
        self.calls += 1;
        self.interrupted = !self.interrupted;
        if self.interrupted { Err(ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

impl Read for Trickle {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt()?;
        let n = buffer.len().min(self.step);
        self.input.read(&mut buffer[..n])
    }
}

impl Write for Trickle {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.interrupt()?;
        let n = bytes.len().min(self.step);
        self.output.extend_from_slice(&bytes[..n]);
        Ok(n)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn frame(payload: &[u8]) -> Vec<u8> {
    let mut bytes = encode(payload.len()).unwrap().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

#[test]
fn one_byte_at_a_time_gives_whole_frames() {
    let mut bytes = frame(b"first");
    bytes.extend(frame(b""));
    bytes.extend(frame(b"a third frame"));
    let length = bytes.len();
    let mut stream = Trickle::new(bytes, 1);
    let mut payload = Vec::new();
    for expected in [&b"first"[..], b"", b"a third frame"] {
        assert!(read_frame(&mut stream, &mut payload, 100).unwrap());
        assert_eq!(payload, expected);
    }
    assert!(!read_frame(&mut stream, &mut payload, 100).unwrap(), "a clean end is not an error");
    assert_eq!(stream.calls, 2 * (length + 1), "one read and one interruption for each byte and for the end");
}

#[test]
fn read_full_collects_short_reads_and_counts_to_the_end() {
    for step in 1..20 {
        let mut stream = Trickle::new((0..12).collect(), step);
        let mut buffer = [0; 8];
        assert_eq!(read_full(&mut stream, "payload", &mut buffer).unwrap(), 8, "{step} at once");
        assert_eq!(buffer, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(read_full(&mut stream, "payload", &mut buffer).unwrap(), 4, "the end of the stream");
        assert_eq!(buffer[..4], [8, 9, 10, 11]);
    }
}

#[test]
fn write_full_loses_nothing_in_short_writes() {
    for step in 1..20 {
        for split in [false, true] {
            let mut stream = Trickle::new(Vec::new(), step);
            write_frame(&mut stream, b"hello, world", split).unwrap();
            assert_eq!(stream.output, frame(b"hello, world"), "step {step}, split {split}");
        }
    }
}

#[test]
fn an_end_within_a_frame_says_where() {
    let whole = frame(b"0123456789");
    for cut in 1..whole.len() {
        let error = read_frame(&mut Trickle::new(whole[..cut].to_vec(), 3), &mut Vec::new(), 100).unwrap_err();
        let expected = if cut < HEADER {
            format!("within a frame's header: {cut} of 8 bytes")
        } else {
            format!("within a frame's payload: {} of 10 bytes", cut - HEADER)
        };
        assert!(error.to_string().ends_with(&expected), "{error}");
    }
}

#[test]
fn decode_refuses_garbage_and_oversize() {
    let error = decode(*b"GET / HT", 100).unwrap_err().to_string();
    assert!(error.contains("\"GET \"") && error.contains("\"ECHO\""), "{error}");
    let error = decode(encode(101).unwrap(), 100).unwrap_err().to_string();
    assert!(error.contains("101") && error.contains("100"), "{error}");
    assert_eq!(decode(encode(100).unwrap(), 100).unwrap(), 100);
}

#[test]
fn an_announced_length_takes_no_memory_before_bytes_come() {
    let mut payload = Vec::new();
    let announced = 1 << 30;
    let error = read_frame(&mut Cursor::new(encode(announced).unwrap()), &mut payload, announced).unwrap_err();
    assert!(matches!(error, FrameError::Closed { part: "payload", got: 0, .. }), "{error}");
    assert!(payload.capacity() <= 2 * GROW, "{} bytes taken", payload.capacity());
}

#[test]
fn a_peer_that_takes_nothing_is_closed() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Ok(0)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    assert!(matches!(write_frame(&mut Full, b"x", false), Err(FrameError::Closed { got: 0, expected: 9, .. })));
}

#[test]
fn a_timeout_says_what_was_missing() {
    struct Stall(Cursor<Vec<u8>>);
    impl Read for Stall {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            match self.0.read(buffer)? {
                0 => Err(ErrorKind::WouldBlock.into()),
                n => Ok(n),
            }
        }
    }
    let mut bytes = frame(b"0123456789");
    bytes.truncate(12);
    let error = read_frame(&mut Stall(Cursor::new(bytes)), &mut Vec::new(), 100).unwrap_err();
    assert!(matches!(error, FrameError::Timeout { part: "payload", got: 4, expected: 10 }), "{error}");
}

proptest! {
    #[test]
    fn frames_survive_any_fragmentation(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8),
        step in 1usize..64,
        split: bool,
    ) {
        let mut sender = Trickle::new(Vec::new(), step);
        for payload in &payloads {
            write_frame(&mut sender, payload, split).unwrap();
        }
        let mut receiver = Trickle::new(sender.output, step);
        let mut payload = vec![0xff; 300]; // old content must not show
        for expected in &payloads {
            prop_assert!(read_frame(&mut receiver, &mut payload, 200).unwrap());
            prop_assert_eq!(&payload, expected);
        }
        prop_assert!(!read_frame(&mut receiver, &mut payload, 200).unwrap());
    }

    #[test]
    fn any_bytes_end_in_a_frame_an_end_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64), magic: bool) {
        let mut bytes = bytes;
        if magic {
            bytes.splice(0..0, MAGIC);
        }
        let mut stream = Cursor::new(bytes);
        let mut payload = Vec::new();
        while let Ok(true) = read_frame(&mut stream, &mut payload, 1 << 16) {
            prop_assert!(payload.len() <= 1 << 16);
        }
    }

    #[test]
    fn headers_round_trip(length in 0usize..=u32::MAX as usize, limit in 0usize..=u32::MAX as usize) {
        match decode(encode(length).unwrap(), limit) {
            Ok(got) => prop_assert!(got == length && length <= limit),
            Err(FrameError::TooLong { .. }) => prop_assert!(length > limit),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}
