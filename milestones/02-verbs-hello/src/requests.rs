//! The part common to both interfaces: the two ends, and the requests that each posts.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use verbs_kit::completion::Completion;
use verbs_kit::say;

/// Our end of the conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Receives first, then answers.
    Server,
    /// Sends first.
    Client,
}

/// The numbers of our two requests; their completions return them.
pub(crate) const RECV_ID: u64 = 1;
pub(crate) const SEND_ID: u64 = 2;

/// Prints the received text.
pub(crate) fn show(bytes: &[u8]) {
    say!("received {} bytes: {:?}", bytes.len(), String::from_utf8_lossy(bytes));
}

/// Waits until the request with number `wr_id` has completed and prints every completion on the way. Completions of the
/// two queues arrive in any order, so `early` keeps those that no caller has waited for yet.
// EXERCISE 4 (How it works): poll until the completion with this number arrives or the deadline passes;
// keep the completions of other requests for later, and turn a failed one into an error.
pub(crate) fn await_completion(
    wr_id: u64,
    early: &mut Vec<Completion>,
    patience: Duration,
    mut poll: impl FnMut(Instant) -> Result<Option<Completion>>,
) -> Result<Completion> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(at) = early.iter().position(|c| c.wr_id == wr_id) {
            return Ok(early.remove(at));
        }
        let Some(completion) = poll(deadline)? else {
            bail!("no completion of wr_id {wr_id} within {patience:?} (--timeout)");
        };
        say!("completion: {completion}");
        ensure!(completion.ok(), "a request failed: {completion}");
        early.push(completion);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECV: Completion =
        Completion { wr_id: RECV_ID, status: 0, opcode: 128, byte_len: 5, imm: None, vendor_err: 0, qp_num: 1 };

    #[test]
    fn completions_in_the_other_order_are_kept() {
        let sent = Completion { wr_id: SEND_ID, opcode: 0, ..RECV };
        let mut queue = vec![sent, RECV];
        let mut early = Vec::new();
        let long = Duration::from_secs(5);
        let got = await_completion(SEND_ID, &mut early, long, |_| Ok(queue.pop())).expect("both succeed");
        assert_eq!((got, early.as_slice()), (sent, &[RECV][..]));
        let got = await_completion(RECV_ID, &mut early, long, |_| panic!("it is there already"));
        assert_eq!(got.expect("kept"), RECV);
    }

    #[test]
    fn failures_and_silence_are_errors() {
        let failed = Completion { status: 12, ..RECV };
        let long = Duration::from_secs(5);
        let error = await_completion(RECV_ID, &mut Vec::new(), long, |_| Ok(Some(failed))).expect_err("it failed");
        assert!(error.to_string().contains("RETRY_EXC_ERR"), "{error}");
        let error = await_completion(RECV_ID, &mut Vec::new(), long, |_| Ok(None)).expect_err("nothing came");
        assert!(error.to_string().contains("no completion of wr_id 1 within 5s"), "{error}");
    }
}
