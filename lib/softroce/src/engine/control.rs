//! Control messages of `sendmsg(2)`, which go with a datagram beside its bytes.

use std::net::SocketAddr;

use crate::path::Path;

/// The fields of IP headers that a path chooses. The ICRC covers neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Marks {
    /// IPv4 type of service, IPv6 traffic class.
    class: u8,
    /// IPv4 TTL, IPv6 hop limit; `None` is the system's.
    hops: Option<u8>,
}

impl Marks {
    pub(super) fn of(path: &Path) -> Marks {
        Marks { class: path.traffic_class, hops: Some(path.hop_limit).filter(|hops| *hops > 1) }
    }
}

/// One control message with up to 8 bytes, laid out as the system reads it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    header: libc::cmsghdr,
    value: [u8; 8],
}

const EMPTY: Message = Message { header: libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 }, value: [0; 8] };

/// The control messages of one datagram.
#[derive(Clone, Copy)]
pub(super) struct Control {
    messages: [Message; 3],
    count: usize,
}

impl Control {
    /// For a datagram to `dst`.
    pub(super) fn new(marks: Marks, dst: &SocketAddr) -> Control {
        let mut control = Control { messages: [EMPTY; 3], count: 0 };
        let (level, class, hops) = match dst {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
        };
        if marks.class != 0 {
            control.push(level, class, &i32::from(marks.class).to_ne_bytes());
        }
        if let Some(n) = marks.hops {
            control.push(level, hops, &i32::from(n).to_ne_bytes());
        }
        control
    }

    /// The datagram is cut into segments of `bytes`.
    pub(super) fn segments(&mut self, bytes: u16) {
        self.push(libc::SOL_UDP, libc::UDP_SEGMENT, &bytes.to_ne_bytes());
    }

    fn push(&mut self, level: i32, kind: i32, value: &[u8]) {
        let Some(message) = self.messages.get_mut(self.count) else { return };
        message.header.cmsg_len = (size_of::<libc::cmsghdr>() + value.len()) as _;
        (message.header.cmsg_level, message.header.cmsg_type) = (level, kind);
        for (place, byte) in message.value.iter_mut().zip(value) {
            *place = *byte;
        }
        self.count += 1;
    }

    /// Puts the messages into a header, which is valid for as long as they stay where they are.
    pub(super) fn attach(&mut self, header: &mut libc::msghdr) {
        if self.count > 0 {
            header.msg_control = self.messages.as_mut_ptr().cast();
            header.msg_controllen = (self.count * size_of::<Message>()) as _;
        }
    }
}
