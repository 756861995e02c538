//! The first bytes on a connection: who dials whom for which link, the proofs of both, and the answer.
//!
//! ```text
//!   dialer                                     acceptor
//!   hello: ranks, communicator, channel,
//!          options, nonce                  ─▶
//!                                          ◀─  reply "prove": nonce, proof over hello and nonce
//!   proof over hello and nonce             ─▶
//!                                          ◀─  reply: welcome, or why not
//! ```
//! The key of the proofs belongs to one start of the job ([`Session::secret`](crate::bootstrap::Session::secret)). So a
//! rank of another job, or of an older start, does not get in, nor do bytes that were recorded on another connection;
//! and the dialer sends nothing but its hello, and hands over no memory, before the acceptor has proven itself.

use std::fmt;

use crate::error::Result as OurResult;
use crate::secret::{self, Nonce, Proof, Secret};
use crate::transport::LinkOptions;

const MAGIC: [u8; 8] = *b"tinynccl";
/// Version of the handshake and of the layout of messages and shared memory.
const VERSION: u32 = 7;
/// Longest reason in a refusal, in bytes.
const MAX_DETAIL: usize = 512;

const CHECKSUM: u32 = 1;
const VERBS: u32 = 2;

/// Status of the reply that asks for a proof.
const PROVE: u32 = 4;

/// First message of a dialer. 80 bytes, little endian.
#[derive(Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Hello {
    magic: [u8; 8],
    /// Drawn for this connection.
    nonce: Nonce,
    max_message: u64,
    depth: u64,
    version: u32,
    /// Communicator id.
    pub(crate) comm: u32,
    /// The dialer's rank in the world.
    pub(crate) from: u32,
    /// The rank it wants.
    pub(crate) to: u32,
    /// Channel.
    pub(crate) channel: u32,
    flags: u32,
    /// TCP streams of the link, and which of them this connection is. Over RDMA: its queue pairs, and 0.
    streams: u32,
    stream: u32,
    /// The ranks at the ends of the link: `from` and `to`, unless relays are between them.
    pub(crate) origin: u32,
    pub(crate) target: u32,
}

impl Hello {
    /// Bytes on the wire.
    pub(crate) const BYTES: usize = size_of::<Hello>();

    /// Makes a hello whose nonce is zero: see [`Caller::fresh`].
    pub(crate) fn new(
        (from, to): (usize, usize),
        (comm, channel): (u32, u32),
        options: &LinkOptions,
        checksum: bool,
        streams: usize,
    ) -> Hello {
        Hello {
            magic: MAGIC,
            nonce: [0; 16],
            max_message: options.max_message as u64,
            depth: options.depth as u64,
            version: VERSION,
            comm,
            from: from as u32,
            to: to as u32,
            channel,
            flags: if checksum { CHECKSUM } else { 0 },
            streams: streams as u32,
            stream: 0,
            origin: from as u32,
            target: to as u32,
        }
    }

    /// Returns this hello for one hop of a link between the ranks `origin` and `target`.
    pub(crate) fn on_the_way(self, origin: usize, target: usize) -> Hello {
        Hello { origin: origin as u32, target: target as u32, ..self }
    }

    /// Returns this hello for a link over RDMA, if `verbs`: this connection only makes the link.
    pub(crate) fn over_verbs(self, verbs: bool) -> Hello {
        Hello { flags: self.flags & !VERBS | if verbs { VERBS } else { 0 }, ..self }
    }

    /// Parses a hello to rank `rank`. `Err(None)`: it is not of our protocol and gets no reply; `Err(Some(reason))`: it
    /// gets `reason` as the reply.
    pub(crate) fn parse(bytes: &[u8], rank: usize) -> Result<Hello, Option<String>> {
        let hello: Hello = bytemuck::try_pod_read_unaligned(bytes).map_err(|_| None)?;
        if hello.magic != MAGIC {
            return Err(None);
        }
        if hello.version != VERSION {
            let theirs = hello.version;
            return Err(Some(format!(
                "expected protocol version {VERSION}, got {theirs}; run the same build on all ranks"
            )));
        }
        if hello.to as usize != rank {
            return Err(Some(format!("expected a connection to rank {rank}, got one to rank {}", hello.to)));
        }
        let Hello { from, to, origin, target, .. } = hello;
        if origin == target || origin == to || target == from {
            return Err(Some(format!(
                "expected a link that passes from rank {from} to rank {to}, got one from rank {origin} to rank {target}"
            )));
        }
        Ok(hello)
    }

