//! Point to point: messages between two ranks.

use std::time::Duration;

use crate::engine::message::CHANNEL;
use crate::executor::{self, WaitPolicy};
use crate::{Comm, Engine, Work};
use tinynccl_plan::dtype::Element;
use tinynccl_plan::error::{Error, Result};
use tinynccl_plan::wire::{Algorithm, Header};
use tinynccl_sys::threads::lock;

/// One shift of [`Comm::neighbour_exchange`]: a message out on one side, and one in on the other.
#[derive(Debug)]
pub struct Exchange<'a, T> {
    /// The receiver of `send`; `None` at the border of a grid, where nothing is sent.
    pub to: Option<usize>,
    /// Sent.
    pub send: &'a [T],
    /// The sender of `recv`; `None` leaves `recv` unchanged.
    pub from: Option<usize>,
    /// The received elements: as many as `from` sends.
    pub recv: &'a mut [T],
}

impl<'a, T> Exchange<'a, T> {
    /// Both ways with one peer.
    pub fn with(peer: usize, send: &'a [T], recv: &'a mut [T]) -> Exchange<'a, T> {
        Exchange { to: Some(peer), send, from: Some(peer), recv }
    }
}

impl Comm {
    /// Sends `data` to `peer`, which must [`Comm::recv`] the same number of elements of the same type.
    ///
    /// Returns when `data` may be reused: small messages are buffered by the link, larger ones wait for the receiver.
    /// The first message between two ranks also waits until the peer makes its call, because the link is opened then.
    /// Ranks that send in a circle before they receive may therefore wait for each other: use [`Comm::send_recv`] or
    /// [`Comm::group`].
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # tinynccl::comm::on_threads(2, |comm| {
    /// match comm.rank() {
    ///     0 => comm.send(&[1.0f32, 2.0], 1)?,
    ///     _ => {
    ///         let mut data = [0.0f32; 2];
    ///         comm.recv(&mut data, 0)?;
    ///         assert_eq!(data, [1.0, 2.0]);
    ///     }
    /// }
    /// # Ok(())
    /// # }).unwrap();
    /// ```
    pub fn send<T: Element>(&self, data: &[T], peer: usize) -> Result<()> {
        self.not_self("send", peer)?;
        self.inner.run(self.inner.send(data, peer))
    }

    /// Receives the elements that `peer` [`Comm::send`]s to us.
    pub fn recv<T: Element>(&self, data: &mut [T], peer: usize) -> Result<()> {
        self.not_self("recv", peer)?;
        self.inner.run(self.inner.recv(data, peer))
    }

    /// Waits up to `limit` until a message from `peer` can be received (`MPI_Probe`). If true, a [`Comm::recv`] does
    /// not wait for the message's beginning. False is no failure: the communicator stays usable. To find the first of
    /// several senders, probe one after the other.
    ///
    /// The first message between two ranks opens their link, which waits for the peer's call as [`Comm::recv`] does,
    /// regardless of `limit`.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # fn main() -> tinynccl::Result<()> {
    /// use std::time::Duration;
    /// use tinynccl::{Comm, Config, Result};
    ///
    /// fn first_come(comm: Comm) -> Result<()> {
    ///     if comm.rank() > 0 {
    ///         return comm.send(&[comm.rank() as u64], 0);
    ///     }
    ///     let mut missing = vec![1, 2];
    ///     while !missing.is_empty() {
    ///         for peer in missing.clone() {
    ///             if comm.probe(peer, Duration::from_millis(1))? {
    ///                 let mut who = [0u64];
    ///                 comm.recv(&mut who, peer)?;
    ///                 assert_eq!(who[0], peer as u64);
    ///                 missing.retain(|&rank| rank != peer);
    ///             }
    ///         }
    ///     }
    ///     Ok(())
    /// }
    ///
    /// let ranks = Comm::threads(3, Config::default())?.into_iter().map(|comm| std::thread::spawn(|| first_come(comm)));
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     rank.join().expect("no rank panics")?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn probe(&self, peer: usize, limit: Duration) -> Result<bool> {
        self.not_self("probe", peer)?;
        let inner = &self.inner;
        inner.peer_in_range("probe", "peer", peer)?;
        inner.drain();
        inner.state.check(|| "probe".to_owned())?;
        let mut engine = lock(&inner.engine);
        inner.open(&mut engine, [(CHANNEL, peer)])?;
        let Engine { links, received, .. } = &mut *engine;
        let Some(link) = links.get(CHANNEL, peer) else { return Ok(false) };
        let call = inner.recv(&mut [0u8; 0][..], peer)?;
        let header = Header { seq: received[peer].wrapping_add(1), ..call.header(inner.state.id, Algorithm::Direct) };
        let policy = WaitPolicy { deadline: limit, ..inner.wait_policy(false) };
        executor::peek(links, link as usize, &header, &*inner.state, &policy)
    }

