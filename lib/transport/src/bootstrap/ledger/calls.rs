//! The collective calls that a rank has made on a communicator: a running digest, by which ranks find out that they
//! made different ones, and the last calls themselves, so that the error can name them.
//!
//! Every call changes the digest, so that two ranks whose calls differed once differ from then on: it is enough that
//! they compare now and then. Messages carry it ([`Header::check`]), so do lines and credits in the shared region, and
//! heartbeats carry the calls to the store, which compares them where no rank reads a message of the other.
//!
//! A digest is shorter than what it stands for. Two lists of calls with one digest cannot be chosen beforehand, because
//! it depends on random numbers of the job ([`Keys`]).

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::ring::{Recorded, Ring};
use tinynccl_plan::wire::Header;
use tinynccl_sys::secret::Secret;

/// Calls that are compared: more than twice what a root can be ahead of the others, so that both know the first one
/// that differs.
pub(crate) const COMPARED: usize = 128;

/// A collective call, as far as all ranks must agree in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Made {
    /// Sequence number (the upper half) and the digest of this call and those before.
    stamp: u64,
    count: u64,
    /// Root (the upper half), collective, type and operator.
    kind: u64,
}

impl Made {
    /// Its number on the communicator.
    pub fn seq(&self) -> u32 {
        (self.stamp >> 32) as u32
    }

    fn digest(&self) -> u32 {
        self.stamp as u32
    }

    /// As a header: without the fields of a message, and with the digest where messages have it.
    pub fn header(&self, comm: u32) -> Header {
        let [op, dtype, collective, algorithm, ..] = self.kind.to_le_bytes();
        let (root, check) = ((self.kind >> 32) as u32, self.digest());
        Header { count: self.count, comm, seq: self.seq(), root, len: 0, check, collective, dtype, op, algorithm }
    }
}

/// The first call in which two ranks differ, of those that both remember. Both lists are in order.
pub fn first_difference(ours: &[Made], theirs: &[Made]) -> Option<[Made; 2]> {
    let same_call = |a: &Made| theirs.iter().find(|b| b.seq() == a.seq()).map(|b| [*a, *b]);
    ours.iter().filter_map(same_call).find(|[a, b]| a != b)
}

/// Two ranks of the world that made different calls on a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disagreement {
    /// The communicator.
    pub comm: u32,
    /// The ranks.
    pub ranks: [usize; 2],
    /// The call of each that is the first to differ, as far as is known.
    pub calls: [Made; 2],
}

/// Digests that the messages of a call carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// Digest of the calls before this one; never 0, which stands for an unknown one.
    pub before: u32,
    /// Number of the call, and the digest with it.
    pub stamp: u64,
}

/// The calls of one rank: written by the thread that makes them, read by any.
#[derive(Debug)]
pub(crate) struct Calls {
    keys: Keys,
    running: AtomicU64,
    ring: Ring,
}

impl From<Recorded> for Made {
    fn from(Recorded { stamp, count, kind, .. }: Recorded) -> Made {
        Made { stamp, count, kind }
    }
}

/// Numbers of calls start again after 2^32 of them, which takes a quarter of an hour at the least.
pub fn is_later(seq: u32, than: u32) -> bool {
    seq != than && seq.wrapping_sub(than) < 1 << 31
}

/// Bytes of a call, about: a type has eight at most, and the count of a pack is longer than it is.
#[inline(always)]
fn bytes(call: &Header) -> u64 {
    call.count.saturating_mul(4)
}

#[inline(always)]
fn digest(running: u64) -> u32 {
    ((running >> 32) as u32).max(1)
}

/// Random numbers, the same on all ranks of a communicator, which all its digests depend on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keys([u64; 3]);

impl Keys {
    /// Derives the keys of communicator `comm` of the job with this secret.
    pub(crate) fn of(secret: &Secret, comm: u32) -> Keys {
        let derived = secret.derive("digests of calls", &comm.to_le_bytes());
        let [first, second, third, _]: [[u8; 8]; 4] = bytemuck::cast(*derived.bytes());
        Keys([first, second, third].map(u64::from_le_bytes))
    }

