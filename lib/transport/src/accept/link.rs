//! The hello of a link between two ranks: which link it is, and its options, which both ends must have alike.

use std::fmt;

use super::handshake::{Hello, Purpose};
use crate::LinkOptions;

const VERBS: u32 = 2;

/// One connection of a link between two ranks.
#[derive(Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct LinkHello {
    /// Communicator id.
    pub(crate) comm: u32,
    /// The dialer's rank in the world.
    pub(crate) from: u32,
    /// The rank it wants.
    pub(crate) to: u32,
    /// Channel.
    pub(crate) channel: u32,
    /// The ranks at the ends of the link: `from` and `to`, unless relays are between them.
    pub(crate) origin: u32,
    pub(crate) target: u32,
    max_message: u32,
    depth: u32,
    flags: u32,
    /// TCP streams of the link, and which of them this connection is. Over RDMA: its queue pairs, and 0.
    streams: u32,
    stream: u32,
}

impl Purpose for LinkHello {
    const NUMBER: u32 = 1;
}

impl LinkHello {
    pub(crate) fn new(
        (from, to): (usize, usize),
        (comm, channel): (u32, u32),
        options: &LinkOptions,
        streams: usize,
    ) -> LinkHello {
        let (from, to) = (from as u32, to as u32);
        LinkHello {
            comm,
            from,
            to,
            channel,
            origin: from,
            target: to,
            max_message: options.max_message as u32,
            depth: options.depth as u32,
            flags: 0,
            streams: streams as u32,
            stream: 0,
        }
    }

    /// Returns this hello for one hop of a link between the ranks `origin` and `target`.
    pub(crate) fn on_the_way(self, origin: usize, target: usize) -> LinkHello {
        LinkHello { origin: origin as u32, target: target as u32, ..self }
    }

    /// Returns this hello for a link over RDMA, if `verbs`: this connection only makes the link.
    pub(crate) fn over_verbs(self, verbs: bool) -> LinkHello {
        LinkHello { flags: self.flags & !VERBS | if verbs { VERBS } else { 0 }, ..self }
    }

    /// Returns this hello for stream `stream` of the link.
    pub(crate) fn of_stream(self, stream: usize) -> LinkHello {
        LinkHello { stream: stream as u32, ..self }
    }

    /// Returns the link in a hello to rank `rank`, or why there is none.
    pub(crate) fn of(hello: &Hello, rank: usize) -> Result<LinkHello, String> {
        let link: Option<LinkHello> = hello.purpose().filter(|_| hello.attached() == 0);
        let link = link.ok_or_else(|| "expected a connection for a link between ranks".to_owned())?;
        let LinkHello { from, to, origin, target, .. } = link;
        if to as usize != rank {
            return Err(format!("expected a connection to rank {rank}, got one to rank {to}"));
        }
        if origin == target || origin == to || target == from {
            return Err(format!(
                "expected a link that passes from rank {from} to rank {to}, got one from rank {origin} to rank {target}"
            ));
        }
        Ok(link)
    }

    /// Why the link that the dialer wants is not the one we want, if so.
    pub(crate) fn differs(&self, options: &LinkOptions, streams: usize, verbs: bool) -> Option<String> {
        let theirs = (self.options(), self.streams(), self.flags & VERBS != 0);
        let ours = (*options, streams, verbs);
        let say = |(LinkOptions { max_message: m, depth: d }, s, v): (LinkOptions, usize, bool)| {
            let v = if v { "RDMA queue pairs" } else { "TCP streams" };
            format!("messages of {m} bytes, depth {d}, {v} {s}")
        };
        (theirs != ours).then(|| {
            let (from, to) = (self.from, self.to);
            let (theirs, ours) = (say(theirs), say(ours));
            format!("rank {to} wants {ours}, rank {from} wants {theirs}; give all ranks the same configuration")
        })
    }

    /// Options that both ends of the link have agreed on, if they have: for a relay, which takes what they want.
    pub(crate) fn options(&self) -> LinkOptions {
        LinkOptions { max_message: self.max_message as usize, depth: self.depth as usize }
    }

