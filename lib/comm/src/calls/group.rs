//! Groups: several calls that run as one, in no particular order among themselves.

use std::marker::PhantomData;
use std::ops::Range;

use super::table::{asked, collectives};
use crate::RawCall;
use crate::{Comm, Exchange};
use tinynccl_plan::dtype::{DType, Element, ReduceOp};
use tinynccl_plan::error::{Error, Result};

/// Calls collected for one run; see [`Comm::group`]. The methods are those of [`Comm`], by the same names.
#[must_use = "nothing is sent before Group::end"]
#[derive(Debug)]
pub struct Group<'a> {
    comm: &'a Comm,
    calls: Vec<RawCall>,
    self_sends: Vec<(DType, &'a [u8])>,
    self_recvs: Vec<(DType, *mut u8, usize)>,
    _buffers: PhantomData<&'a mut [u8]>,
}

impl Comm {
    /// Collects the calls that `build` makes, then runs them together. Nothing is sent when `build` fails.
    ///
    /// All calls advance at the same time. Calls that use the same link alternate on it, message by message in the
    /// order of the calls: a later collective sends while an earlier one still receives. Short all_reduces of one type
    /// and operator (up to 4 KiB each) are packed into one of up to 64 KiB.
    ///
    /// Sends and receives in one group cannot deadlock among the ranks of the group, whatever their order. Every rank
    /// must add the same collectives in the same order, and each pair of ranks its messages. Otherwise, or when a rank
    /// makes a collective outside the group, the ranks get [`Error::Mismatch`].
    ///
    /// ```
    /// # extern crate tinynccl_comm as tinynccl;
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

/// Point to point.
impl<'a> Group<'a> {
    /// Adds a send to `peer` (our own rank included, if the group also receives from it).
    pub fn send<T: Element>(&mut self, data: &'a [T], peer: usize) -> Result<()> {
        if peer == self.comm.rank() {
            self.self_sends.push((T::DTYPE, bytemuck::cast_slice(data)));
            return Ok(());
        }
        self.push(self.comm.inner.send(data, peer))
    }

    /// Adds a receive from `peer`.
    pub fn recv<T: Element>(&mut self, data: &'a mut [T], peer: usize) -> Result<()> {
        if peer == self.comm.rank() {
            let bytes: &'a mut [u8] = bytemuck::cast_slice_mut(data);
            self.self_recvs.push((T::DTYPE, bytes.as_mut_ptr(), bytes.len()));
            return Ok(());
        }
        self.push(self.comm.inner.recv(data, peer))
    }

    /// Adds [`Comm::send_recv`].
    pub fn send_recv<T: Element>(&mut self, send: &'a [T], to: usize, recv: &'a mut [T], from: usize) -> Result<()> {
        self.send(send, to)?;
        self.recv(recv, from)
    }

    /// Adds [`Comm::neighbour_exchange`].
    pub fn neighbour_exchange<T: Element>(&mut self, shifts: impl IntoIterator<Item = Exchange<'a, T>>) -> Result<()> {
        for Exchange { to, send, from, recv } in shifts {
            if let Some(to) = to {
                self.send(send, to)?;
            }
            if let Some(from) = from {
                self.recv(recv, from)?;
            }
        }
        Ok(())
    }
}

macro_rules! grouped {
    ($($(#[$doc:meta])* $form:ident $collective:ident $arguments:tt: $name:ident, $async:ident, $device:tt;)*) => {
        /// Collectives.
        impl<'a> Group<'a> {
            $(grouped! { @ $form $name $collective $arguments })*
        }
    };
    (@ apart $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("Adds [`Comm::", stringify!($name), "`].")]
        pub fn $name<T: Element>(&mut self, input: &'a [T], output: &'a mut [T] $(, $arg: $ty)*) -> Result<()> {
            self.push(self.comm.inner.call(asked!($collective $(, $arg)*), input, output))
        }
    };
    (@ place $name:ident $collective:ident ($($arg:ident: $ty:ty),*)) => {
        #[doc = concat!("Adds [`Comm::", stringify!($name), "`].")]
        pub fn $name<T: Element>(&mut self, buffer: &'a mut [T] $(, $arg: $ty)*) -> Result<()> {
            self.push(self.comm.inner.call_in_place(asked!($collective $(, $arg)*), buffer))
        }
    };
}
collectives!(grouped);

/// Collectives with a length per rank, and the barrier.
impl<'a> Group<'a> {
    /// Adds [`Comm::all_gather_v`].
    pub fn all_gather_v<T: Element>(
        &mut self,
        input: &'a [T],
        output: &'a mut [T],
        recv: &[Range<usize>],
    ) -> Result<()> {
        self.push(self.comm.inner.all_gather_v(input, output, recv))
    }

    /// Adds [`Comm::gather_v`].
    pub fn gather_v<T: Element>(
        &mut self,
        input: &'a [T],
        output: &'a mut [T],
        recv: &[Range<usize>],
        root: usize,
    ) -> Result<()> {
        self.push(self.comm.inner.gather_v(input, output, recv, root))
    }

    /// Adds [`Comm::scatter_v`].
    pub fn scatter_v<T: Element>(
        &mut self,
        input: &'a [T],
        send: &[Range<usize>],
        output: &'a mut [T],
        root: usize,
    ) -> Result<()> {
        self.push(self.comm.inner.scatter_v(input, send, output, root))
    }

    /// Adds [`Comm::all_to_all_v`].
    pub fn all_to_all_v<T: Element>(
        &mut self,
        input: &'a [T],
        send: &[Range<usize>],
        output: &'a mut [T],
        recv: &[Range<usize>],
    ) -> Result<()> {
        self.push(self.comm.inner.all_to_all_v(input, send, output, recv))
    }

    /// Adds [`Comm::barrier`]: the group does not end before every rank has begun it.
    pub fn barrier(&mut self) -> Result<()> {
        self.push(Ok(self.comm.inner.barrier()))
    }
}

impl Group<'_> {
    fn push(&mut self, call: Result<RawCall>) -> Result<()> {
        self.calls.push(call?);
        Ok(())
    }

    /// Runs the calls. An empty group does nothing.
    pub fn end(self) -> Result<()> {
        self.copy_to_self()?;
        let inner = &self.comm.inner;
        inner.drain();
        // SAFETY: every call's lengths were checked against its key, its memory is borrowed for 'a, which outlives
        // self.
        unsafe { inner.batch("group", &self.calls, false) }
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