    /// Why the link that the dialer wants is not the one we want, if so.
    pub(crate) fn differs(&self, options: &LinkOptions, checksum: bool, streams: usize, verbs: bool) -> Option<String> {
        let theirs = (self.max_message, self.depth, self.flags & CHECKSUM != 0, self.streams, self.flags & VERBS != 0);
        let ours = (options.max_message as u64, options.depth as u64, checksum, streams as u32, verbs);
        let say = |(m, d, c, s, v): (u64, u64, bool, u32, bool)| {
            let (c, v) = (if c { "on" } else { "off" }, if v { "RDMA queue pairs" } else { "TCP streams" });
            format!("messages of {m} bytes, depth {d}, checksums {c}, {v} {s}")
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

    /// Returns true if the ends check every message.
    pub(crate) fn checksum(&self) -> bool {
        self.flags & CHECKSUM != 0
    }

    /// Streams of the link if it goes over TCP, queue pairs if it goes over RDMA.
    pub(crate) fn streams(&self) -> usize {
        self.streams as usize
    }

    /// Index of this connection among the link's TCP streams; 0 over RDMA.
    pub(crate) fn stream(&self) -> usize {
        self.stream as usize
    }

    /// Returns this hello for stream `stream` of the link.
    pub(crate) fn of_stream(&self, stream: usize) -> Hello {
        Hello { stream: stream as u32, ..*self }
    }
}

impl fmt::Debug for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hello { comm, origin, target, channel, .. } = self;
        write!(f, "Hello[comm {comm}, rank {origin} to {target}, channel {channel}]")
    }
}

/// A dialer: its hello, and the secret that it shares with the acceptor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    pub(crate) hello: Hello,
    pub(crate) secret: Secret,
}

impl Caller {
    /// Returns this caller with a fresh nonce, for another connection.
    pub(crate) fn fresh(&self) -> OurResult<Caller> {
        Ok(Caller { hello: Hello { nonce: secret::random()?, ..self.hello }, ..*self })
    }

    /// Returns the dialer's proof, if the acceptor has proven that it knows the secret.
    pub(crate) fn answer(&self, challenge: &Challenge) -> Result<Proof, String> {
        let parts: [&[u8]; 2] = [bytemuck::bytes_of(&self.hello), &challenge.nonce];
        match self.secret.accepts(&challenge.proof, ACCEPTOR, &parts) {
            true => Ok(self.secret.prove(DIALER, &parts)),
            false => Err(format!("{WRONG_SECRET}: it belongs to another job, or to another start of this one")),
        }
    }
}

/// The acceptor's challenge to a dialer, with its own proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Challenge {
    nonce: Nonce,
    proof: Proof,
}

const ACCEPTOR: &str = "acceptor";
const DIALER: &str = "dialer";

impl Challenge {
    /// The acceptor's answer to a hello.
    pub(crate) fn to(hello: &Hello, secret: &Secret) -> OurResult<Challenge> {
        let nonce = secret::random()?;
        Ok(Challenge { nonce, proof: secret.prove(ACCEPTOR, &[bytemuck::bytes_of(hello), &nonce]) })
    }

    /// Returns true if `proof` shows that the dialer of `hello` knows the secret.
    pub(crate) fn is_met(&self, hello: &Hello, secret: &Secret, proof: &Proof) -> bool {
        secret.accepts(proof, DIALER, &[bytemuck::bytes_of(hello), &self.nonce])
    }
}

/// Reason for which one side rejects the other.
pub(crate) const WRONG_SECRET: &str = "it does not know this job's secret";

/// Reply of an acceptor to a dialer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The acceptor requests a proof first, and sends its own.
    Prove(Challenge),
    /// The link stands.
    Welcome,
    /// It does not, and will not: the ranks want different links.
    Refused(String),
    /// The process that answers is not the one meant, or this connection does not work out: another address may be
    /// right.
    Stranger(String),
}

#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct ReplyHead {
    magic: [u8; 8],
    status: u32,
    detail: u32,
}

