//! Messages between the store and the ranks, after the hello: JSON, one value per frame.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bootstrap::ledger::calls::{Disagreement, Made};
use crate::bootstrap::ledger::progress::{Health, Snapshot};

/// From a rank to the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToStore {
    /// Answer to [`ToRank::Challenge`]: that we know the job's secret, too.
    Proof { proof: Bytes },
    /// Answer to [`ToRank::Challenge`] of a rank that is a member and comes again, over another stream: it knows the
    /// secret of the links. Its tries are numbered, since an earlier one may arrive later.
    Resume {
        proof: Bytes,
        #[serde(default)]
        number: u64,
    },
    /// Acknowledges `bytes` bytes of the store's, counted since the connection began.
    Took { bytes: u64 },
    /// First message of a rank that is welcome: its endpoints, opaque to the store.
    Register { info: Value },
    /// Heartbeat: the progress of every communicator that the rank tracks, and its calls since the last one, by the
    /// communicator's number.
    Beat { progress: Vec<(u32, Snapshot)>, calls: Vec<(u32, Vec<Made>)> },
    /// This rank's part of an exchange among `members`.
    Put { key: String, members: Vec<usize>, value: Bytes },
    /// The rank no longer waits for this exchange.
    GiveUp { key: String, waited: Duration },
    /// Requests the health of every rank.
    Health { ticket: u64, comm: u32 },
    /// Aborts a communicator; the store forwards it to every other rank.
    Abort { comm: u32, reason: String },
    /// The rank makes no more calls and is to be taken for gone, but still receives events of the others: it relays
    /// between them.
    Leave,
    /// Goodbye: the connection will close and nothing is wrong. `reason` says why, if the job had not formed yet.
    Bye { reason: String },
}

/// From the store to a rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToRank {
    /// The client is rejected; `again` when the cause may be a job that is just ending.
    Rejected { reason: String, again: bool },
    /// Answer to the hello: the store's nonce, and its proof that it knows the job's secret. To a client that encrypts
    /// also the second message of that handshake; all after it is sealed.
    Challenge {
        nonce: Bytes,
        proof: Bytes,
        #[serde(default, skip_serializing_if = "Bytes::is_empty")]
        seal: Bytes,
    },
    /// The client's proof was right: register now. (A client that has not received this may go elsewhere without a
    /// trace.)
    /// `generation` is drawn by every store anew: the secret of the data links comes from it and the job's. The store
    /// can be reached at `addresses`, as far as it knows.
    Welcome { generation: Bytes, addresses: Vec<SocketAddr> },
    /// Answer to [`ToStore::Resume`]: the store has taken `bytes` bytes and goes on here from the next one on, once it
    /// receives [`ToStore::Took`].
    Resumed { bytes: u64 },
    /// Acknowledges `bytes` bytes of the rank's, counted since the connection began.
    Took { bytes: u64 },
    /// Registered; these ranks have not come yet. `notes`: clients that were refused and look like ours.
    Waiting {
        missing: Vec<usize>,
        notes: Vec<String>,
        /// The rank with which the store ends, where it is known.
        host: Option<usize>,
    },
    /// The job will not form.
    NotFormed { missing: Vec<usize>, reason: String },
    /// All ranks are here: their endpoints by rank.
    Table { infos: Vec<Value> },
    /// An exchange is complete: the values in the order of its members.
    Values { key: String, values: Vec<Bytes> },
    /// An exchange will not complete.
    ExchangeFailed {
        key: String,
        #[serde(flatten)]
        failure: Failure,
    },
    /// Answer to [`ToStore::Health`], by rank.
    Health { ticket: u64, ranks: Vec<Health> },
    /// A rank's connection closed without a goodbye.
    Lost { rank: usize, detail: String },
    /// A rank said goodbye.
    Left { rank: usize },
    /// A rank aborts a communicator.
    Abort { from: usize, comm: u32, reason: String },
    /// Two ranks make different calls.
    Disagree(Disagreement),
    /// The store ends in good order.
    Closing,
}

/// Cause of an exchange's failure, and the members without which it fails.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) missing: Vec<usize>,
    pub(crate) cause: Cause,
    pub(crate) reason: String,
}

/// The kinds of failures of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Cause {
    /// A rank waited long enough.
    Timeout,
    /// A member has left or is lost.
    Gone,
    /// The ranks name different members.
    Mismatch,
}

/// Bytes that travel as hexadecimal text inside JSON.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Bytes(pub(crate) Vec<u8>);

impl Bytes {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = from_hex(&String::deserialize(deserializer)?);
        bytes.map(Bytes).ok_or_else(|| serde::de::Error::custom("expected pairs of hexadecimal digits"))
    }
}

/// Two hexadecimal digits per byte.
pub(in crate::bootstrap) fn hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digits = |b: &u8| [DIGITS[usize::from(b >> 4)], DIGITS[usize::from(b & 15)]];
    bytes.iter().flat_map(digits).map(char::from).collect()
}

/// The reverse.
pub(in crate::bootstrap) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let digit = |b: u8| char::from(b).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| Some((digit(*high)? << 4 | digit(*low)?) as u8);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_go_there_and_back(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let text = serde_json::to_string(&Bytes(bytes.clone())).unwrap();
            prop_assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap(), Bytes(bytes));
        }
    }

    #[test]
    fn bad_hexadecimal_is_an_error() {
        for text in ["\"0\"", "\"0g\"", "\"é0\"", "7"] {
            assert!(serde_json::from_str::<Bytes>(text).is_err(), "{text}");
        }
    }
}
