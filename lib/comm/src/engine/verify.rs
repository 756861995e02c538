//! Comparison of results after a call that `TINYNCCL_VERIFY` chose: an all_gather of sums, and a second one for the
//! place where a sum differs.

use std::time::Duration;

use super::pack::Pack;
use super::raw_call::RawCall;
use super::run::Turn;
use crate::executor::Buffers;
use crate::verify::{Account, op, sum};
use crate::{Engine, Inner};
use tinynccl_plan::Call;
use tinynccl_plan::dtype::{DType, ReduceOp};
use tinynccl_plan::error::{Error, Result, Suspect};
use tinynccl_plan::wire::{Algorithm, Collective, Header};

/// Time for another rank's report of damaged sums.
const GRACE: Duration = Duration::from_secs(2);

impl Inner {
    /// [`Inner::carry_out`] of a call that is verified.
    ///
    /// # Safety
    /// As [`Inner::collective`].
    #[cold]
    pub(super) unsafe fn carry_out_verified(
        &self,
        engine: &mut Engine,
        call: &Call,
        turn: Turn,
        buffers: Buffers,
        background: bool,
    ) -> Result<()> {
        let header = turn.of(&call.header(self.state.id, Algorithm::OneShot));
        // SAFETY: forwarded from the caller.
        unsafe {
            let account = self.account(engine, call, &header, buffers);
            self.carry_out(engine, call, turn, buffers, background)?;
            self.compare(engine, &header, account, buffers.output, background)
        }
    }

    /// Sums of the inputs of `call`, if it is verified and its results can be compared.
    ///
    /// # Safety
    /// As [`Inner::collective`].
    pub(super) unsafe fn account(
        &self,
        engine: &Engine,
        call: &Call,
        header: &Header,
        buffers: Buffers,
    ) -> Option<Account> {
        if !engine.links.verifies(header) {
            return None;
        }
        let mut account = Account::new(self.shape(call.collective, call.root), call.bytes())?;
        // SAFETY: forwarded from the caller.
        unsafe { account.input(self.state.rank, buffers.input) };
        Some(account)
    }

    /// Compares the results of the call of `header` with those of the other ranks. Every rank gets the same result.
    ///
    /// # Safety
    /// As [`Inner::collective`].
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub(super) unsafe fn compare(
        &self,
        engine: &mut Engine,
        header: &Header,
        account: Option<Account>,
        output: *const u8,
        background: bool,
    ) -> Result<()> {
        let Some(mut account) = account else { return Ok(()) };
        // SAFETY: forwarded from the caller.
        unsafe { account.output(self.state.rank, output) };
        self.settle_account(engine, header, &account, background)?;
        // Until the caller has it.
        // SAFETY: forwarded from the caller.
        match unsafe { account.reread(self.state.rank, output) } {
            None => Ok(()),
            Some((offset, bytes, sums)) => Err(self.changed(header, "output", (offset, bytes), sums)),
        }
    }

    /// The error of memory of this rank that has changed.
    #[cold]
    fn changed(&self, header: &Header, buffer: &str, (offset, bytes): (usize, usize), sums: [u64; 2]) -> Error {
        let (rank, [expected, got]) = (self.state.rank, sums);
        self.state.fail_everywhere(Error::Corrupt {
            op: op(&Header { algorithm: Header::NO_ALGORITHM, ..*header }),
            rank,
            suspect: Box::new(Suspect::Memory { rank }),
            buffer: buffer.to_owned(),
            offset: offset as u64,
            bytes: bytes as u64,
            expected,
            got,
        })
    }

    /// A pack of calls that is verified has the bits of their inputs (or, with `outputs`, they have its bits).
    ///
    /// # Safety
    /// As [`Pack::gather`] or [`Pack::scatter`].
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub(super) unsafe fn compare_pack(
        &self,
        header: &Header,
        pack: &Pack,
        calls: &[RawCall],
        packed: *const u8,
        outputs: bool,
    ) -> Result<()> {
        // SAFETY: forwarded from the caller.
        let Some((index, [theirs, ours])) = (unsafe { pack.difference(calls, packed, outputs) }) else { return Ok(()) };
        let at = theirs.iter().zip(ours).position(|(a, b)| a != b).unwrap_or(0);
        let (from, to) = if outputs { (ours, theirs) } else { (theirs, ours) };
        let buffer = format!("{} of call {index} of the group", if outputs { "output" } else { "input" });
        Err(self.changed(header, &buffer, (at, 1), [from, to].map(|side| sum(&side[at..=at]))))
    }

    /// Compares the sums of all ranks.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub(crate) fn settle_account(
        &self,
        engine: &mut Engine,
        header: &Header,
        account: &Account,
        background: bool,
    ) -> Result<()> {
        let mut words = account.words();
        let one = words.len();
        words.push(sum(bytemuck::cast_slice(&words)));
        let all = self.gather_words(engine, &words, background)?;
        // Sums that were damaged on their way say nothing about the data, and only some ranks have them: the rank at
        // whose link it happened reports that.
        if let Some(peer) = all.chunks(one + 1).position(|words| words[one] != sum(bytemuck::cast_slice(&words[..one])))
        {
            return Err(self.state.wait_for_failure(GRACE).unwrap_or_else(|| self.sums_damaged(header, peer)));
        }
        let words: Vec<u64> = all.chunks(one + 1).flat_map(|words| &words[..one]).copied().collect();
        let path = "no link's sums differ";
        let Some(finding) = account.judge(&words, path) else { return Ok(()) };
        let places = self.gather_words(engine, &account.places(&finding, self.state.rank), background)?;
        let (range, [expected, got]) = account.place(&finding, &places);
        Err(self.state.fail_everywhere(Error::Corrupt {
            op: op(&Header { algorithm: Header::NO_ALGORITHM, ..*header }),
            rank: self.state.rank,
            suspect: Box::new(finding.suspect),
            buffer: format!("output of rank {}", finding.wrong.rank),
            offset: range.start,
            bytes: range.end - range.start,
            expected,
            got,
        }))
    }

    /// The error of sums that did not come as they were sent.
    #[cold]
    fn sums_damaged(&self, header: &Header, peer: usize) -> Error {
        let path = "on the way of its sums".to_owned();
        self.state.fail_everywhere(Error::Corrupt {
            op: op(&Header { algorithm: Header::NO_ALGORITHM, ..*header }),
            rank: self.state.rank,
            suspect: Box::new(Suspect::Link { from: peer, to: self.state.rank, path }),
            buffer: "sums".to_owned(),
            offset: 0,
            bytes: 0,
            expected: 0,
            got: 0,
        })
    }

    /// The words of all ranks, in rank order: an all_gather of the library's own, with a number among the calls.
    fn gather_words(&self, engine: &mut Engine, words: &[u64], background: bool) -> Result<Vec<u64>> {
        let call = Call::new(Collective::AllGather, DType::U64, ReduceOp::Sum, 0, words.len());
        let mut all = vec![0; words.len() * self.size()];
        let buffers = Buffers { input: words.as_ptr().cast(), output: all.as_mut_ptr().cast() };
        let seq = engine.next_seq(&call, self.state.rank);
        let digests = self.state.progress.start(&Header { seq, ..call.header(self.state.id, Algorithm::OneShot) });
        engine.board.made(&digests);
        let turn = Turn { seq, before: digests.before };
        // SAFETY: both are as long as the call says.
        unsafe { self.carry_out(engine, &call, turn, buffers, background) }?;
        Ok(all)
    }
}