impl Reply {
    /// Bytes before the reason.
    pub(crate) const HEAD: usize = size_of::<ReplyHead>();
    /// Largest reply.
    pub(crate) const MAX: usize = Self::HEAD + MAX_DETAIL;

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (status, detail) = match self {
            Reply::Welcome => (0, &[][..]),
            Reply::Refused(detail) => (1, cut(detail, MAX_DETAIL).as_bytes()),
            Reply::Stranger(detail) => (3, cut(detail, MAX_DETAIL).as_bytes()),
            Reply::Prove(challenge) => (PROVE, bytemuck::bytes_of(challenge)),
        };
        let head = ReplyHead { magic: MAGIC, status, detail: detail.len() as u32 };
        [bytemuck::bytes_of(&head), detail].concat()
    }

    /// Length of the reason that follows a head.
    pub(crate) fn detail_len(head: &[u8]) -> Result<usize, String> {
        let head: ReplyHead = bytemuck::try_pod_read_unaligned(head).map_err(|e| e.to_string())?;
        if head.magic != MAGIC || head.status > PROVE || head.detail as usize > MAX_DETAIL {
            return Err(format!("expected a tinynccl reply, got {:02x?}", bytemuck::bytes_of(&head)));
        }
        Ok(head.detail as usize)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Reply, String> {
        let (head, detail) =
            bytes.split_at_checked(Self::HEAD).ok_or_else(|| format!("expected a reply, got {} bytes", bytes.len()))?;
        if Self::detail_len(head)? != detail.len() {
            return Err(format!("expected a reply with its reason, got {} bytes", bytes.len()));
        }
        let head: ReplyHead = bytemuck::try_pod_read_unaligned(head).map_err(|e| e.to_string())?;
        if head.status == PROVE {
            let challenge = bytemuck::try_pod_read_unaligned(detail);
            return challenge
                .map(Reply::Prove)
                .map_err(|_| format!("expected a challenge, got {} bytes", detail.len()));
        }
        let detail = String::from_utf8_lossy(detail).into_owned();
        Ok(match head.status {
            0 => Reply::Welcome,
            1 => Reply::Refused(detail),
            _ => Reply::Stranger(detail),
        })
    }
}

