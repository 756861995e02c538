//! Counters of this process's RDMA devices, under the names that Linux gives them: rdma_rxe in `hw_counters`, and the
//! attributes of a port.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// The counters at one moment.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct Counters {
            $($(#[$meta])* pub $name: u64,)*
        }

        pub(crate) struct Counting {
            $(pub(crate) $name: Counter,)*
        }

        pub(crate) static COUNTING: Counting = Counting { $($name: Counter(AtomicU64::new(0)),)* };

        /// Counted so far, by all RDMA devices of this process since it began.
        #[must_use]
        pub fn counters() -> Counters {
            Counters { $($name: COUNTING.$name.0.load(Ordering::Relaxed),)* }
        }
    };
}

counters! {
    /// Packets sent, acknowledgements and repetitions included.
    sent_pkts,
    /// Refusals that came because a peer had no receive posted (RNR NAK).
    rcvd_rnr_err,
    /// Refusals that came because a peer missed a packet (sequence NAK).
    rcvd_seq_err,
    /// Repetitions because no acknowledgement came in time.
    completer_retry_err,
    /// Requests that came again: most of them a second time, some from an unauthenticated sender.
    duplicate_request,
    /// Requests that came before one that is missing.
    out_of_seq_request,
    /// Packets of another partition, which are dropped.
    bad_pkey_cntr,
    /// Datagrams without the queue pair's key, which are dropped.
    qkey_viol_cntr,
    /// Answers that fit no request, and repeated requests that were never made before, which are dropped.
    dropped_strange,
}

pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}
