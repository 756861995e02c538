//! Checks calls and enqueues them.

use std::sync::MutexGuard;

use cudarc::driver::sys;

use crate::checked::buffers::{self, Buffer};
use crate::checked::call::{End, Own, Round, Stream};
use crate::checked::messages;
use crate::comm::{DeviceComm, Order};
use crate::driver;
use crate::path::Turn;
use crate::peer::needs_extension;
use crate::window::needs_slots;
use tinynccl_comm::Comm;
use tinynccl_comm::RawCall;
use tinynccl_comm::trace::{By, Span, Tracer, recorded};
use tinynccl_plan::Call;
use tinynccl_plan::device::{Choice, Path};
use tinynccl_plan::dtype::DType;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::Collective;

impl DeviceComm {
    /// Enqueues a collective or a message on a stream, by addresses. Returns at once; [`DeviceComm::check`] and later
    /// calls return an error of the call itself. An all_to_all in place takes stream-ordered memory of the buffer's
    /// length.
    ///
    /// # Safety
    /// `input` and `output` must be device memory as long as the collective needs, reachable from this communicator's
    /// device and untouched by others until the stream has run the call. `stream` must be of this device, and stay so
    /// until the next call of this communicator.
    pub unsafe fn enqueue(&self, stream: impl Into<Stream>, call: &RawCall) -> Result<()> {
        // SAFETY (all three): forwarded from the caller.
        if self.is_collective(call) {
            // SAFETY: see above.
            return unsafe { self.enqueue_as(stream, call, self.choice(call.collective, call.bytes())) };
        }
        if let Some(round) = messages::round(call, self.rank()) {
            // SAFETY: see above.
            return unsafe { self.enqueue_round(stream.into(), round) };
        }
        let mut group = self.group(stream);
        // SAFETY: see above.
        unsafe { group.add(call) }?;
        group.finish()
    }

