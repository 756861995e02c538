//! Groups: several calls that run as one, so that their order among themselves does not matter.

use std::marker::PhantomData;

use super::collectives::Call;
use super::p2p::CHANNEL;
use super::state::lock;
use super::{Comm, Engine};
use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{self, Buffers, CallKey, Task};
use crate::wire::{Collective, Header};

/// Calls collected for one run; see [`Comm::group`].
///
/// Messages between two ranks keep their order, collectives keep theirs; everything else advances together.
#[must_use = "nothing is sent before Group::end"]
pub struct Group<'a> {
    comm: &'a Comm,
    calls: Vec<Call>,
    self_sends: Vec<(DType, &'a [u8])>,
    self_recvs: Vec<(DType, *mut u8, usize)>,
    _buffers: PhantomData<&'a mut [u8]>,
}

impl Comm {
    /// Collects the calls that `build` makes, then runs them together. Nothing is sent when `build` fails.
    ///
    /// Sends and receives in one group cannot deadlock among the ranks of the group, whatever their order.
    ///
    /// ```
    /// # fn main() -> tinynccl::Result<()> {
    /// use tinynccl::{Comm, Config, Result};
    ///
    /// fn exchange(comm: Comm) -> Result<()> {
    ///     let (mine, mut theirs) = ([comm.rank() as f32; 1000], [0.0; 1000]);
    ///     let peer = 1 - comm.rank();
    ///     comm.group(|g| {
    ///         g.send(&mine, peer)?;
    ///         g.recv(&mut theirs, peer)
    ///     })?;
    ///     assert_eq!(theirs, [peer as f32; 1000]);
    ///     Ok(())
    /// }
    ///
    /// let ranks = Comm::threads(2, Config::default())?.into_iter().map(|comm| std::thread::spawn(|| exchange(comm)));
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     rank.join().expect("no rank panics")?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn group<'a, R>(&'a self, build: impl FnOnce(&mut Group<'a>) -> Result<R>) -> Result<R> {
        let mut group = self.group_start();
        let value = build(&mut group)?;
        group.end()?;
        Ok(value)
    }

    /// An empty group, for callers that cannot use a closure; [`Group::end`] runs it.
    pub fn group_start(&self) -> Group<'_> {
        Group { comm: self, calls: Vec::new(), self_sends: Vec::new(), self_recvs: Vec::new(), _buffers: PhantomData }
    }
}

impl<'a> Group<'a> {
    /// Adds a send to `peer` (our own rank included, if the group also receives from it).
    pub fn send<T: Element>(&mut self, data: &'a [T], peer: usize) -> Result<()> {
        let inner = &self.comm.inner;
        inner.peer_in_range("send", "peer", peer)?;
        if peer == inner.state.rank {
            self.self_sends.push((T::DTYPE, bytemuck::cast_slice(data)));
            return Ok(());
        }
        let buffers = Buffers { input: data.as_ptr().cast(), output: std::ptr::null_mut() };
        self.push(p2p_key(T::DTYPE, inner.state.rank, peer, data.len()), buffers);
        Ok(())
    }

    /// Adds a receive from `peer`.
    pub fn recv<T: Element>(&mut self, data: &'a mut [T], peer: usize) -> Result<()> {
        let inner = &self.comm.inner;
        inner.peer_in_range("recv", "peer", peer)?;
        if peer == inner.state.rank {
            let bytes: &'a mut [u8] = bytemuck::cast_slice_mut(data);
            self.self_recvs.push((T::DTYPE, bytes.as_mut_ptr(), bytes.len()));
            return Ok(());
        }
        let buffers = Buffers { input: std::ptr::null(), output: data.as_mut_ptr().cast() };
        self.push(p2p_key(T::DTYPE, peer, inner.state.rank, data.len()), buffers);
        Ok(())
    }

    /// Adds [`Comm::all_reduce_in_place`].
    pub fn all_reduce_in_place<T: Element>(&mut self, buffer: &'a mut [T], op: ReduceOp) -> Result<()> {
        let call = self.comm.inner.all_reduce(buffer, op)?;
        self.calls.push(call);
        Ok(())
    }

    /// Adds [`Comm::broadcast`].
    pub fn broadcast<T: Element>(&mut self, buffer: &'a mut [T], root: usize) -> Result<()> {
        let call = self.comm.inner.broadcast(buffer, root)?;
        self.calls.push(call);
        Ok(())
    }

    /// Adds [`Comm::all_gather`].
    pub fn all_gather<T: Element>(&mut self, input: &'a [T], output: &'a mut [T]) -> Result<()> {
        let call = self.comm.inner.all_gather(input, output)?;
        self.calls.push(call);
        Ok(())
    }

