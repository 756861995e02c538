//! The calls that a call is made of: inside the host, and over the lane.

use cudarc::driver::sys;

use super::Hosts;
use super::division::Division;
use crate::checked::call::unsupported;
use crate::driver;
use crate::hosted::around::Around;
use crate::hosted::route::{Grid, Route};
use crate::hosted::shares::{Piece, Shares};
use crate::path::Turn;
use tinynccl_comm::RawCall;
use tinynccl_plan::Call;
use tinynccl_plan::error::Result;
use tinynccl_plan::wire::Collective;

/// A call as part of another: its collective, elements per segment, and root.
fn part(call: &Call, collective: Collective, count: usize, root: usize) -> Call {
    let op = call.op.filter(|_| collective.reduces());
    Call { collective, op, count, whole: count, root, ..*call }
}

/// The calls inside a host that `call` is made of, without their memory.
pub(super) fn inside(call: &Call, division: &Division, grid: &Grid) -> Vec<Call> {
    use Collective::{AllGather, AllReduce, Broadcast, Gather, Reduce, ReduceScatter};
    let one = |collective, count| part(call, collective, count, division.place(call.root).1);
    match call.collective {
        AllGather | ReduceScatter => vec![one(call.collective, call.count)],
        AllReduce | Reduce | Broadcast => {
            let element = call.dtype.size();
            let shares = Shares::new(call.count, element, (division.local, division.each), grid);
            let pieces = (0..shares.pieces()).filter_map(|k| shares.piece(k));
            let of_piece = |piece: Piece| {
                let (each, all) = (piece.each as usize / element, shares.of_all(&piece) as usize / element);
                match (call.collective, piece.is_tail) {
                    (Broadcast, true) => vec![one(Broadcast, all)],
                    (Broadcast, false) => vec![one(Broadcast, all), one(AllGather, each)],
                    (_, true) => vec![one(AllReduce, all)],
                    (Reduce, false) => vec![one(ReduceScatter, each), one(Gather, each)],
                    (_, false) => vec![one(ReduceScatter, each), one(AllGather, each)],
                }
            };
            let mut calls = Vec::new();
            for call in pieces.flat_map(of_piece) {
                if !calls.contains(&call) {
                    calls.push(call);
                }
            }
            calls
        }
        _ => Vec::new(),
    }
}

/// A call under way to its streams.
struct Steps<'a> {
    hosts: &'a Hosts,
    stream: sys::CUstream,
    call: &'a RawCall,
    /// Host and number there of the root.
    root: (usize, usize),
    shares: Option<Shares>,
    /// Memory of this call on our device; 0 where it needs none.
    scratch: u64,
    /// The last chunk over the lane.
    last: usize,
}

impl Hosts {
    /// Enqueues a call in its parts.
    ///
    /// # Safety
    /// As [`DeviceComm::enqueue`](crate::DeviceComm::enqueue).
    pub(super) unsafe fn divided(&self, turn: Turn, call: &RawCall) -> Result<()> {
        use Collective::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
        let (division, bytes) = (&self.division, call.bytes());
        let shares = match call.collective {
            AllReduce | Reduce | Broadcast => {
                let lane = (division.local, division.each);
                Some(Shares::new(call.count, call.dtype.size(), lane, &self.outer.lane_grid()))
            }
            AllGather | ReduceScatter => None,
            other => return Err(unsupported(other)),
        };
        let scratch = match call.collective {
            Reduce => shares.map_or(0, |shares| shares.bytes() as usize),
            ReduceScatter => division.hosts * bytes,
            _ => 0,
        };
        let (stream, root) = (turn.stream, division.place(call.root));
        let run = |scratch| {
            let mut steps = Steps { hosts: self, stream, call, root, shares, scratch, last: 0 };
            let route = steps.route();
            steps.last = route.chunks() - 1;
            // SAFETY: forwarded from the caller.
            unsafe { self.outer.enqueue(call.collective.name(), turn, &route, &mut steps) }
        };
        match scratch {
            0 => run(0),
            // SAFETY: the memory is used on this stream, and by streams that it waits for.
            bytes => unsafe { self.inner.with_scratch(stream, bytes, run) },
        }
    }
}

