//! Calls, checked and put into a stream.

use cudarc::driver::sys;

use super::buffers::{self, Buffer};
use super::call::{Call, Signature, Stream, unsupported};
use super::comm::{Carrier, DeviceComm};
use super::driver::cuda;
use super::kernels::Kernel;
use super::launch::{Team, launch};
use super::path::Path;
use super::phased::{Phased, Traffic};
use super::program::Cut;
use super::select::{self, Choice, Framing, Protocol};
use crate::comm::Comm;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::CallKey;
use crate::trace::{By, Span, Tracer, recorded};
use crate::wire::{Algorithm, Collective};

/// As `struct Message` of `kernels/send_recv.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) place: u64,
    pub(super) peer: u32,
    pub(super) channels: u32,
    pub(super) told: u32,
    pub(super) pad: u32,
}

/// As `struct Places` of `kernels/direct.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Places {
    input: u64,
    output: u64,
}

impl DeviceComm {
    /// Puts a collective into a stream, by addresses. Returns at once; an error of the collective itself shows in
    /// [`DeviceComm::check`] and in later calls.
    ///
    /// # Safety
    /// `input` and `output` must be device memory as long as the collective needs, reachable from this communicator's device
    /// and untouched by others until the stream has run the call. `stream` must be of this device, and stay so until the next
    /// call of this communicator.
    pub unsafe fn enqueue(&self, stream: impl Into<Stream>, call: &Call) -> Result<()> {
        let choice = self.choice(call.collective, call.count.saturating_mul(call.dtype.size()));
        // SAFETY: forwarded from the caller.
        unsafe { self.enqueue_as(stream, call, choice) }
    }