    /// Sends `send` to rank `to` and receives `recv` from rank `from`, both at once (`MPI_Sendrecv`): ranks in a circle
    /// cannot deadlock. Either rank may be our own, if both are.
    pub fn send_recv<T: Element>(&self, send: &[T], to: usize, recv: &mut [T], from: usize) -> Result<()> {
        if to == self.rank() || from == self.rank() {
            return self.group(|group| group.send_recv(send, to, recv, from));
        }
        let inner = &self.inner;
        let calls = [inner.send(send, to)?, inner.recv(recv, from)?];
        inner.drain();
        // SAFETY: the calls were made from these two slices, which stay borrowed until this returns.
        unsafe { inner.send_recv(&calls) }
    }

    /// [`Comm::send_recv`], asynchronously; gives `(send, recv)` back.
    pub fn send_recv_async<T: Element>(
        &self,
        send: Vec<T>,
        to: usize,
        recv: Vec<T>,
        from: usize,
    ) -> Result<Work<(Vec<T>, Vec<T>)>> {
        self.not_self("send_recv_async", to)?;
        self.not_self("send_recv_async", from)?;
        self.inner.peer_in_range("send_recv_async", "to", to)?;
        self.inner.peer_in_range("send_recv_async", "from", from)?;
        self.submit_job((send, recv), move |inner, (send, recv)| {
            let calls = [inner.send(&**send, to)?, inner.recv(&mut **recv, from)?];
            // SAFETY: the calls were made from these two vectors, which belong to the job alone until it is complete.
            unsafe { inner.batch("send_recv", &calls, true) }
        })
    }

    /// Several shifts at once: the exchange of borders (halos) on a ring or a grid. It cannot deadlock.
    ///
    /// Between two ranks the k-th message that one sends in its list is the k-th that the other receives in its list.
    /// With one entry per direction, in the same order on every rank, this works for grids of any size, including those
    /// of one or two ranks, where several neighbours are the same rank or our own.
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
    /// # fn main() -> tinynccl::Result<()> {
    /// use tinynccl::{Comm, Config, Result, comm::Exchange};
    ///
    /// fn borders(comm: Comm) -> Result<()> {
    ///     let (rank, n) = (comm.rank(), comm.size());
    ///     let (right, left) = ((rank + 1) % n, (rank + n - 1) % n);
    ///     let (mine, mut from_left, mut from_right) = ([rank as f32; 4], [0.0; 4], [0.0; 4]);
    ///     comm.neighbour_exchange([
    ///         Exchange { to: Some(right), send: &mine, from: Some(left), recv: &mut from_left },
    ///         Exchange { to: Some(left), send: &mine, from: Some(right), recv: &mut from_right },
    ///     ])?;
    ///     assert_eq!((from_left, from_right), ([left as f32; 4], [right as f32; 4]));
    ///     Ok(())
    /// }
    ///
    /// let ranks = Comm::threads(3, Config::default())?.into_iter().map(|comm| std::thread::spawn(|| borders(comm)));
    /// for rank in ranks.collect::<Vec<_>>() {
    ///     rank.join().expect("no rank panics")?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn neighbour_exchange<'a, T: Element>(
        &'a self,
        shifts: impl IntoIterator<Item = Exchange<'a, T>>,
    ) -> Result<()> {
        self.group(|group| group.neighbour_exchange(shifts))
    }

    /// Refuses a message of a rank to itself outside of a group, which would wait for ever.
    #[doc(hidden)]
    pub fn not_self(&self, op: &str, peer: usize) -> Result<()> {
        if peer == self.rank() {
            return Err(Error::invalid(
                op,
                format!("rank {peer} cannot wait for itself: put the send and the recv into one group"),
            ));
        }
        Ok(())
    }
}