impl Steps<'_> {
    /// Route over the lane.
    fn route(&self) -> Route {
        let (call, division, grid) = (self.call, &self.hosts.division, self.hosts.outer.lane_grid());
        let (input, output) = call.device_addresses();
        let (bytes, each) = (call.bytes() as u64, division.each);
        let here = self.root.0 == division.host;
        // The headers carry the count and the root's host, so ranks that disagree find out.
        let lane = Call { root: self.root.0, ..call.call };
        if let Some(shares) = self.shares {
            return match call.collective {
                Collective::Broadcast => {
                    Route::of_shares(lane, shares, here.then_some(output), (!here).then_some(output), false)
                }
                Collective::Reduce => {
                    Route::of_shares(lane, shares, Some(self.scratch), here.then_some(self.scratch), true)
                }
                _ => Route::of_shares(lane, shares, Some(output), Some(output), false),
            };
        }
        let of = |call, input| Route::of(&RawCall::on_device(call, input, output), division.host, &grid);
        let route = match call.collective {
            Collective::AllGather => {
                of(lane, input).map(|route| route.spaced(output + division.local as u64 * bytes, each as u64 * bytes))
            }
            _ => of(lane, self.scratch),
        };
        // `divided` has looked at the collective.
        route
            .map_or_else(|| Route::of_shares(lane, Shares::new(0, 1, (0, 1), &grid), None, None, false), Route::in_lane)
    }

    /// Enqueues a call inside the host.
    fn inside(&self, collective: Collective, count: usize, input: u64, output: u64) -> Result<()> {
        let call = RawCall::on_device(part(self.call, collective, count, self.root.1), input, output);
        // SAFETY: by the caller of `divided`, whose buffers or scratch memory these are.
        unsafe { self.hosts.inner.carry_inside(self.stream, &call) }
    }

    /// The call's blocks of segments, one for each host: number, and offset of the first byte.
    fn blocks(&self) -> impl Iterator<Item = (usize, u64)> + use<> {
        let Division { hosts, each, .. } = self.hosts.division;
        let bytes = (each * self.call.bytes()) as u64;
        (0..hosts).map(move |host| (host, host as u64 * bytes))
    }

    fn is_here(&self, host: usize) -> bool {
        host == self.hosts.division.host
    }

    /// A piece of a buffer that is shared out, with the elements of a share and of all.
    fn piece(&self, chunk: usize) -> Option<(Shares, Piece, usize, usize)> {
        let (shares, element) = (self.shares?, self.call.dtype.size());
        let piece = shares.piece(chunk)?;
        Some((shares, piece, piece.each as usize / element, shares.of_all(&piece) as usize / element))
    }
}

impl Around for Steps<'_> {
    fn before(&mut self, chunk: usize) -> Result<bool> {
        let (input, output) = self.call.device_addresses();
        if let Some((shares, piece, each, all)) = self.piece(chunk) {
            let (from, own, packed) = (input + piece.first, output + shares.own(&piece), self.scratch + piece.packed);
            match (self.call.collective, piece.is_tail) {
                (Collective::Broadcast, _) if self.is_here(self.root.0) => {
                    let from = if self.hosts.division.local == self.root.1 { from } else { output + piece.first };
                    self.inside(Collective::Broadcast, all, from, output + piece.first)?;
                }
                (Collective::Broadcast, _) => return Ok(false),
                (Collective::Reduce, true) => self.inside(Collective::AllReduce, all, from, packed)?,
                (Collective::Reduce, false) => self.inside(Collective::ReduceScatter, each, from, packed)?,
                (_, true) => self.inside(Collective::AllReduce, all, from, own)?,
                (_, false) => self.inside(Collective::ReduceScatter, each, from, own)?,
            }
            return Ok(true);
        }
        if chunk > 0 {
            return Ok(false);
        }
        let (count, bytes) = (self.call.count, self.call.bytes() as u64);
        if self.call.collective != Collective::ReduceScatter {
            return Ok(false);
        }
        for (host, at) in self.blocks() {
            let to = self.scratch + host as u64 * bytes;
            self.inside(Collective::ReduceScatter, count, input + at, to)?;
        }
        Ok(true)
    }

    /// The segments of our own host.
    fn meanwhile(&mut self) -> Result<()> {
        let (input, output) = self.call.device_addresses();
        let (call, Division { host, each, .. }) = (self.call, self.hosts.division);
        let at = (host * each * call.bytes()) as u64;
        match call.collective {
            Collective::AllGather => self.inside(Collective::AllGather, call.count, input, output + at),
            _ => Ok(()),
        }
    }

    fn follows(&self, chunk: usize) -> bool {
        let is_tail = self.piece(chunk).is_some_and(|(_, piece, ..)| piece.is_tail);
        match self.call.collective {
            Collective::AllReduce => !is_tail,
            Collective::Broadcast => !is_tail && !self.is_here(self.root.0),
            Collective::Reduce => self.is_here(self.root.0),
            Collective::AllGather => chunk == self.last,
            _ => false,
        }
    }

    fn after(&mut self, chunk: usize) -> Result<()> {
        let (call, output) = (self.call, self.call.device_addresses().1);
        // SAFETY: the call's stream.
        unsafe { self.hosts.inner.path.guard(self.stream) }?;
        if let Some((shares, piece, each, _)) = self.piece(chunk) {
            let (to, packed) = (output + piece.first, self.scratch + piece.packed);
            return match (call.collective, piece.is_tail) {
                // Every rank of the host has it.
                (Collective::Reduce, true) if self.hosts.division.local != self.root.1 => Ok(()),
                (Collective::Reduce, true) => {
                    let (context, bytes) = (&self.hosts.context, piece.each as usize);
                    // SAFETY: our scratch memory, and the root's output.
                    unsafe { driver::copy("reduce", context, self.stream, packed, to, bytes) }
                }
                (Collective::Reduce, false) => self.inside(Collective::Gather, each, packed, to),
                _ => self.inside(Collective::AllGather, each, output + shares.own(&piece), to),
            };
        }
        let own = (self.hosts.division.local * call.bytes()) as u64;
        for (_, at) in self.blocks().filter(|&(host, _)| !self.is_here(host)) {
            self.inside(Collective::AllGather, call.count, output + at + own, output + at)?;
        }
        Ok(())
    }
}