    /// [`DeviceComm::enqueue`] in a given way. Every rank must give the same.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub unsafe fn enqueue_as(&self, stream: impl Into<Stream>, call: &Call, choice: Choice) -> Result<()> {
        let stream = stream.into();
        let span = || Span::Carried {
            collective: call.collective as u8,
            calls: 1,
            bytes: call.count.saturating_mul(call.dtype.size()) as u64,
            by: match self.path() {
                Path::Peer => By::Kernels(choice),
                path => By::Path(path),
            },
        };
        // SAFETY: forwarded from the caller.
        recorded(self.trace(), span, || unsafe { self.enqueue_one(stream, call, choice) })
    }

    fn trace(&self) -> Option<&Tracer> {
        self.host().and_then(Comm::trace)
    }

    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn enqueue_one(&self, stream: Stream, call: &Call, choice: Choice) -> Result<()> {
        let op = call.collective.name();
        self.check()?;
        if call.root >= self.size() {
            return Err(Error::invalid(op, format!("root is {}, expected a rank below {}", call.root, self.size())));
        }
        if call.collective.reduces() {
            call.op.check(op, self.rank(), call.dtype)?;
        }
        let used = buffers::of(call, self.rank(), self.size())?;
        if self.checks_memory {
            buffers::check(op, self.rank(), self.context(), stream.handle(), &used)?;
        }
        let bytes = (call.count * call.dtype.size()) as u64;
        if self.size() == 1 {
            return self.alone(stream.handle(), call, bytes as usize);
        }
        if let (Some(host), false) = (&self.host, self.is_hosted()) {
            let &Call { collective, dtype, root, count, .. } = call;
            let op = collective.reduces().then_some(call.op);
            // Kernels compare the calls of ranks that they hear of; the host's communicator compares the others'.
            host.note(&CallKey { collective, dtype, op, root, count, whole: count, peer: 0 });
        }
        if let Carrier::Phased(phased) = &self.carrier {
            // SAFETY: forwarded from the caller.
            return unsafe { self.enqueue_in_phases(phased, stream, call) };
        }
        if let Carrier::Hosted(hosted) = &self.carrier {
            let route = hosted.route(call).ok_or_else(|| unsupported(call.collective))?;
            let handle = stream.handle();
            let _order = self.order(stream)?;
            // SAFETY: forwarded from the caller.
            return unsafe { hosted.enqueue(op, self.context(), handle, &route) };
        }
        if let Protocol::Schedule(algorithm, framing) = choice.protocol {
            // SAFETY: forwarded from the caller.
            return unsafe { self.enqueue_schedule(stream, call, algorithm, framing, choice.blocks) };
        }
        if !select::fits(&self.layout, call.collective, choice, bytes as usize) {
            return Err(Error::invalid(op, format!("{bytes} bytes do not fit {choice:?}")));
        }
        let kernel =
            Kernel::of(call.collective, choice.protocol, self.size()).ok_or_else(|| unsupported(call.collective))?;
        let function = self.kernels.function(kernel, kernel.reduces().then_some((call.dtype, call.op)))?;
        let handle = stream.handle();
        let mut order = self.order(stream)?;
        order.number = order.number.wrapping_add(1);
        let mut team = self.team(Signature::new(call).0, order.number);
        let (mut input, mut output, mut bytes) = (call.input, call.output, bytes);
        let mut root = call.root as u32;
        let mut stride = if call.collective == Collective::AllToAll { bytes } else { 0 };
        let fifth: *mut std::ffi::c_void = match call.collective {
            Collective::AllGather | Collective::AllToAll => (&raw mut stride).cast(),
            _ => (&raw mut root).cast(),
        };
        let mut places = match choice.protocol {
            Protocol::Direct => self.places(call, bytes),
            _ => Places { input: 0, output: 0 },
        };
        // Kernels without a fifth or sixth parameter do not look at it.
        let mut parameters = [
            (&raw mut team).cast(),
            (&raw mut input).cast(),
            (&raw mut output).cast(),
            (&raw mut bytes).cast(),
            fifth,
            (&raw mut places).cast(),
        ];
        // SAFETY: the parameters are of the types which the kernel declares; the buffers are the caller's word.
        unsafe { launch(function, choice.blocks, handle, &mut parameters) }
            .map_err(|e| cuda(op, format!("launching {} blocks", choice.blocks), e))
    }

    /// Sends to one rank and receives from one, at the same time, each as (address, bytes, peer); either may be left out.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`], for both buffers, which must not overlap.
    pub unsafe fn enqueue_send_recv(
        &self,
        stream: impl Into<Stream>,
        to: Option<(u64, usize, usize)>,
        from: Option<(u64, usize, usize)>,
    ) -> Result<()> {
        let stream = stream.into();
        let span = || Span::Carried {
            collective: Collective::SendRecv as u8,
            calls: (usize::from(to.is_some()) + usize::from(from.is_some())) as u32,
            bytes: to.iter().chain(&from).map(|one| one.1 as u64).sum(),
            by: By::Message(self.path()),
        };
        // SAFETY: forwarded from the caller.
        recorded(self.trace(), span, || unsafe { self.enqueue_pair(stream, to, from) })
    }

    /// # Safety
    /// As [`DeviceComm::enqueue_send_recv`].
    unsafe fn enqueue_pair(
        &self,
        stream: Stream,
        to: Option<(u64, usize, usize)>,
        from: Option<(u64, usize, usize)>,
    ) -> Result<()> {
        let op = "send/recv";
        self.check()?;
        for (_, _, peer) in to.iter().chain(&from) {
            if *peer >= self.size() || *peer == self.rank() {
                let (size, rank) = (self.size(), self.rank());
                return Err(Error::invalid(
                    op,
                    format!("peer is {peer}, expected another rank below {size} (we are rank {rank})"),
                ));
            }
        }
        if to.is_none() && from.is_none() {
            return Ok(());
        }
        let buffer = |name, one: Option<(u64, usize, usize)>| {
            one.filter(|one| one.1 > 0).map(|(at, bytes, _)| Buffer { name, at, bytes: bytes as u64, element: 1 })
        };
        let used = [buffer("message sent", to), buffer("message received", from)];
        if self.checks_memory {
            buffers::check(op, self.rank(), self.context(), stream.handle(), &used)?;
        }
        let message = |one: Option<(u64, usize, usize)>| {
            let (at, bytes, peer) = one.unwrap_or((0, 0, self.size()));
            let bytes = bytes as u64;
            let told = self.registry().is_used() && bytes >= select::TOLD;
            let channels = one.map_or(0, |_| select::pair_channels(&self.layout, bytes));
            // That of the receiver counts.
            let place = if told { self.registry().place(at, bytes) } else { 0 };
            Message { at, bytes, place, peer: peer as u32, channels, told: told.into(), pad: 0 }
        };
        let handle = stream.handle();
        let mut order = self.order(stream)?;
        order.number = order.number.wrapping_add(1);
        let (_, bytes, root) = to.or(from).unwrap_or_default();
        let call = Call {
            collective: Collective::SendRecv,
            dtype: DType::U8,
            op: ReduceOp::Sum,
            root,
            count: bytes,
            input: 0,
            output: 0,
        };
        if let Carrier::Hosted(hosted) = &self.carrier {
            // SAFETY: forwarded from the caller.
            return unsafe { hosted.enqueue(op, self.context(), handle, &hosted.pair(to, from)) };
        }
        if let Carrier::Phased(phased) = &self.carrier {
            let team = self.team(Signature::new(&call).0, order.number);
            return phased.enqueue(handle, &call, &Traffic::pair(to, from), team);
        }
        let function = self.kernels.function(Kernel::SendRecv, None)?;
        let mut team = self.team(Signature::new(&call).0, order.number);
        let (mut to, mut from) = (message(to), message(from));
        let blocks = to.channels + from.channels;
        let mut parameters = [(&raw mut team).cast(), (&raw mut to).cast(), (&raw mut from).cast()];
        // SAFETY: as in `enqueue_as`.
        unsafe { launch(function, blocks, handle, &mut parameters) }
            .map_err(|e| cuda(op, format!("launching {blocks} blocks"), e))
    }

    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn enqueue_schedule(
        &self,
        stream: Stream,
        call: &Call,
        algorithm: Algorithm,
        framing: Framing,
        blocks: u32,
    ) -> Result<()> {
        let op = call.collective.name();
        let (compiled, partition) = self.schedules.of(call, algorithm, framing, blocks)?;
        let protocol = Protocol::Schedule(algorithm, framing);
        let kernel = Kernel::of(call.collective, protocol, self.size()).ok_or_else(|| unsupported(call.collective))?;
        let types = call.collective.reduces().then_some((call.dtype, call.op));
        let function = self.kernels.function(kernel, types)?;
        let handle = stream.handle();
        let mut order = self.order(stream)?;
        order.number = order.number.wrapping_add(1);
        let mut team = self.team(Signature::new(call).0, order.number);
        let (mut input, mut output) = (call.input, call.output);
        let mut cut = Cut::new(&partition);
        let mut parameters = [
            (&raw mut team).cast(),
            (&raw mut input).cast(),
            (&raw mut output).cast(),
            (&raw const compiled.program).cast_mut().cast(),
            (&raw mut cut).cast(),
        ];
        // SAFETY: the parameters are of the types which the kernel declares, and only read; the buffers are the caller's word.
        unsafe { launch(function, compiled.channels as u32, handle, &mut parameters) }
            .map_err(|e| cuda(op, format!("launching {} blocks", compiled.channels), e))
    }
    /// # Safety
    /// As [`DeviceComm::enqueue`].
    unsafe fn enqueue_in_phases(&self, phased: &Phased, stream: Stream, call: &Call) -> Result<()> {
        let traffic = Traffic::of(call, self.rank(), self.size()).ok_or_else(|| unsupported(call.collective))?;
        let handle = stream.handle();
        let mut order = self.order(stream)?;
        order.number = order.number.wrapping_add(1);
        if traffic.reduces.is_none() && traffic.targets != 0 && call.collective != Collective::Reduce {
            // Our own part.
            let rank = self.rank() as u64;
            let own = Call {
                input: traffic.input + rank * traffic.input_stride,
                output: traffic.output + rank * traffic.output_stride,
                ..*call
            };
            self.alone(handle, &own, traffic.lengths.0 as usize)?;
        }
        phased.enqueue(handle, call, &traffic, self.team(Signature::new(call).0, order.number))
    }

    fn alone(&self, stream: sys::CUstream, call: &Call, bytes: usize) -> Result<()> {
        if call.input == call.output || bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller of `enqueue` vouches for both buffers.
        unsafe { cudarc::driver::result::memcpy_dtod_async(call.output, call.input, bytes, stream) }
            .map_err(|e| cuda(call.collective.name(), "copying on the device", e))
    }

    /// Where the buffers of a call are for other ranks. `bytes`: of a segment where there are segments.
    fn places(&self, call: &Call, bytes: u64) -> Places {
        let all = bytes * self.size() as u64;
        let (input, output) = match call.collective {
            Collective::AllGather => (bytes, all),
            Collective::ReduceScatter => (all, bytes),
            Collective::AllToAll => (all, all),
            _ => (bytes, bytes),
        };
        Places { input: self.registry().place(call.input, input), output: self.registry().place(call.output, output) }
    }

    fn team(&self, call: u64, number: u32) -> Team {
        Team { call, number, ..self.team }
    }
}
