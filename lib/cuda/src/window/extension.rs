//! The extensions of all ranks' windows: the memory of LL128 lines and slots, which small calls do not need.
//!
//! It is allocated when a call first needs it, and takes no barrier. A rank allocates its own, offers it to the ranks
//! of the call, and maps theirs: for a collective those of all ranks, for a message that of its receiver. Both ends of
//! a call do the same (`peer::needs_extension` is a function of the choice, equal on all ranks, and
//! `window::needs_slots` of a message's length), so the wait for an offer ends as the call itself would: with the
//! peer's call, the peer's death, an abort, or the deadline.
//!
//! An offer does not wait. A thread that drives several ranks offers for all of them first (`DeviceComm::prepare`).
//!
//! The start-up check of the path does not cover these mappings: it looks whether writes between two GPUs arrive at
//! all, and the window's own mapping, made in the same way, has shown that. Registered buffers are mapped likewise.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::CudaContext;

use super::reach::{Introduction, PeerWindow, RankGpu};
use super::{EXTENSION, Layout, MAX_RANKS, Window};
use crate::driver::Uncaptured;
use tinynccl_comm::Comm;
use tinynccl_plan::error::{Error, Result};
use tinynccl_sys::threads::lock;

/// The name of the exchanges between two ranks.
const OFFER: &str = "DeviceComm: extension";

/// The extensions, as one rank's kernels reach them.
#[derive(Debug)]
pub(crate) struct Extension {
    /// By rank; 0: not reached yet.
    addresses: [AtomicU64; MAX_RANKS],
    /// True once the extensions of all ranks are reached.
    whole: AtomicBool,
    /// `None`: they lie behind the windows, in the same allocations.
    growth: Option<Growth>,
}

#[derive(Debug)]
struct Growth {
    context: Arc<CudaContext>,
    rank: usize,
    layout: Layout,
    gpus: Vec<RankGpu>,
    state: Mutex<State>,
    /// A bit for each rank that has our offer.
    offered: AtomicU32,
    /// Held by the thread that waits for the offer of that rank; others may offer meanwhile.
    waits: [Mutex<()>; MAX_RANKS],
}

#[derive(Debug, Default)]
struct State {
    // Unmapped before ours is freed.
    peers: Vec<PeerWindow>,
    ours: Option<Window>,
    /// Reason why there is none. It stays: other ranks were notified.
    failed: Option<Error>,
}

impl Extension {
    /// Part of windows of [`Layout::bytes`] at these addresses.
    pub(super) fn behind(windows: &[u64; MAX_RANKS], layout: &Layout) -> Extension {
        let place = |rank: usize| if rank < layout.ranks { windows[rank] + layout.window_bytes() as u64 } else { 0 };
        let addresses = std::array::from_fn(|rank| AtomicU64::new(place(rank)));
        Extension { addresses, whole: AtomicBool::new(true), growth: None }
    }

    /// Nothing yet.
    pub(super) fn later(context: &Arc<CudaContext>, rank: usize, layout: Layout, gpus: &[RankGpu]) -> Extension {
        let (context, gpus, state) = (context.clone(), gpus.to_vec(), Mutex::default());
        let (offered, waits) = (AtomicU32::new(0), Default::default());
        let growth = Some(Growth { context, rank, layout, gpus, state, offered, waits });
        Extension { addresses: Default::default(), whole: AtomicBool::new(false), growth }
    }

    /// Bytes of ours that are no part of the window.
    pub(crate) fn bytes(&self) -> usize {
        let own = |growth: &Growth| lock(&growth.state).ours.as_ref().map_or(0, |window| window.bytes);
        self.growth.as_ref().map_or(0, own)
    }

    /// As the kernels take them.
    #[inline]
    pub(crate) fn addresses(&self) -> [u64; MAX_RANKS] {
        // A thread that has seen an address by `reach` sees it here.
        std::array::from_fn(|rank| self.addresses[rank].load(Ordering::Relaxed))
    }

    /// Returns true if the extensions of `peers` are reached.
    #[inline]
    fn reaches(&self, peers: impl IntoIterator<Item = usize>) -> bool {
        self.whole.load(Ordering::Acquire)
            || peers.into_iter().all(|peer| self.addresses[peer].load(Ordering::Acquire) != 0)
    }

    /// Offers ours to `peers`, and does not wait.
    ///
    /// # Errors
    /// [`Error::Cuda`] when the device has no room; the other ranks get the same text when they need it.
    #[inline]
    pub(crate) fn offer(&self, host: Option<&Comm>, peers: impl IntoIterator<Item = usize> + Clone) -> Result<()> {
        if self.reaches(peers.clone()) {
            return Ok(());
        }
        let (Some(growth), Some(host)) = (&self.growth, host) else { return Ok(()) };
        let own = growth.offer(host, peers)?;
        self.addresses[growth.rank].store(own, Ordering::Release);
        Ok(())
    }