    /// Returns the digest of a list with one more element, of two words. The product of two secret words is as good as
    /// random (the folded multiplication of wyhash). Its sum with the state is mixed by steps that can be undone, so
    /// that two lists that once differ do so from then on.
    #[inline(always)]
    fn add(&self, state: u64, [one, other]: [u64; 2]) -> u64 {
        let product = u128::from(one ^ self.0[0]) * u128::from(other ^ self.0[1]);
        let mixed = (state ^ product as u64 ^ (product >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 29)
    }

    /// A hash of a list.
    pub(in crate::bootstrap) fn hash(&self, list: impl Iterator<Item = [u64; 2]>) -> u64 {
        list.fold(self.0[2], |state, member| self.add(state, member))
    }
}

impl Calls {
    pub(crate) fn new(keys: Keys) -> Calls {
        Calls { running: AtomicU64::new(keys.0[2]), keys, ring: Ring::default() }
    }

    pub(in crate::bootstrap) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// One more call: the library's algorithm and the message's own fields do not count. By one thread at a time.
    #[inline]
    pub(crate) fn push(&self, call: &Header) -> Digests {
        let kind = u64::from(call.root) << 32
            | u64::from_le_bytes([call.op, call.dtype, call.collective, call.compared_algorithm(), 0, 0, 0, 0]);
        let before = self.running.load(Ordering::Relaxed);
        let running = self.keys.add(before, [call.count, kind]);
        self.running.store(running, Ordering::Relaxed);
        let stamp = u64::from(call.seq) << 32 | u64::from(digest(running));
        self.ring.write(stamp, [call.count, kind], bytes(call));
        Digests { before: digest(before), stamp }
    }

    /// The call with this number waits.
    pub(crate) fn waits(&self, seq: u32) {
        self.ring.waits(seq);
    }

    /// The call with this number is over.
    #[inline]
    pub(crate) fn over(&self, seq: u32) {
        self.ring.over(seq);
    }

    /// The call with this number, if it is remembered.
    pub(crate) fn get(&self, seq: u32) -> Option<Made> {
        self.ring.get(seq).map(Made::from)
    }

    /// Returns the last calls, up to `most`, in order.
    pub(crate) fn last(&self, newest: u32, most: usize) -> Vec<Recorded> {
        self.ring.last(newest, most)
    }

    /// Returns the calls after number `after` that are compared, in order.
    pub(crate) fn since(&self, after: u32, newest: u32) -> Vec<Made> {
        let calls = self.last(newest, COMPARED).into_iter().map(Made::from);
        calls.filter(|call| is_later(call.seq(), after)).collect()
    }
}

/// The calls of a communicator as the ranks report them, by number: each that comes is compared with the one that is
/// there.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    slots: Vec<Option<(usize, Made)>>,
    found: bool,
}

