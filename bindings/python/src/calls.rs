//! Checked calls: Python's arguments as types, lengths and addresses, with the objects that keep the memory alive.

use pyo3::prelude::*;
use tinynccl::comm::RawCall;
use tinynccl::wire::Collective;
use tinynccl::{Call, DType, ReduceOp};

use crate::errors::invalid;
use crate::exporters::{memory, type_name};
use crate::memory::{Device, Kind, Memory};

/// A call whose arguments were checked.
pub(crate) struct Prepared {
    pub(crate) raw: RawCall,
    pub(crate) device: Device,
    /// The stream that the memory's owner named.
    pub(crate) stream: Option<u64>,
    pub(crate) keep: Vec<Memory>,
}

impl Prepared {
    /// A barrier of the ranks' processes.
    pub(crate) fn barrier() -> Prepared {
        let raw = RawCall::new(Call::of(Collective::Barrier), std::ptr::null(), std::ptr::null_mut());
        Prepared { raw, device: Device::Host, stream: None, keep: Vec::new() }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.raw.name().trim_end_matches("_v")
    }

    /// Bytes of the call's memory.
    pub(crate) fn bytes(&self) -> usize {
        self.keep.iter().map(|memory| memory.count * memory.kind.size()).max().unwrap_or(0)
    }
}

/// The rank and its call, with which every error of this file begins.
#[derive(Clone, Copy)]
pub(crate) struct Asker<'py> {
    pub(crate) py: Python<'py>,
    pub(crate) op: &'static str,
    pub(crate) rank: usize,
    /// The rank's number in errors.
    pub(crate) name: usize,
    pub(crate) size: usize,
}