    /// Streams of the link if it goes over TCP, queue pairs if it goes over RDMA.
    pub(crate) fn streams(&self) -> usize {
        self.streams as usize
    }

    /// Index of this connection among the link's TCP streams; 0 over RDMA.
    pub(crate) fn stream(&self) -> usize {
        self.stream as usize
    }
}

impl fmt::Debug for LinkHello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LinkHello { comm, origin, target, channel, .. } = self;
        write!(f, "Link[comm {comm}, rank {origin} to {target}, channel {channel}]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accept::handshake::Caller;
    use proptest::prelude::*;
    use tinynccl_sys::secret::Secret;

    const OPTIONS: LinkOptions = LinkOptions { max_message: 4096, depth: 4 };

    fn hello() -> LinkHello {
        LinkHello::new((1, 2), (3, 4), &OPTIONS, 1)
    }

    /// Returns what rank `rank` reads.
    fn parse(link: LinkHello, rank: usize, attached: &[u8]) -> Result<LinkHello, String> {
        LinkHello::of(&Caller::new(&link, Secret::new([0; 32]), attached).hello, rank)
    }

    #[test]
    fn a_link_is_taken_only_with_our_rank_and_without_an_attachment() {
        assert_eq!(parse(hello(), 2, &[]), Ok(hello()));
        assert!(parse(hello(), 3, &[]).unwrap_err().contains("rank 3"));
        assert!(parse(hello(), 2, b"x").unwrap_err().contains("between ranks"));
    }

    #[test]
    fn a_hop_of_a_relayed_link_names_its_ends() {
        for (origin, target) in [(1, 2), (1, 5), (0, 2), (0, 5)] {
            let hello = hello().on_the_way(origin, target);
            assert_eq!(parse(hello, 2, &[]), Ok(hello));
            assert_eq!(hello.options(), OPTIONS);
        }
        for (origin, target) in [(2, 5), (0, 1), (3, 3)] {
            let reason = parse(hello().on_the_way(origin, target), 2, &[]).unwrap_err();
            assert!(reason.contains("passes from rank 1 to rank 2"), "{reason}");
        }
    }

    #[test]
    fn different_options_are_told_from_both_sides() {
        assert_eq!(hello().differs(&OPTIONS, 1, false), None);
        let text = hello().differs(&LinkOptions { depth: 8, ..OPTIONS }, 4, false).unwrap();
        assert!(text.contains("rank 2 wants messages of 4096 bytes, depth 8, TCP streams 4"), "{text}");
        assert!(text.contains("rank 1 wants messages of 4096 bytes, depth 4, TCP streams 1"), "{text}");
        let rdma = hello().over_verbs(true);
        assert_eq!(rdma.differs(&OPTIONS, 1, true), None);
        let text = rdma.differs(&OPTIONS, 2, true).unwrap();
        assert!(text.contains("rank 2 wants") && text.contains("RDMA queue pairs 2, rank 1 wants"), "{text}");
        assert!(text.contains("RDMA queue pairs 1;"), "{text}");
        let text = rdma.differs(&OPTIONS, 1, false).unwrap();
        assert!(text.contains("TCP streams 1, rank 1") && text.contains("RDMA queue pairs 1;"), "{text}");
    }

    proptest! {
        #[test]
        fn any_link_goes_there_and_back(
            (from, to) in any::<(u32, u32)>().prop_filter("not itself", |(a, b)| a != b),
            link in any::<(u32, u32)>(),
            max_message in 1..=LinkOptions::MAX_MESSAGE, depth in 1..=LinkOptions::MAX_DEPTH, streams in 1usize..=16,
        ) {
            let options = LinkOptions { max_message, depth };
            let hello = LinkHello::new((from as usize, to as usize), link, &options, streams);
            let parsed = parse(hello, to as usize, &[]).unwrap();
            prop_assert_eq!(parsed, hello);
            prop_assert_eq!((parsed.from, parsed.to, (parsed.comm, parsed.channel)), (from, to, link));
            prop_assert_eq!(parsed.options(), options);
            prop_assert_eq!(parsed.differs(&options, streams, false), None);
            prop_assert!(parsed.differs(&options, streams + 1, false).is_some());
        }
    }
}
