//! Collectives by schedule: programs kept, cut for a call and launched.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::call::{Call, Signature, Stream, launch};
use super::comm::DeviceComm;
use super::driver::cuda;
use super::kernels::Kernel;
use super::program::{Compiled, Cut};
use super::select::{self, Choice, Framing, Protocol};
use super::window::SCRATCH_BYTES;
use crate::algorithm::Shape;
use crate::error::{Error, Result};
use crate::schedule::Partition;
use crate::wire::{Algorithm, Collective};

/// What was compiled so far; `None` where there is no schedule.
#[derive(Debug, Default)]
pub(super) struct Schedules(Mutex<Known>);

type Known = HashMap<(Algorithm, Shape), Option<Arc<Compiled>>>;

impl DeviceComm {
    fn compiled(
        &self,
        algorithm: Algorithm,
        collective: Collective,
        root: usize,
        blocks: u32,
    ) -> Option<Arc<Compiled>> {
        let channels = blocks as usize;
        if !(1..=self.layout.channels).contains(&channels) {
            return None;
        }
        let shape = Shape { collective, ranks: self.size(), root, channels };
        let mut known = self.schedules.0.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            // Two trees need two channels.
            let compiled = Compiled::new(algorithm, &shape, self.rank()).filter(|c| c.channels <= self.layout.channels);
            compiled.map(Arc::new)
        };
        known.entry((algorithm, shape)).or_insert_with(make).clone()
    }

    fn cut(&self, compiled: &Compiled, framing: Framing, count: usize, elem: usize) -> Option<Partition> {
        match framing {
            Framing::Simple => compiled.for_slots(count, elem, self.layout.slot_bytes, SCRATCH_BYTES),
            Framing::Ll => compiled.for_lines(count, elem, self.layout.lines, SCRATCH_BYTES),
        }
    }

    /// Whether a call of `bytes` (as in [`DeviceComm::choice`]) can be carried out so, whatever its element type.
    pub fn fits(&self, collective: Collective, choice: Choice, bytes: usize) -> bool {
        let Protocol::Schedule(algorithm, framing) = choice.protocol else {
            return select::fits(&self.layout, collective, choice, bytes);
        };
        // The largest elements make the longest parts.
        self.compiled(algorithm, collective, 0, choice.blocks)
            .is_some_and(|compiled| self.cut(&compiled, framing, bytes.div_ceil(8), 8).is_some())
    }

    /// How the segments of `call` are cut when it is carried out by a schedule; `None` if `choice` is no schedule, or does not
    /// fit. Equal on all ranks. A communicator of the host whose messages are as long, and with as many channels, cuts and
    /// reduces alike: it gives the same bits.
    pub fn partition(&self, call: &Call, choice: Choice) -> Option<Partition> {
        let Protocol::Schedule(algorithm, framing) = choice.protocol else { return None };
        let compiled = self.compiled(algorithm, call.collective, call.root, choice.blocks)?;
        self.cut(&compiled, framing, call.count, call.dtype.size())
    }

    /// # Safety
    /// As [`DeviceComm::enqueue`].
    pub(super) unsafe fn enqueue_schedule(
        &self,
        stream: Stream,
        call: &Call,
        algorithm: Algorithm,
        framing: Framing,
        blocks: u32,
    ) -> Result<()> {
        let op = call.collective.name();
        let compiled = self.compiled(algorithm, call.collective, call.root, blocks).ok_or_else(|| {
            let most = self.layout.channels;
            Error::invalid(
                op,
                format!("{algorithm} has no schedule for {} ranks and {blocks} blocks of at most {most}", self.size()),
            )
        })?;
        let Some(partition) = self.cut(&compiled, framing, call.count, call.dtype.size()) else {
            let detail = format!("{} {} do not fit {algorithm}, {framing:?}, {blocks} blocks", call.count, call.dtype);
            return Err(Error::invalid(op, detail));
        };
        let protocol = Protocol::Schedule(algorithm, framing);
        let kernel = Kernel::of(call.collective, protocol, self.size())
            .ok_or_else(|| super::call::unsupported(call.collective))?;
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
}
