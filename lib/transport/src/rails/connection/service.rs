//! A connection's streams and queue pairs, as its worker threads serve them.

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::rails::connection::Connection;
use crate::rails::rdma::PortListener;
use crate::rails::worker::service::{Remaining, Service};
use crate::rails::worker::thread::Job;
use tinynccl_sys::threads::lock;

/// The stream that has a position now, whatever its number.
struct StreamService {
    connection: Arc<Connection>,
    position: usize,
}

impl Service for StreamService {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.connection.beside(self.position).map(|stream| stream.as_fd())
    }

    fn readable(&self, hung_up: bool) -> Remaining {
        let Some(stream) = self.connection.beside(self.position) else { return Remaining::Nothing };
        let mut reader = lock(&stream.reader);
        // Under the lock: another stream may begin in this position.
        let index = stream.number();
        if stream.retires.swap(false, Ordering::AcqRel) {
            reader.retire(&*self.connection, index);
            return Remaining::Unwatch;
        }
        let remaining = reader.pump(&*self.connection, index, hung_up);
        if reader.is_over() { Remaining::Ended } else { remaining }
    }

    fn writable(&self, ready: bool) -> Remaining {
        let Some(stream) = self.connection.beside(self.position) else { return Remaining::Nothing };
        stream.queued.store(false, Ordering::Release);
        let mut writer = lock(&stream.writer);
        if ready {
            writer.unblock();
        }
        writer.pump(&*self.connection, stream.number(), usize::MAX)
    }

    fn fail(&self, detail: &str) {
        self.connection.fail(detail.to_owned());
    }
}

/// Completion events of a queue pair.
struct QueuePairService {
    connection: Arc<Connection>,
    number: usize,
}

impl Service for QueuePairService {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.connection.rdma.watched(self.number)
    }

    fn readable(&self, _hung_up: bool) -> Remaining {
        self.connection.rdma.event(&*self.connection, self.number);
        Remaining::Nothing
    }

    fn fail(&self, detail: &str) {
        self.connection.fail(detail.to_owned());
    }
}

impl PortListener for Connection {
    fn port(&self, ip: IpAddr, up: bool) {
        self.rdma.port(self, ip, up);
    }
}

impl Connection {
    /// Has the stream's thread serve it from now on.
    pub(super) fn serve(&self, index: usize) {
        let (Some(stream), Some(connection)) = (self.stream(index), self.this.upgrade()) else { return };
        let key = stream.key;
        let service = StreamService { connection, position: index % self.positions().max(1) };
        stream.worker.push(Job::Add { key, service: Box::new(service), edge: true });
        // A job that came before found nothing to serve.
        stream.queued.store(false, Ordering::Release);
        self.wake(index);
    }

    /// Has the thread of queue pair `number` serve it from now on, and listens to its port.
    pub(super) fn serve_queue_pair(&self, number: usize) {
        if let (Some((worker, key)), Some(connection)) = (self.rdma.served_by(number), self.this.upgrade()) {
            self.rdma.listen(connection.clone());
            let service = QueuePairService { connection, number };
            worker.push(Job::Add { key, service: Box::new(service), edge: false });
        }
    }
}