    /// [`DeviceComm::enqueue`] with a given choice, which must be the same on every rank.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub unsafe fn enqueue_as(&self, stream: impl Into<Stream>, call: &RawCall, choice: Choice) -> Result<()> {
        let stream = stream.into();
        let span = || Span::Carried {
            collective: call.collective as u8,
            calls: 1,
            bytes: call.bytes() as u64,
            by: match self.path() {
                Path::Peer => By::Kernels(choice),
                path => By::Path(path),
            },
        };
        // SAFETY: forwarded from the caller.
        self.made(recorded(self.trace(), span, || unsafe { self.enqueue_one(stream, call, choice) }))
    }

    /// Checks the arguments of a call as [`DeviceComm::enqueue`] does, and enqueues nothing: for a caller whose own
    /// kernels use the buffers first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root or an operator that does not fit, or buffers that our device does not
    /// reach.
    ///
    /// # Safety
    /// `stream` must be of this device.
    #[inline]
    pub unsafe fn validate(&self, stream: impl Into<Stream>, call: &RawCall) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { self.validated(stream.into().handle(), call) }.map(drop)
    }

    /// [`DeviceComm::validate`]; gives the input and the output.
    ///
    /// # Safety
    /// As [`DeviceComm::validate`].
    #[inline]
    pub(crate) unsafe fn validated(&self, stream: sys::CUstream, call: &RawCall) -> Result<[Option<Buffer>; 2]> {
        let op = call.collective.name();
        self.root_in_range(call)?;
        if let Some(operator) = call.op {
            operator.check(call.collective, self.rank(), call.dtype)?;
        }
        let used = buffers::of(call, self.rank(), self.size())?;
        if self.checks_memory {
            buffers::check(op, self.rank(), self.context(), stream, &used)?;
        }
        Ok(used)
    }

    pub(crate) fn root_in_range(&self, call: &Call) -> Result<()> {
        if call.root < self.size() {
            return Ok(());
        }
        let detail = format!("root is {}, expected a rank below {}", call.root, self.size());
        Err(Error::invalid(call.collective.name(), detail))
    }

    pub(crate) fn trace(&self) -> Option<&Tracer> {
        self.host().and_then(Comm::trace)
    }

    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn enqueue_one(&self, stream: Stream, call: &RawCall, choice: Choice) -> Result<()> {
        let op = call.collective.name();
        self.admit()?;
        // SAFETY: forwarded from the caller.
        unsafe { self.validate(stream.handle(), call) }?;
        if self.size() == 1 {
            let (input, output) = call.device_addresses();
            self.ledger.note_alone(call);
            // SAFETY: the caller of `enqueue` vouches for both buffers.
            return unsafe { driver::copy(op, self.context(), stream.handle(), input, output, call.bytes()) };
        }
        if let (Some(host), true) = (&self.host, self.path() != Path::Hosted) {
            // Kernels compare the calls of ranks that they exchange data with; the host's communicator compares the
            // others'.
            host.note(call);
        }
        let chose = self.verifier.as_ref().and_then(|verifier| Some((verifier, verifier.next(call)?)));
        let Some((verifier, chose)) = chose else {
            // SAFETY: forwarded from the caller.
            return unsafe { self.carry_apart(stream, call, choice) };
        };
        let carry = |one: &RawCall| {
            let choice = if **one == **call { choice } else { self.choice(one.collective, one.bytes()) };
            // SAFETY: by the caller, and memory of this call.
            unsafe { self.carry_apart(stream.clone(), one, choice) }
        };
        let handle = stream.handle();
        // SAFETY: by the caller; the scratch memory is used on this stream.
        unsafe {
            self.with_scratch(handle, verifier.scratch(&chose), |at| verifier.verify(handle, call, &chose, at, carry))
        }
    }

    /// [`DeviceComm::carry`], with an all_to_all in place moved away first.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn carry_apart(&self, stream: Stream, call: &RawCall, choice: Choice) -> Result<()> {
        let op = call.collective.name();
        let (input, output) = call.device_addresses();
        if call.collective == Collective::AllToAll && input == output && call.count > 0 {
            // What comes from a rank lands where it is not sent from yet: the input moves away first.
            let bytes = self.size() * call.bytes();
            // SAFETY: stream and buffer are the caller's word; the scratch memory is as long, and used on this stream.
            return unsafe {
                self.with_scratch(stream.handle(), bytes, |moved| {
                    driver::copy(op, self.context(), stream.handle(), input, moved, bytes)?;
                    self.carry(stream, &RawCall::on_device(**call, moved, output), choice)
                })
            };
        }
        // SAFETY: forwarded from the caller.
        unsafe { self.carry(stream, call, choice) }
    }

    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn carry(&self, stream: Stream, call: &RawCall, choice: Choice) -> Result<()> {
        if needs_extension(choice.protocol) {
            self.extend(0..self.size())?;
        }
        let (turn, _order) = self.turn(stream)?;
        self.ledger.note(turn.number, call);
        // SAFETY: forwarded from the caller.
        unsafe { self.path.carry(turn, call, choice) }
    }

    /// Enqueues a call that is a part of another communicator's: checked, recorded and in order there.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub(crate) unsafe fn carry_inside(&self, stream: sys::CUstream, call: &RawCall) -> Result<()> {
        if !self.is_collective(call) {
            let mut messages = messages::Messages::default();
            messages.add(call, self.rank(), self.size());
            let rounds = messages.launches(self.rank(), self.size())?;
            // SAFETY: forwarded from the caller.
            return rounds.into_iter().try_for_each(|round| unsafe { self.carry_round_inside(stream, round) });
        }
        let choice = self.choice(call.collective, call.bytes());
        if needs_extension(choice.protocol) {
            self.extend(0..self.size())?;
        }
        // SAFETY: forwarded from the caller.
        unsafe { self.path.carry(Turn { stream, number: self.next_number() }, call, choice) }
    }

    /// [`DeviceComm::carry_inside`] of messages.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue_send_recv`].
    pub(crate) unsafe fn carry_round_inside(&self, stream: sys::CUstream, round: Round) -> Result<()> {
        let Round { to, from, own } = round;
        let Some((_, count, root)) = to.or(from) else {
            // SAFETY: forwarded from the caller.
            return own.map_or(Ok(()), |Own { from, to, bytes }| unsafe {
                driver::copy("send/recv", self.context(), stream, from, to, bytes as usize)
            });
        };
        self.reach_slots(to, from)?;
        let call = RawCall::on_device(Call::message(DType::U8, root, 0, count), 0, 0);
        // SAFETY: forwarded from the caller.
        unsafe { self.path.carry_round(Turn { stream, number: self.next_number() }, &call, round) }
    }

    /// Makes the slots of these messages reachable.
    fn reach_slots(&self, to: Option<End>, from: Option<End>) -> Result<()> {
        // A sender fills the receiver's slots.
        let by_slots = |one: Option<End>| one.filter(|one| needs_slots(one.1)).map(|(_, _, peer)| peer);
        self.offer_extension(by_slots(from))?;
        self.extend(by_slots(to))
    }

    /// Stream and sequence number of the next call, and the lock that makes others wait.
    fn turn(&self, stream: Stream) -> Result<(Turn, MutexGuard<'_, Order>)> {
        self.turns(stream, 1)
    }

    /// Stream and sequence number of the first of the next `calls`, and the lock.
    pub(crate) fn turns(&self, stream: Stream, calls: u32) -> Result<(Turn, MutexGuard<'_, Order>)> {
        let handle = stream.handle();
        let mut order = self.order(stream)?;
        let number = order.number.wrapping_add(1);
        order.number = order.number.wrapping_add(calls);
        Ok((Turn { stream: handle, number }, order))
    }

    /// Sends to one rank and receives from one, at the same time, each as (address, bytes, peer); either may be left
    /// out.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], for both buffers, which must not overlap.
    pub unsafe fn enqueue_send_recv(
        &self,
        stream: impl Into<Stream>,
        to: Option<(u64, usize, usize)>,
        from: Option<(u64, usize, usize)>,
    ) -> Result<()> {
        // SAFETY: forwarded from the caller.
        unsafe { self.enqueue_round(stream.into(), Round { to, from, own: None }) }
    }

    /// [`DeviceComm::enqueue_send_recv`], and a copy beside it.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue_send_recv`], and for the copy's two buffers.
    pub(crate) unsafe fn enqueue_round(&self, stream: Stream, round: Round) -> Result<()> {
        let Round { to, from, .. } = round;
        let span = || Span::Carried {
            collective: Collective::SendRecv as u8,
            calls: (usize::from(to.is_some()) + usize::from(from.is_some())) as u32,
            bytes: to.iter().chain(&from).map(|one| one.1 as u64).sum(),
            by: By::Message(self.path()),
        };
        // SAFETY: forwarded from the caller.
        self.made(recorded(self.trace(), span, || unsafe { self.enqueue_one_round(stream, round) }))
    }

    /// # Safety
    /// As [`DeviceComm::enqueue_round`].
    unsafe fn enqueue_one_round(&self, stream: Stream, round: Round) -> Result<()> {
        let op = "send/recv";
        let Round { to, from, own } = round;
        self.admit()?;
        for (_, _, peer) in to.iter().chain(&from) {
            if *peer >= self.size() || *peer == self.rank() {
                let (size, rank) = (self.size(), self.rank());
                return Err(Error::invalid(
                    op,
                    format!("peer is {peer}, expected another rank below {size} (we are rank {rank})"),
                ));
            }
        }
        let Some((_, count, root)) = to.or(from) else {
            // SAFETY: forwarded from the caller.
            return own.map_or(Ok(()), |Own { from, to, bytes }| unsafe {
                driver::copy(op, self.context(), stream.handle(), from, to, bytes as usize)
            });
        };
        let buffer = |name, one: Option<End>| {
            one.filter(|one| one.1 > 0).map(|(at, bytes, _)| Buffer { name, at, bytes: bytes as u64, element: 1 })
        };
        let ours = |name, at: fn(Own) -> u64| own.map(|own| Buffer { name, at: at(own), bytes: own.bytes, element: 1 });
        let used = [
            buffer("message sent", to),
            buffer("message received", from),
            ours("message to ourselves", |own| own.from),
            ours("message from ourselves", |own| own.to),
        ];
        if self.checks_memory {
            buffers::check(op, self.rank(), self.context(), stream.handle(), &used)?;
        }
        self.reach_slots(to, from)?;
        let call = RawCall::on_device(Call::message(DType::U8, root, 0, count), 0, 0);
        let (turn, _order) = self.turn(stream)?;
        let peer = |one: Option<End>| one.map(|(_, _, peer)| peer);
        self.ledger.note_round(turn.number, (peer(to), peer(from)), count);
        // SAFETY: forwarded from the caller.
        unsafe { self.path.carry_round(turn, &call, round) }
    }
}
