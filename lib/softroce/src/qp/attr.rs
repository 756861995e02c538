//! States and attributes of queue pairs, and which change takes which attribute (InfiniBand specification, 10.3.1,
//! 11.2.5.2).
//!
//! Numbers are those of `ibv_qp_state` and `ibv_qp_attr_mask`.

use std::ops::{BitOr, BitOrAssign};

use crate::error::{Error, Result};
use crate::memory::Access;
use crate::path::Path;
use crate::wire::Service;

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Made, or set back.
    Reset = 0,
    /// Receives can be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send as well.
    Rts = 3,
    /// Send queue drained: what was begun is finished, nothing is begun.
    Sqd = 4,
    /// Send queue in error: an unreliable queue pair whose send failed still receives.
    Sqe = 5,
    /// In error: all that is posted is flushed.
    Err = 6,
}

/// Set of the attributes that a change sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttrMask(pub u32);

#[allow(missing_docs, reason = "each names the field of `QpAttr` that it stands for")]
impl AttrMask {
    pub const STATE: AttrMask = AttrMask(1);
    pub const CUR_STATE: AttrMask = AttrMask(1 << 1);
    pub const SQD_NOTIFY: AttrMask = AttrMask(1 << 2);
    pub const ACCESS: AttrMask = AttrMask(1 << 3);
    pub const PKEY_INDEX: AttrMask = AttrMask(1 << 4);
    pub const PORT: AttrMask = AttrMask(1 << 5);
    pub const QKEY: AttrMask = AttrMask(1 << 6);
    pub const PATH: AttrMask = AttrMask(1 << 7);
    pub const PATH_MTU: AttrMask = AttrMask(1 << 8);
    pub const TIMEOUT: AttrMask = AttrMask(1 << 9);
    pub const RETRY_CNT: AttrMask = AttrMask(1 << 10);
    pub const RNR_RETRY: AttrMask = AttrMask(1 << 11);
    pub const RQ_PSN: AttrMask = AttrMask(1 << 12);
    pub const MAX_RD_ATOMIC: AttrMask = AttrMask(1 << 13);
    pub const ALT_PATH: AttrMask = AttrMask(1 << 14);
    pub const MIN_RNR_TIMER: AttrMask = AttrMask(1 << 15);
    pub const SQ_PSN: AttrMask = AttrMask(1 << 16);
    pub const MAX_DEST_RD_ATOMIC: AttrMask = AttrMask(1 << 17);
    pub const PATH_MIG_STATE: AttrMask = AttrMask(1 << 18);
    pub const CAP: AttrMask = AttrMask(1 << 19);
    pub const DEST_QPN: AttrMask = AttrMask(1 << 20);

    /// Returns true if all of `other` are in this set.
    #[must_use]
    pub const fn contains(self, other: AttrMask) -> bool {
        self.0 & other.0 == other.0
    }
}

impl BitOr for AttrMask {
    type Output = AttrMask;

    fn bitor(self, other: AttrMask) -> AttrMask {
        AttrMask(self.0 | other.0)
    }
}

impl BitOrAssign for AttrMask {
    fn bitor_assign(&mut self, other: AttrMask) {
        self.0 |= other.0;
    }
}

/// Attributes of a queue pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QpAttr {
    /// State to go to; in a query, the state.
    pub state: State,
    /// The state in which the caller believes it to be.
    pub cur_state: State,
    /// True if SQD reports [`crate::EventKind::SqDrained`].
    pub sqd_notify: bool,
    /// Rights of peers: `REMOTE_WRITE`, `REMOTE_READ`, `REMOTE_ATOMIC`.
    pub access: Access,
    /// Index into the table of partition keys, which has one.
    pub pkey_index: u16,
    /// The port, which is 1.
    pub port: u8,
    /// Key that datagrams must bring.
    pub qkey: u32,
    /// The path to the peer; `None` before one is set.
    pub path: Option<Path>,
    /// Bytes of payload in a packet: 256, 512, 1024, 2048 or 4096.
    pub path_mtu: u32,
    /// Wait for an acknowledgement 4.096 µs times 2 to the power of this; 0 waits forever.
    pub timeout: u8,
    /// Repetitions without an acknowledgement, 0 to 7; 7 is forever, as rxe has it (the specification counts to 7).
    pub retry_cnt: u8,
    /// Repetitions when the peer has no receive posted, 0 to 7; 7 is forever (9.7.5.2.8).
    pub rnr_retry: u8,
    /// First packet sequence number from the peer.
    pub rq_psn: u32,
    /// First packet sequence number of ours.
    pub sq_psn: u32,
    /// READs and atomics that we have under way at most.
    pub max_rd_atomic: u8,
    /// READs and atomics that the peer may have under way.
    pub max_dest_rd_atomic: u8,
    /// Code of the wait that an RNR NAK asks of a peer when no receive is posted.
    pub min_rnr_timer: u8,
    /// The peer's queue pair.
    pub dest_qpn: u32,
}