    /// Adds [`Comm::reduce_scatter`].
    pub fn reduce_scatter<T: Element>(&mut self, input: &'a [T], output: &'a mut [T], op: ReduceOp) -> Result<()> {
        let call = self.comm.inner.reduce_scatter(input, output, op)?;
        self.calls.push(call);
        Ok(())
    }

    fn push(&mut self, key: CallKey, buffers: Buffers) {
        self.calls.push(Call { key, buffers });
    }

    /// Runs the calls. An empty group does nothing.
    pub fn end(self) -> Result<()> {
        self.copy_to_self()?;
        let inner = &self.comm.inner;
        inner.state.check(|| "group".to_owned())?;
        if self.calls.is_empty() {
            return Ok(());
        }
        inner.drain();
        let mut engine = lock(&inner.engine);
        // All links of point-to-point calls first, in the order that cannot deadlock, whatever the order of the calls.
        let peers = self.calls.iter().filter(|call| call.key.collective == Collective::SendRecv);
        let other = |key: &CallKey| if key.root == inner.state.rank { key.peer } else { key.root };
        let mut links: Vec<_> = peers.map(|call| (CHANNEL, other(&call.key))).collect();
        links.sort_unstable();
        links.dedup();
        inner.open(&mut engine, links)?;
        let mut plans = Vec::with_capacity(self.calls.len());
        for call in &self.calls {
            let seq = next_seq(&mut engine, &call.key, inner.state.rank);
            if call.key.collective != Collective::SendRecv {
                inner.state.progress.start(u64::from(seq), call.key.collective as u8);
            }
            inner.prepare(&mut engine, &call.key)?;
            plans.push((engine.plans[0].1.clone(), seq));
        }
        let mut tasks: Vec<Task<'_>> = Vec::with_capacity(plans.len());
        for (index, (call, (plan, seq))) in self.calls.iter().zip(&plans).enumerate() {
            let after = (0..index).rev().find(|&earlier| same_order(&self.calls[earlier].key, &call.key));
            let header = Header { seq: *seq, ..plan.header };
            tasks.push(Task { plan, buffers: call.buffers, header, after });
        }
        let Engine { links, workspace, seq, .. } = &mut *engine;
        // SAFETY: every call's lengths were checked against its key, its memory is borrowed for 'a, which outlives self.
        unsafe { executor::run(&tasks, links, workspace, &*inner.state, &inner.patience(false)) }?;
        inner.state.progress.done(u64::from(*seq));
        Ok(())
    }

    fn copy_to_self(&self) -> Result<()> {
        let op = "group";
        if self.self_sends.len() != self.self_recvs.len() {
            let detail = format!(
                "rank {} sends {} times to itself but receives {} times",
                self.comm.rank(),
                self.self_sends.len(),
                self.self_recvs.len()
            );
            return Err(Error::invalid(op, detail));
        }
        for ((dtype, data), &(to_dtype, to, len)) in self.self_sends.iter().zip(&self.self_recvs) {
            if *dtype != to_dtype || data.len() != len {
                let detail = format!(
                    "rank {} sends {} bytes of {dtype} to itself but receives {len} bytes of {to_dtype}",
                    self.comm.rank(),
                    data.len()
                );
                return Err(Error::invalid(op, detail));
            }
            // SAFETY: `to` is a slice borrowed mutably for 'a, so it is valid for `len` bytes and apart from `data`.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, len) };
        }
        Ok(())
    }
}

fn p2p_key(dtype: DType, sender: usize, receiver: usize, count: usize) -> CallKey {
    CallKey { collective: Collective::SendRecv, dtype, op: None, root: sender, count, peer: receiver }
}

/// Point-to-point messages count per pair and direction, collectives per communicator.
fn next_seq(engine: &mut Engine, key: &CallKey, rank: usize) -> u32 {
    let counter = match key.collective {
        Collective::SendRecv if key.root == rank => &mut engine.sent[key.peer],
        Collective::SendRecv => &mut engine.received[key.root],
        _ => &mut engine.seq,
    };
    *counter = counter.wrapping_add(1);
    *counter
}

/// Whether two calls share links, so that the later one must wait for the earlier.
fn same_order(a: &CallKey, b: &CallKey) -> bool {
    match (a.collective, b.collective) {
        (Collective::SendRecv, Collective::SendRecv) => (a.root, a.peer) == (b.root, b.peer),
        (Collective::SendRecv, _) | (_, Collective::SendRecv) => false,
        _ => true,
    }
}