    /// Makes those of `peers` reachable, who make the same call: waits until they have offered theirs.
    ///
    /// # Errors
    /// As [`Extension::offer`], also for a peer's; [`Error::PeerLost`], [`Error::Timeout`] and [`Error::Aborted`].
    #[inline]
    pub(crate) fn reach(&self, host: Option<&Comm>, peers: impl IntoIterator<Item = usize> + Clone) -> Result<()> {
        if self.reaches(peers.clone()) {
            return Ok(());
        }
        self.offer(host, peers.clone())?;
        let (Some(growth), Some(host)) = (&self.growth, host) else { return Ok(()) };
        peers.into_iter().try_for_each(|peer| growth.reach(host, peer, &self.addresses))?;
        let reached = |rank: usize| self.addresses[rank].load(Ordering::Relaxed) != 0;
        if (0..growth.layout.ranks).all(reached) {
            self.whole.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Unmaps the other ranks'.
    pub(super) fn unmap(&self) {
        if let Some(growth) = &self.growth {
            let peers = std::mem::take(&mut lock(&growth.state).peers);
            drop(peers);
        }
    }

    /// Leaves ours until the process ends.
    pub(super) fn keep(&self) {
        if let Some(growth) = &self.growth {
            std::mem::forget(lock(&growth.state).ours.take());
        }
    }
}

impl Growth {
    /// Allocates ours if it is missing, and offers it to the ranks that do not have the offer yet. Gives the address.
    #[cold]
    fn offer(&self, host: &Comm, peers: impl IntoIterator<Item = usize> + Clone) -> Result<u64> {
        let mut state = lock(&self.state);
        let missing = |peer: &usize| *peer != self.rank && self.offered.load(Ordering::Relaxed) >> peer & 1 == 0;
        if let (Some(window), false) = (&state.ours, peers.clone().into_iter().any(|peer| missing(&peer))) {
            return Ok(window.address);
        }
        let _uncaptured = Uncaptured::begin();
        if state.ours.is_none() && state.failed.is_none() {
            let (bytes, cleared) = (self.layout.extension_bytes(), self.layout.slots_begin());
            match Window::amid_calls(&self.context, bytes, cleared, EXTENSION) {
                Ok(window) => {
                    log::debug!("rank {}: {} MiB more for larger calls and messages", self.rank, bytes >> 20);
                    state.ours = Some(window);
                }
                Err(error) => state.failed = Some(error),
            }
        }
        let offer = match (&state.ours, &state.failed) {
            (Some(window), _) => Introduction::new(window, None).map_err(|e| e.to_string()),
            (None, Some(error)) => Err(error.to_string()),
            (None, None) => Err("there is no memory, and no reason".to_owned()),
        };
        for peer in peers {
            // Some occur more than once.
            if missing(&peer) {
                host.offer(OFFER, peer, &offer)?;
                self.offered.fetch_or(1 << peer, Ordering::Relaxed);
            }
        }
        match (&state.ours, offer) {
            (Some(window), Ok(_)) => Ok(window.address),
            (_, Err(text)) => Err(state.failed.clone().unwrap_or_else(|| Error::invalid(OFFER, text))),
            (None, Ok(_)) => Err(Error::invalid(OFFER, "there is no memory")),
        }
    }

    /// Maps that of `peer`, if it is not mapped yet.
    #[cold]
    fn reach(&self, host: &Comm, peer: usize, addresses: &[AtomicU64; MAX_RANKS]) -> Result<()> {
        let _wait = lock(&self.waits[peer]);
        if addresses[peer].load(Ordering::Acquire) != 0 {
            return Ok(());
        }
        let offer = host.value_of::<Result<Introduction, String>>(OFFER, peer);
        let offer = offer.map_err(|error| match waited(peer, error) {
            timeout @ Error::Timeout { .. } => {
                // As when a kernel gives up: the other ranks need not wait for us.
                host.fail_everywhere(timeout.clone());
                timeout
            }
            other => other,
        })?;
        let theirs = offer.map_err(|why| {
            Error::invalid(OFFER, format!("rank {peer} has no memory for the slots of this call: {why}"))
        })?;
        let address = if self.gpus[peer].same_process(&self.gpus[self.rank]) {
            // Peer access was enabled for the windows.
            theirs.address()
        } else {
            let _uncaptured = Uncaptured::begin();
            let opened = PeerWindow::open(
                &self.context,
                self.layout.extension_bytes(),
                &self.gpus,
                (self.rank, peer),
                &theirs,
                None,
            )?;
            let address = opened.address;
            lock(&self.state).peers.push(opened);
            address
        };
        addresses[peer].store(address, Ordering::Release);
        Ok(())
    }
}

/// The error of a wait for a peer's offer, with its meaning.
fn waited(peer: usize, error: Error) -> Error {
    match error {
        Error::Timeout { rank, waited, missing, detail, .. } => Error::Timeout {
            op: "the first larger call on the device".to_owned(),
            rank,
            waited,
            missing,
            detail: format!(
                "rank {peer} did not offer the memory that this call needs, which it does when it makes the same call ({detail}); \
                 check that rank {peer} makes the same calls, and look at its output for the first error"
            ),
        },
        other => other,
    }
}
