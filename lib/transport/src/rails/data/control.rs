//! Control frames: their kinds and contents, and the outbox of those that any free stream takes.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rails::data::frame::Frame;
use tinynccl_sys::threads::lock;

/// Kind of a control frame. Those from `Ack` to `Pong` are sent where several rails lead to the peer, the last ones
/// where fragments go by RDMA. There, `StreamFailed`, `Retire` and `RetireAck` are about queue pairs, too ([`queue`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(in crate::rails) enum Kind {
    /// The receiver has placed `number` bytes of this tag.
    WindowUpdate = 0x706c_6163,
    /// The receiver has read `number` fragments from the stream that this comes over.
    Ack = 0x7265_6164,
    /// The receiver can read nothing from this stream.
    StreamFailed = 0x6c6f_7374,
    /// The sender writes nothing to this stream any more.
    Retire = 0x6c65_6674,
    /// The reply to `Retire`: the receiver has read `number` fragments from it.
    RetireAck = 0x6167_7265,
    /// The sender has this stream, which replaces a lost one.
    Join = 0x6a6f_696e,
    /// Probe for the other end of a relayed stream, which answers `Pong`.
    Ping = 0x6173_6b64,
    /// The reply to `Ping`, over the same stream.
    Pong = 0x6865_7265,
    /// One end's queue pair beside a stream ([`QpInfo`]).
    QpInfo = 0x6361_7264,
    /// Clear to send (CTS): the memory to which the peer may write a message ([`Cts`]).
    Cts = 0x726f_6f6d,
    /// The sender has a message of `total` bytes which waits for its CTS frame.
    Rts = 0x7761_6974,
}

impl Kind {
    pub(super) const ALL: [Kind; 11] = {
        use Kind::{Ack, Cts, Join, Ping, Pong, QpInfo, Retire, RetireAck, Rts, StreamFailed, WindowUpdate};
        [WindowUpdate, Ack, StreamFailed, Retire, RetireAck, Join, Ping, Pong, QpInfo, Cts, Rts]
    };
}

/// Encodes queue pair `number` in a control frame's field for a stream's number.
pub(in crate::rails) fn queue(number: usize) -> i32 {
    -1 - number as i32
}

/// A queue pair, as the peer's must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) struct QpInfo {
    /// The stream beside which it is, on the same NIC pair.
    pub(in crate::rails) stream: usize,
    /// Its number among those of the connection.
    pub(in crate::rails) queue: u8,
    /// Queue pair number; 0 if this end has no queue pair.
    pub(in crate::rails) qpn: u32,
    pub(in crate::rails) psn: u32,
    /// `ibv_mtu` code of its port.
    pub(in crate::rails) mtu: u8,
    pub(in crate::rails) gid: [u8; 16],
}

/// Clear to send (CTS): memory of a posted receive for one queue pair, or for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rails) struct Cts {
    pub(in crate::rails) address: u64,
    pub(in crate::rails) bytes: u64,
    /// The number by which the receiver knows it.
    pub(in crate::rails) id: u16,
    /// The queue pair and the key for its device; `None`: the memory is not registered.
    pub(in crate::rails) key: Option<(u8, u32)>,
}

/// Queue pair number in a CTS frame that has no key.
const NO_QUEUE: u64 = 0xff;

impl Frame {
    /// A control frame about a tag, a stream or a queue pair.
    pub(in crate::rails) fn control(kind: Kind, about: i32, number: u64) -> Frame {
        Frame { kind: kind as u32, tag: about, number, total: 0, offset: 0, len: 0 }
    }

    pub(in crate::rails) fn qp_info(info: &QpInfo) -> Frame {
        let QpInfo { stream, queue, qpn, psn, mtu, gid } = *info;
        let number = u64::from(qpn & 0xff_ffff)
            | u64::from(psn & 0xff_ffff) << 24
            | u64::from(mtu) << 48
            | u64::from(queue) << 56;
        let gid = u128::from_le_bytes(gid);
        let (total, offset) = (gid as u64, (gid >> 64) as u64);
        Frame { total, offset, ..Frame::control(Kind::QpInfo, stream as i32, number) }
    }

    pub(in crate::rails) fn as_qp_info(&self) -> QpInfo {
        let part = |at: u32, bits: u32| (self.number >> at & ((1 << bits) - 1)) as u32;
        QpInfo {
            stream: self.stream(),
            queue: part(56, 8) as u8,
            qpn: part(0, 24),
            psn: part(24, 24),
            mtu: part(48, 8) as u8,
            gid: (u128::from(self.total) | u128::from(self.offset) << 64).to_le_bytes(),
        }
    }

    /// Clear to send (CTS) for the message `number` of a tag.
    pub(in crate::rails) fn cts(tag: i32, number: u64, cts: &Cts) -> Frame {
        let Cts { address, bytes, id, key } = *cts;
        let (queue, key) = key.map_or((NO_QUEUE, 0), |(queue, key)| (u64::from(queue), key));
        let len = u64::from(key) | u64::from(id) << 32 | queue << 48;
        Frame { total: bytes, offset: address, len, ..Frame::control(Kind::Cts, tag, number) }
    }

    pub(in crate::rails) fn as_cts(&self) -> Cts {
        let queue = self.len >> 48;
        let key = (queue < NO_QUEUE).then_some((queue as u8, self.len as u32));
        Cts { address: self.offset, bytes: self.total, id: (self.len >> 32) as u16, key }
    }

    /// Request for the CTS frame of a message of `total` bytes.
    pub(in crate::rails) fn rts(tag: i32, number: u64, total: usize) -> Frame {
        Frame { total: total as u64, ..Frame::control(Kind::Rts, tag, number) }
    }

    /// Kind of the control frame; `None` for the header of a fragment.
    pub(in crate::rails) fn kind(&self) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == self.kind)
    }

    /// The queue pair that the control frame is about, if it is about one.
    pub(in crate::rails) fn queue(&self) -> Option<usize> {
        usize::try_from(-1 - i64::from(self.tag)).ok()
    }

    /// The stream that the control frame is about; `usize::MAX` if it is about a queue pair.
    pub(in crate::rails) fn stream(&self) -> usize {
        usize::try_from(self.tag).unwrap_or(usize::MAX)
    }
}

/// Control frames, of which the last one goes first. `take` on an empty outbox does not lock.
#[derive(Debug, Default)]
pub(in crate::rails) struct Outbox {
    any: AtomicBool,
    frames: Mutex<Vec<Frame>>,
}

impl Outbox {
    pub(in crate::rails) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    pub(in crate::rails) fn put(&self, frames: impl IntoIterator<Item = Frame>) {
        lock(&self.frames).extend(frames);
        self.any.store(true, Ordering::Release);
    }

    pub(in crate::rails) fn take(&self) -> Option<Frame> {
        if self.is_empty() {
            return None;
        }
        let mut frames = lock(&self.frames);
        let frame = frames.pop();
        self.any.store(!frames.is_empty(), Ordering::Release);
        frame
    }
}