impl Asker<'_> {
    pub(crate) fn refuse(&self, detail: String) -> PyErr {
        invalid(self.py, self.op, format!("rank {}: {detail}", self.name))
    }

    fn memory(&self, which: &str, object: &Bound<'_, PyAny>, written: bool) -> PyResult<Memory> {
        let found = memory(object).map_err(|e| self.refuse(format!("the {which} is {}", e.value(self.py))))?;
        if written && !found.writable {
            return Err(self.refuse(format!("the {which} is a read-only {}: pass a copy", type_name(object))));
        }
        Ok(found)
    }

    /// Checks that input and output have the same type and device.
    fn alike(&self, input: &Memory, output: &Memory) -> PyResult<()> {
        if (input.kind, input.device) == (output.kind, output.device) {
            return Ok(());
        }
        Err(self.refuse(format!(
            "the input is {} on {}, the output {} on {}: expected the same type on the same device",
            input.kind, input.device, output.kind, output.device
        )))
    }

    /// A rank, from what Python gave.
    pub(crate) fn rank_of(&self, what: &str, value: i64) -> PyResult<usize> {
        usize::try_from(value)
            .ok()
            .filter(|&rank| rank < self.size)
            .ok_or_else(|| self.refuse(format!("{what} is {value}, expected a rank in 0..{}", self.size)))
    }

    /// The wire's type of elements, how many of it each element is, and the operator on it.
    fn wire(&self, kind: Kind, op: Option<ReduceOp>) -> PyResult<(DType, usize, ReduceOp)> {
        match (kind, op) {
            (Kind::Number(dtype), _) => Ok((dtype, 1, op.unwrap_or(ReduceOp::Sum))),
            (Kind::Bool, None) => Ok((DType::U8, 1, ReduceOp::Sum)),
            (Kind::Opaque(bytes), None) => Ok((DType::U8, bytes, ReduceOp::Sum)),
            // Of 0 and 1: any, all.
            (Kind::Bool, Some(ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr)) => Ok((DType::U8, 1, ReduceOp::Max)),
            (Kind::Bool, Some(ReduceOp::Prod | ReduceOp::Min | ReduceOp::BitAnd)) => Ok((DType::U8, 1, ReduceOp::Min)),
            (Kind::Bool, Some(ReduceOp::BitXor)) => Ok((DType::U8, 1, ReduceOp::BitXor)),
            (kind, Some(op)) => Err(self.refuse(format!(
                "{op} of {kind}; expected {} or bool (without avg)",
                DType::ALL.map(DType::name).join(" ")
            ))),
        }
    }

    /// A collective with one length. `input` or `output` may be `None` where this rank has none; with `in_place`,
    /// `None` as the output is the input.
    pub(crate) fn even(
        &self,
        collective: Collective,
        op: Option<ReduceOp>,
        root: usize,
        input: Option<&Bound<'_, PyAny>>,
        output: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Prepared> {
        let is_root = self.rank == root;
        // Which sides this rank has, and whether one of them stands for both.
        let (reads, writes) = match collective {
            Collective::Broadcast => (is_root, true),
            Collective::Reduce | Collective::Gather => (true, is_root),
            Collective::Scatter => (is_root, true),
            _ => (true, true),
        };
        let in_place = matches!(collective, Collective::AllReduce | Collective::Broadcast | Collective::Reduce);
        let (input, output) = match (input, output) {
            (Some(one), None) | (None, Some(one)) if in_place => (Some(one), Some(one)),
            other => other,
        };
        let find = |which: &str, object: Option<&Bound<'_, PyAny>>, here: bool, written: bool| match (object, here) {
            (Some(object), true) => self.memory(which, object, written).map(Some),
            (None, true) => Err(self.refuse(format!("no {which} given"))),
            (_, false) => Ok(None),
        };
        let input_memory = find("input", input, reads, false)?;
        let output_memory = match (&input_memory, input, output) {
            // One object for both is looked up once.
            (Some(same), Some(input), Some(output)) if writes && input.is(output) => {
                if !same.writable {
                    return Err(self.refuse(format!("the input is a read-only {}: pass a copy", type_name(input))));
                }
                None
            }
            _ => find("output", output, writes, true)?,
        };
        let both = output_memory.as_ref().or(input_memory.as_ref().filter(|_| writes));
        let (Some(any), input, output) = (input_memory.as_ref().or(both), input_memory.as_ref(), both) else {
            return Err(self.refuse("no memory given".to_owned()));
        };
        if let (Some(input), Some(output)) = (input, output) {
            self.alike(input, output)?;
        }
        let count = self.count(collective, input.map(|m| m.count), output.map(|m| m.count))?;
        let (dtype, scale, op) = self.wire(any.kind, op)?;
        let at = |memory: Option<&Memory>| memory.map_or(0, |m| m.at);
        let call = Call::new(collective, dtype, op, root, count * scale);
        // A rank that only receives has no input, one that only sends no output: devices take the other for it.
        Ok(Prepared {
            raw: RawCall::new(call, at(input.or(output)) as *const u8, at(output.or(input)) as *mut u8),
            device: any.device,
            stream: any.stream,
            keep: input_memory.into_iter().chain(output_memory).collect(),
        })
    }

    /// The count of a collective from the lengths that this rank has.
    fn count(&self, collective: Collective, input: Option<usize>, output: Option<usize>) -> PyResult<usize> {
        let n = self.size;
        let segments = |long: usize, short: usize, which: &str| match short.checked_mul(n) == Some(long) {
            true => Ok(short),
            false => Err(self.refuse(format!("the {which} has {long} elements, expected {n} ranks x {short}"))),
        };
        match (collective, input, output) {
            (Collective::AllGather | Collective::Gather, Some(input), Some(output)) => {
                segments(output, input, "output")
            }
            (Collective::ReduceScatter | Collective::Scatter, Some(input), Some(output)) => {
                segments(input, output, "input")
            }
            (_, Some(input), Some(output)) if input != output => {
                Err(self.refuse(format!("the input has {input} elements, the output {output}: expected equal lengths")))
            }
            (Collective::AllToAll, Some(input), _) if !input.is_multiple_of(n) => {
                Err(self.refuse(format!("{input} elements, expected a multiple of the world size {n}")))
            }
            (Collective::AllToAll, Some(input), _) => Ok(input / n),
            (_, Some(one), _) | (_, None, Some(one)) => Ok(one),
            (_, None, None) => Ok(0),
        }
    }

    /// A message.
    pub(crate) fn message(&self, data: &Bound<'_, PyAny>, peer: i64, sends: bool) -> PyResult<Prepared> {
        let peer = self.rank_of("peer", peer)?;
        let memory = self.memory("buffer", data, !sends)?;
        let (dtype, scale, _) = self.wire(memory.kind, None)?;
        let count = memory.count * scale;
        let raw = match sends {
            true => RawCall::new(Call::send(dtype, peer, count), memory.at as *const u8, std::ptr::null_mut()),
            false => RawCall::new(Call::recv(dtype, peer, count), std::ptr::null(), memory.at as *mut u8),
        };
        Ok(Prepared { raw, device: memory.device, stream: memory.stream, keep: vec![memory] })
    }

    /// A collective with a length per pair of ranks: lengths of the outgoing segments (none: all of the input goes to
    /// every rank) and of the incoming ones, which are packed one after the other.
    pub(crate) fn uneven(
        &self,
        input: &Bound<'_, PyAny>,
        send: Option<&[usize]>,
        output: &Bound<'_, PyAny>,
        recv: &[usize],
    ) -> PyResult<Prepared> {
        let (input, output) = (self.memory("input", input, false)?, self.memory("output", output, true)?);
        self.alike(&input, &output)?;
        let fits = |which: &str, splits: &[usize], memory: &Memory| {
            let sum = splits.iter().try_fold(0usize, |sum, &one| sum.checked_add(one));
            if splits.len() == self.size && sum == Some(memory.count) {
                return Ok(());
            }
            Err(self.refuse(format!(
                "the {which} has {} elements and splits {splits:?}, expected {} splits that add up to it",
                memory.count, self.size
            )))
        };
        if let Some(send) = send {
            fits("input", send, &input)?;
        }
        fits("output", recv, &output)?;
        let (dtype, scale, _) = self.wire(input.kind, None)?;
        let ranges = |splits: &[usize]| {
            let scaled: Vec<usize> = splits.iter().map(|&one| one * scale).collect();
            tinynccl::comm::packed(&scaled)
        };
        let (from, to) = (input.at as *const u8, output.at as *mut u8);
        let raw = match send {
            Some(send) => RawCall::all_to_all_v(dtype, from, ranges(send), to, ranges(recv)),
            None => RawCall::all_gather_v(dtype, input.count * scale, from, to, ranges(recv)),
        };
        Ok(Prepared { raw, device: input.device, stream: input.stream, keep: vec![input, output] })
    }
}

/// An operator by name.
pub(crate) fn operator(asker: &Asker<'_>, name: &str) -> PyResult<ReduceOp> {
    name.parse().map_err(|e: String| asker.refuse(e))
}