impl Default for QpAttr {
    fn default() -> QpAttr {
        QpAttr {
            state: State::Reset,
            cur_state: State::Reset,
            sqd_notify: false,
            access: Access::default(),
            pkey_index: 0,
            port: 0,
            qkey: 0,
            path: None,
            path_mtu: 1024,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            rq_psn: 0,
            sq_psn: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            dest_qpn: 0,
        }
    }
}

/// The most READs and atomics under way that a queue pair takes, in either direction: as many as rxe.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Attributes that a change from one state to another must set, and those that it may; `None` where there is no such
/// change.
fn transition(service: Service, from: State, to: State) -> Option<(AttrMask, AttrMask)> {
    use AttrMask as M;
    use Service::{Rc, Uc, Ud};
    use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let none = AttrMask(0);
    let own = match service {
        Rc | Uc => M::ACCESS,
        Ud => M::QKEY,
    };
    let sets = match (from, to) {
        (_, Reset | Err) => (none, none),
        (Reset, Init) => (M::PKEY_INDEX | M::PORT | own, none),
        (Init, Init) => (none, M::PKEY_INDEX | M::PORT | own),
        (Init, Rtr) => {
            let connected = M::PATH | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
            let required = match service {
                Rc => connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
                Uc => connected,
                Ud => none,
            };
            (required, M::PKEY_INDEX | M::ALT_PATH | own)
        }
        (Rtr, Rts) => {
            let required = match service {
                Rc => M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_RD_ATOMIC,
                Uc | Ud => M::SQ_PSN,
            };
            (required, M::ALT_PATH | M::PATH_MIG_STATE | M::MIN_RNR_TIMER | own)
        }
        (Rts | Sqd, Rts) => (none, M::ALT_PATH | M::PATH_MIG_STATE | M::MIN_RNR_TIMER | own),
        (Sqe, Rts) if service != Rc => (none, own),
        (Rts, Sqd) => (none, M::SQD_NOTIFY),
        (Sqd, Sqd) => (
            none,
            M::PKEY_INDEX
                | M::PORT
                | M::PATH
                | M::TIMEOUT
                | M::RETRY_CNT
                | M::RNR_RETRY
                | M::MAX_RD_ATOMIC
                | M::MAX_DEST_RD_ATOMIC
                | M::MIN_RNR_TIMER
                | M::ALT_PATH
                | M::PATH_MIG_STATE
                | own,
        ),
        _ => return None,
    };
    Some((sets.0, sets.1 | M::STATE | M::CUR_STATE))
}

