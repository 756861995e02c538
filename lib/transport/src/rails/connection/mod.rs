//! A connection: its streams, what is posted on it, and how it ends.

mod closing;
pub(super) mod core;
pub(super) mod ends;
mod service;
mod upcalls;

use std::net::Shutdown;
use std::ops::Deref;
use std::sync::{Arc, Mutex, Weak};

use crate::rails::connection::core::{Core, DataStream};
use crate::rails::data::request::wrong_process;
use crate::rails::data::session::Paths;
use crate::rails::data::side::Side;
use crate::rails::data::writer::Writer;
use crate::rails::failover::agreement::Agreement;
use crate::rails::failover::slot::State;
use crate::rails::rdma::{Devices, Queues};
use crate::rails::stream::Stream;
use crate::rails::worker::pool::Workers;
use crate::rails::worker::thread::Job;
use crate::seal::Socket;
use tinynccl_plan::error::Result;
use tinynccl_sys::fork::Origin;
use tinynccl_sys::threads::lock;

/// Additional stream positions, for streams that replace lost ones. A position is free again once both ends have
/// retired the stream that was there.
const SPARE: usize = 16;

/// A connection, shared by its owner and the threads that serve its streams.
#[derive(Debug)]
pub(in crate::rails) struct Connection {
    origin: Origin,
    /// This connection, for what serves its descriptors.
    this: Weak<Connection>,
    core: Core,
    pub(in crate::rails) rdma: Queues,
    /// Numbers of streams that this end has not seen, and for which it has replied that nothing came over them. Held
    /// for each step of the [`Agreement`](crate::rails::failover::agreement::Agreement), which takes no other lock.
    pub(in crate::rails) refused: Mutex<Vec<usize>>,
    /// Held while a stream is added.
    adding: Mutex<()>,
}

impl Deref for Connection {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Connection {
    pub(in crate::rails) fn new(
        name: String,
        sockets: Vec<Socket>,
        paths: Paths,
        side: Side,
        (workers, devices): (&Workers, Option<Arc<Devices>>),
    ) -> Result<Arc<Connection>> {
        let count = sockets.len();
        let receives = side.receives();
        let mut streams: Vec<Stream> = Vec::new();
        for (index, socket) in sockets.into_iter().enumerate() {
            let bulk = !paths.several && workers.is_bulk(index, count);
            let worker = (workers.next(receives, bulk), bulk);
            streams.push(Stream::new(index, socket, State::Alive, worker, streams.iter()));
        }
        let spare = if paths.several { SPARE } else { 0 };
        let connection = Arc::new_cyclic(|this| Connection {
            origin: Origin::here(),
            this: this.clone(),
            core: Core::new(name, (streams, spare), paths, side, workers.activity()),
            rdma: Queues::new(devices),
            refused: Mutex::default(),
            adding: Mutex::default(),
        });
        (0..count).for_each(|index| connection.serve(index));
        connection.rdma.offer_where(&*connection, |_| true);
        Ok(connection)
    }

    /// Adds a stream in the position of a lost one, under the number that the sender gave it; false if that position is
    /// not free, or the connection is closed or has failed.
    pub(in crate::rails) fn add(&self, index: usize, socket: Socket, workers: &Workers) -> bool {
        let _adding = lock(&self.adding);
        if self.is_over() || !self.admits(&lock(&self.refused), index) {
            return false;
        }
        if let Err(why) = self.put(index, socket, workers) {
            log::debug!("net: {}: stream {index}: {why}", self.name);
            return false;
        }
        // The sender may have retired it meanwhile, before anything was read from it.
        if lock(&self.refused).contains(&index) {
            self.fail_stream(index, "the sender has retired it".to_owned());
            return false;
        }
        self.serve(index);
        // Control frames about other lost streams that no stream could carry.
        self.resend_control();
        if let Side::Out(sender) = &self.side {
            sender.wake(self);
        }
        true
    }

    fn put(&self, index: usize, socket: Socket, workers: &Workers) -> std::io::Result<()> {
        let state = if let Side::Out(_) = self.side { State::Alive } else { State::New };
        // The peer knows nothing of the stream before it receives this.
        let first = |stream: &Stream| match self.side {
            Side::Out(_) => Writer::joining(index, self.rdma.offer(self, index, stream)),
            Side::In(_) => Writer::default(),
        };
        let Some(position) = self.core.position(index) else { return Ok(()) };
        if let Some(stream) = position.get() {
            return stream.renew(index, socket, state, first(stream));
        }
        let others = self.alive().map(|(_, stream)| &**stream);
        let stream = Stream::new(index, socket, state, (workers.next(self.side.receives(), false), false), others);
        let first = first(&stream);
        position.set(DataStream::new(stream, first)).map_err(|_| std::io::Error::other("its position is taken"))
    }

    /// Fails in a forked child.
    #[inline]
    pub(in crate::rails) fn check_here(&self, op: &str) -> Result<()> {
        if self.origin.is_here() { Ok(()) } else { Err(wrong_process(op)) }
    }

    /// Acknowledges what the owner has received: a message is complete here before its acknowledgement is written, and
    /// the sender waits for that.
    fn acknowledge(&self) {
        if !self.several() || !self.side.receives() {
            return;
        }
        for (index, stream) in self.alive() {
            // Until the thread that reads from it has counted what it read.
            drop(lock(&stream.reader));
            lock(&stream.writer).pump(self, index, usize::MAX);
        }
    }

    /// Ends it for its owner, whose memory is not touched any more when this returns. Where nothing was left to write,
    /// what is under way in the kernel still arrives.
    pub(in crate::rails) fn close(&self) {
        if !self.origin.is_here() {
            // The connection, and the threads that serve it, are its parent's.
            return std::mem::forget(self.this.upgrade());
        }
        self.acknowledge();
        self.core.close();
        let mut whole = match &self.side {
            Side::Out(sender) => sender.clear(),
            Side::In(_) => false,
        };
        for (_, stream) in self.streams() {
            // A pump that holds one of these is in a call that does not wait; the next one finds the connection closed.
            whole &= lock(&stream.writer).clear();
            lock(&stream.reader).clear();
        }
        self.rdma.close();
        self.requests.abandon();
        for (_, stream) in self.streams() {
            stream.shut(if whole { Shutdown::Write } else { Shutdown::Both });
            stream.worker.push(if whole { Job::Linger(stream.key) } else { Job::Remove(stream.key) });
        }
    }
}