impl Comparison {
    /// Takes in the calls that `rank` reports; returns the first difference, once.
    pub(crate) fn take(&mut self, rank: usize, calls: &[Made]) -> Option<([usize; 2], [Made; 2])> {
        self.slots.resize(COMPARED, None);
        for call in calls {
            let slot = &mut self.slots[call.seq() as usize % COMPARED];
            match slot {
                Some((other, theirs)) if theirs.seq() == call.seq() => {
                    if theirs != call && !std::mem::replace(&mut self.found, true) {
                        return Some(([*other, rank], [*theirs, *call]));
                    }
                }
                Some((_, newer)) if is_later(newer.seq(), call.seq()) => {}
                _ => *slot = Some((rank, *call)),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tinynccl_plan::wire::Collective;

    fn broadcast(seq: u32, root: u32) -> Header {
        Header { seq, root, count: 8, collective: Collective::Broadcast as u8, op: Header::NO_OP, ..Header::default() }
    }

    fn keys() -> Keys {
        Keys::of(&Secret::new([7; 32]), 0)
    }

    fn made(roots: impl IntoIterator<Item = u32>) -> (Calls, Vec<Digests>) {
        let calls = Calls::new(keys());
        let digests = roots.into_iter().zip(1..).map(|(root, seq)| calls.push(&broadcast(seq, root))).collect();
        (calls, digests)
    }

    #[test]
    fn calls_that_differed_once_differ_from_then_on() {
        let (ours, our_digests) = made([0; 300]);
        let (theirs, their_digests) = made((1..=300).map(|seq| u32::from(seq == 250)));
        for (seq, (a, b)) in (1..).zip(our_digests.iter().zip(&their_digests)) {
            assert_eq!((a.stamp == b.stamp, a.before == b.before), (seq < 250, seq <= 250), "call {seq}");
            assert_eq!(a.stamp >> 32, seq, "and the same call again has another digest");
            assert!(our_digests.iter().filter(|d| d.stamp as u32 == a.stamp as u32).count() == 1);
        }
        let [ours, theirs] = [ours, theirs].map(|calls| calls.since(0, 300));
        let [a, b] = first_difference(&ours, &theirs).unwrap();
        assert_eq!((a.header(7).to_string(), b.seq()), ("broadcast #250 of comm 7 (f32, count 8, root 0)".into(), 250));
        assert_eq!(b.header(7).root, 1);
        assert_eq!(first_difference(&ours, &ours), None);
    }

    #[test]
    fn the_last_calls_are_remembered_in_order() {
        let (calls, _) = made([3; 1000]);
        let seqs = |after| calls.since(after, 1000).iter().map(Made::seq).collect::<Vec<u32>>();
        assert_eq!(seqs(0), (1001 - COMPARED as u32..=1000).collect::<Vec<u32>>());
        assert_eq!(seqs(998), [999, 1000]);
        assert!(seqs(1000).is_empty() && Calls::new(keys()).since(0, 0).is_empty());
        // Numbers start again.
        let calls = Calls::new(keys());
        for seq in [u32::MAX - 1, u32::MAX, 0, 1] {
            calls.push(&broadcast(seq, 0));
        }
        let seqs = |after| calls.since(after, 1).iter().map(Made::seq).collect::<Vec<u32>>();
        assert_eq!(seqs(u32::MAX - 2), [u32::MAX - 1, u32::MAX, 0, 1]);
        assert_eq!(seqs(u32::MAX), [0, 1]);
    }

    #[test]
    fn any_field_counts_but_those_of_the_message() {
        let first = broadcast(1, 0);
        let stamp = |call: Header| Calls::new(keys()).push(&call).stamp;
        for other in [
            Header { count: 9, ..first },
            Header { root: 1, ..first },
            Header { dtype: 1, ..first },
            Header { op: 0, ..first },
            Header { collective: 6, ..first },
        ] {
            assert_ne!(stamp(other), stamp(first), "{other}");
        }
        assert_eq!(stamp(Header { algorithm: 3, len: 5, check: 9, comm: 4, ..first }), stamp(first));
    }

    #[test]
    fn what_ranks_tell_is_compared_call_by_call_and_a_difference_is_told_once() {
        let (ours, _) = made([0; 40]);
        let (theirs, _) = made((1..=40).map(|seq| u32::from(seq == 30)));
        let [ours, theirs] = [ours, theirs].map(|calls| calls.since(0, 40));
        let mut comparison = Comparison::default();
        let tell = |comparison: &mut Comparison, rank, calls: &[Made]| comparison.take(rank, calls);
        assert_eq!(tell(&mut comparison, 2, &ours), None);
        assert_eq!(tell(&mut comparison, 0, &theirs[..29]), None);
        let (ranks, calls) = tell(&mut comparison, 0, &theirs[29..]).unwrap();
        assert_eq!((ranks, calls[0].header(0).root, calls[1].header(0).root, calls[1].seq()), ([2, 0], 0, 1, 30));
        assert_eq!(tell(&mut comparison, 1, &theirs), None);
    }
}