impl QpAttr {
    /// The attributes after a change of those in `mask`.
    ///
    /// # Errors
    /// `EINVAL` where the state has no such change, an attribute is missing, is not taken, or is out of its range.
    pub(crate) fn changed(&self, service: Service, new: &QpAttr, mask: AttrMask) -> Result<QpAttr> {
        use AttrMask as M;
        if mask.contains(M::CUR_STATE) && new.cur_state != self.state {
            return Err(Error::invalid(format!("the queue pair is in {:?}, not in {:?}", self.state, new.cur_state)));
        }
        let to = if mask.contains(M::STATE) { new.state } else { self.state };
        let Some((required, optional)) = transition(service, self.state, to) else {
            return Err(Error::invalid(format!("no change from {:?} to {to:?} for {service:?}", self.state)));
        };
        if !mask.contains(required) {
            let missing = required.0 & !mask.0;
            return Err(Error::invalid(format!(
                "{:?} to {to:?} needs the attributes of mask {missing:#x}",
                self.state
            )));
        }
        let extra = mask.0 & !(required | optional).0;
        if extra != 0 {
            return Err(Error::invalid(format!("{:?} to {to:?} takes no attributes of mask {extra:#x}", self.state)));
        }
        let mut next = QpAttr { state: to, cur_state: to, ..self.clone() };
        let has = |bit| mask.contains(bit);
        let check = |ok: bool, what: &'static str| if ok { Ok(()) } else { Err(Error::invalid(what)) };
        if has(M::SQD_NOTIFY) {
            next.sqd_notify = new.sqd_notify;
        }
        if has(M::ACCESS) {
            next.access = new.access;
        }
        if has(M::PKEY_INDEX) {
            check(new.pkey_index == 0, "the table of partition keys has one entry")?;
        }
        if has(M::PORT) {
            check(new.port == 1, "the device has port 1")?;
            next.port = 1;
        }
        if has(M::QKEY) {
            next.qkey = new.qkey;
        }
        if has(M::PATH) {
            check(new.path.is_some(), "a path without an address (RoCE needs is_global and a GID)")?;
            next.path = new.path;
        }
        if has(M::PATH_MTU) {
            check(
                matches!(new.path_mtu, 256 | 512 | 1024 | 2048 | 4096),
                "a path MTU is 256, 512, 1024, 2048 or 4096",
            )?;
            next.path_mtu = new.path_mtu;
        }
        if has(M::TIMEOUT) {
            check(new.timeout < 32, "a timeout has 5 bits")?;
            next.timeout = new.timeout;
        }
        if has(M::RETRY_CNT) {
            check(new.retry_cnt < 8, "a retry count has 3 bits")?;
            next.retry_cnt = new.retry_cnt;
        }
        if has(M::RNR_RETRY) {
            check(new.rnr_retry < 8, "an RNR retry count has 3 bits")?;
            next.rnr_retry = new.rnr_retry;
        }
        if has(M::RQ_PSN) {
            next.rq_psn = new.rq_psn & 0xff_ffff;
        }
        if has(M::SQ_PSN) {
            next.sq_psn = new.sq_psn & 0xff_ffff;
        }
        if has(M::MAX_RD_ATOMIC) {
            check(new.max_rd_atomic <= MAX_RD_ATOMIC, "more READs and atomics under way than the device has")?;
            next.max_rd_atomic = new.max_rd_atomic;
        }
        if has(M::MAX_DEST_RD_ATOMIC) {
            check(new.max_dest_rd_atomic <= MAX_RD_ATOMIC, "more READs and atomics of the peer than the device has")?;
            next.max_dest_rd_atomic = new.max_dest_rd_atomic;
        }
        if has(M::MIN_RNR_TIMER) {
            check(new.min_rnr_timer < 32, "an RNR timer has 5 bits")?;
            next.min_rnr_timer = new.min_rnr_timer;
        }
        if has(M::DEST_QPN) {
            check(new.dest_qpn < 1 << 24, "a queue pair's number has 24 bits")?;
            next.dest_qpn = new.dest_qpn;
        }
        Ok(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 7] = [State::Reset, State::Init, State::Rtr, State::Rts, State::Sqd, State::Sqe, State::Err];

    #[test]
    fn the_ways_between_states_are_those_of_the_specification() {
        use State::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        for service in [Service::Rc, Service::Uc, Service::Ud] {
            for from in STATES {
                for to in STATES {
                    let allowed = matches!(to, Reset | Err)
                        || matches!((from, to), (Reset | Init, Init) | (Init, Rtr) | (Rtr | Rts | Sqd, Rts))
                        || matches!((from, to), (Rts | Sqd, Sqd))
                        || (from == Sqe && to == Rts && service != Service::Rc);
                    assert_eq!(transition(service, from, to).is_some(), allowed, "{service:?} {from:?} {to:?}");
                }
            }
        }
    }

    #[test]
    fn attributes_are_asked_for_and_checked() {
        let reset = QpAttr::default();
        let init = QpAttr { state: State::Init, port: 1, ..QpAttr::default() };
        let mask = AttrMask::STATE | AttrMask::PKEY_INDEX | AttrMask::PORT;
        assert!(reset.changed(Service::Rc, &init, mask).is_err(), "rights are missing");
        let after = reset.changed(Service::Rc, &init, mask | AttrMask::ACCESS).expect("complete");
        assert_eq!((after.state, after.port), (State::Init, 1));
        assert!(reset.changed(Service::Rc, &init, mask | AttrMask::ACCESS | AttrMask::SQ_PSN).is_err());
        let wrong = QpAttr { port: 2, ..init };
        assert!(reset.changed(Service::Rc, &wrong, mask | AttrMask::ACCESS).is_err());
    }
}
