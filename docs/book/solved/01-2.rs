fn write_full(stream: &mut impl Write, first: &[u8], second: &[u8]) -> Result<(), FrameError> {
    let expected = first.len() + second.len();
    loop {
        match stream.write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
            Ok(0) => return Err(FrameError::Closed { part: "sending", got: 0, expected }),
            Ok(_) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(stopped("sending", 0, expected, e)),
        }
    }
}