/// A text, up to the last whole character within `most` bytes.
pub(in crate::transport) fn cut(text: &str, most: usize) -> &str {
    let fits = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..fits.unwrap_or(0)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OPTIONS: LinkOptions = LinkOptions { max_message: 4096, depth: 4 };

    fn hello() -> Hello {
        Hello::new((1, 2), (3, 4), &OPTIONS, false, 1)
    }

    #[test]
    fn a_hello_is_taken_only_with_our_version_and_rank() {
        let bytes = bytemuck::bytes_of(&hello()).to_vec();
        assert_eq!(Hello::parse(&bytes, 2), Ok(hello()));
        assert!(Hello::parse(&bytes, 3).unwrap_err().unwrap().contains("rank 3"));
        let old = Hello { version: 0, ..hello() };
        assert!(
            Hello::parse(bytemuck::bytes_of(&old), 2)
                .unwrap_err()
                .unwrap()
                .contains(&format!("version {VERSION}, got 0"))
        );
        let other = Hello { magic: *b"GET / HT", ..hello() };
        assert_eq!(Hello::parse(bytemuck::bytes_of(&other), 2), Err(None));
        assert_eq!(Hello::parse(&bytes[1..], 2), Err(None));
    }

    #[test]
    fn both_ends_prove_for_one_connection_and_one_link() {
        let (ours, theirs) = (Secret::new([1; 32]), Secret::new([2; 32]));
        let caller = Caller { hello: hello(), secret: ours }.fresh().unwrap();
        let hello = caller.hello;
        let challenge = Challenge::to(&hello, &ours).unwrap();
        let proof = caller.answer(&challenge).unwrap();
        assert!(challenge.is_met(&hello, &ours, &proof));
        // A replay gets another nonce; the acceptor's own proof is no dialer's; an unauthenticated client has none.
        assert!(!Challenge::to(&hello, &ours).unwrap().is_met(&hello, &ours, &proof));
        assert!(!challenge.is_met(&hello, &ours, &challenge.proof));
        let forged = Challenge { nonce: challenge.nonce, proof: theirs.prove(ACCEPTOR, &[b"hello"]) };
        assert!(caller.answer(&forged).unwrap_err().contains("secret"));
        assert!(!challenge.is_met(&hello, &theirs, &proof));
        // Every byte of the hello is covered.
        for at in 0..Hello::BYTES {
            let mut bytes = bytemuck::bytes_of(&hello).to_vec();
            bytes[at] ^= 1;
            let other: Hello = bytemuck::pod_read_unaligned(&bytes);
            assert!(!challenge.is_met(&other, &ours, &proof), "byte {at}");
            assert!(Caller { hello: other, ..caller }.answer(&challenge).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_hop_of_a_relayed_link_names_its_ends() {
        let parse = |hello: Hello| Hello::parse(bytemuck::bytes_of(&hello), 2);
        for (origin, target) in [(1, 2), (1, 5), (0, 2), (0, 5)] {
            let hello = hello().on_the_way(origin, target);
            assert_eq!(parse(hello), Ok(hello));
            assert_eq!((hello.options(), hello.checksum()), (OPTIONS, false));
        }
        for (origin, target) in [(2, 5), (0, 1), (3, 3)] {
            let reason = parse(hello().on_the_way(origin, target)).unwrap_err().unwrap();
            assert!(reason.contains("passes from rank 1 to rank 2"), "{reason}");
        }
    }

    #[test]
    fn different_options_are_told_from_both_sides() {
        assert_eq!(hello().differs(&OPTIONS, false, 1, false), None);
        let text = hello().differs(&LinkOptions { depth: 8, ..OPTIONS }, true, 4, false).unwrap();
        assert!(text.contains("rank 2 wants messages of 4096 bytes, depth 8, checksums on, TCP streams 4"), "{text}");
        assert!(text.contains("rank 1 wants messages of 4096 bytes, depth 4, checksums off, TCP streams 1"), "{text}");
        let rdma = hello().over_verbs(true);
        assert_eq!(rdma.differs(&OPTIONS, false, 1, true), None);
        let text = rdma.differs(&OPTIONS, false, 2, true).unwrap();
        assert!(text.contains("rank 2 wants") && text.contains("RDMA queue pairs 2, rank 1 wants"), "{text}");
        assert!(text.contains("RDMA queue pairs 1;"), "{text}");
        let text = rdma.differs(&OPTIONS, false, 1, false).unwrap();
        assert!(text.contains("TCP streams 1, rank 1") && text.contains("RDMA queue pairs 1;"), "{text}");
    }

    #[test]
    fn replies_round_trip_and_long_reasons_are_cut() {
        for reply in [
            Reply::Welcome,
            Reply::Refused("no".to_owned()),
            Reply::Refused("größer".to_owned()),
            Reply::Stranger(String::new()),
            Reply::Prove(Challenge { nonce: [1; 16], proof: [2; 32] }),
        ] {
            assert_eq!(Reply::parse(&reply.to_bytes()), Ok(reply));
        }
        assert!(Reply::Refused("ü".repeat(1000)).to_bytes().len() <= Reply::MAX);
    }

    proptest! {
        #[test]
        fn any_hello_goes_there_and_back(
            (from, to) in any::<(u32, u32)>().prop_filter("not itself", |(a, b)| a != b),
            link in any::<(u32, u32)>(), checksum: bool,
            max_message in 1..=LinkOptions::MAX_MESSAGE, depth in 1..=LinkOptions::MAX_DEPTH, streams in 1usize..=16,
        ) {
            let options = LinkOptions { max_message, depth };
            let hello = Hello::new((from as usize, to as usize), link, &options, checksum, streams);
            let hello = Caller { hello, secret: Secret::new([0; 32]) }.fresh().unwrap().hello;
            let parsed = Hello::parse(bytemuck::bytes_of(&hello), to as usize).unwrap();
            prop_assert_eq!(parsed, hello);
            prop_assert_eq!((parsed.from, parsed.to, (parsed.comm, parsed.channel)), (from, to, link));
            prop_assert_eq!(parsed.differs(&options, checksum, streams, false), None);
            prop_assert!(parsed.differs(&options, !checksum, streams, false).is_some());
        }

        #[test]
        fn any_reply_comes_back_with_its_reason(reason in "\\PC{0,300}", stranger: bool) {
            let reply = if stranger { Reply::Stranger(reason.clone()) } else { Reply::Refused(reason.clone()) };
            let parsed = Reply::parse(&reply.to_bytes()).unwrap();
            let (Reply::Refused(text) | Reply::Stranger(text)) = &parsed else { panic!("{parsed:?}") };
            prop_assert!(reason.starts_with(text.as_str()) && text.len() + 4 > reason.len().min(MAX_DETAIL));
            prop_assert_eq!(parsed == reply, reason.len() <= MAX_DETAIL);
        }

        #[test]
        fn no_bytes_make_the_parsers_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0usize..80) {
            let _ = Hello::parse(&bytes, 0);
            let _ = Reply::parse(&bytes);
            let mut damaged = Reply::Refused("reason".to_owned()).to_bytes();
            if let (Some(b), Some(x)) = (damaged.get_mut(at), bytes.first()) {
                *b = *x;
            }
            let _ = Reply::parse(&damaged);
            damaged.truncate(at);
            let _ = Reply::parse(&damaged);
        }
    }
}
