//! The first bytes on a connection: its purpose, the proofs of both ends, and the answer.
//!
//! ```text
//!   dialer                                     acceptor
//!   hello: purpose, nonce [, psk, e]       ─▶
//!                                          ◀─  reply "prove": nonce, proof over hello and nonce [, e, ee]
//!   proof over hello and nonce,
//!   attachment, if the hello names one     ─▶
//!                                          ◀─  reply: welcome, or why not
//! ```
//! In brackets is the handshake of an encrypted connection ([`seal`](crate::seal)). Its hash is in the proofs;
//! the dialer's proof and all that follows is sealed already. A hello says whether its dialer encrypts: two ends of
//! which only one does are told so, in clear text.
//!
//! Links between ranks ([`LinkHello`](super::link::LinkHello)), messages between them (`endpoint::mail`), newcomers
//! (`endpoint::newcomer`) and connections over rails (`rails::connect`) have purposes of their own; everything else is
//! the same. The key of a link's proofs belongs to one start of the job
//! ([`Session::secret`](crate::bootstrap::Session::secret)). So a rank of another job, or of an older start, does not
//! get in, nor do bytes that were recorded on another connection; and the dialer sends nothing but its hello, and hands
//! over no memory, before the acceptor has proven itself.

use crate::seal::MESSAGE;
use tinynccl_plan::error::Result as OurResult;
use tinynccl_sys::secret::{self, Nonce, Proof, Secret};

const MAGIC: [u8; 8] = *b"tinynccl";
/// Version of the handshake and of the layout of messages and shared memory.
const VERSION: u16 = 10;
/// Flag of a hello: this connection is encrypted.
const SEALED: u16 = 1;
/// Longest reason in a refusal, in bytes.
const MAX_DETAIL: usize = 512;
/// Longest attachment in bytes: a new connection has buffer space for it.
pub(crate) const MAX_ATTACHED: usize = 8 << 10;

/// Status of the reply that asks for a proof.
const PROVE: u32 = 4;

/// Reason for a connection, which the dialer puts into its hello: at most [`BODY`] words.
pub(crate) trait Purpose: bytemuck::Pod {
    /// Number on the wire: 1 link, 2 stream over rails, 3 relayed stream, 4 report of a failure, 5 message between
    /// ranks, 6 newcomer.
    const NUMBER: u32;
    /// False if the connection stays in clear text where its ends encrypt.
    const SEALABLE: bool = true;
}

/// Words of a hello for its purpose.
const BODY: usize = 11;

/// First message of a dialer. 80 bytes, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(crate) struct Hello {
    magic: [u8; 8],
    /// Drawn for this connection.
    nonce: Nonce,
    version: u16,
    flags: u16,
    /// [`Purpose::NUMBER`] of the purpose in `body`.
    purpose: u32,
    /// Bytes that follow the dialer's proof.
    attached: u32,
    body: [u32; BODY],
}

impl Hello {
    /// Bytes on the wire.
    pub(crate) const BYTES: usize = size_of::<Hello>();

    /// Makes a hello whose nonce is zero: see [`Caller::fresh`].
    fn new<P: Purpose>(purpose: &P, attached: usize) -> Hello {
        const { assert!(size_of::<P>() <= size_of::<[u32; BODY]>()) };
        let mut body = [0; BODY];
        let bytes = bytemuck::bytes_of_mut(&mut body).iter_mut();
        bytes.zip(bytemuck::bytes_of(purpose)).for_each(|(to, from)| *to = *from);
        let attached = attached as u32;
        Hello { magic: MAGIC, nonce: [0; 16], version: VERSION, flags: 0, purpose: P::NUMBER, attached, body }
    }

    /// Returns true if the dialer encrypts the connection: [`MESSAGE`](crate::seal::MESSAGE) bytes follow.
    pub(crate) fn is_sealed(&self) -> bool {
        self.flags & SEALED != 0
    }

    /// Parses a hello. `Err(None)`: it is not of our protocol and gets no reply; `Err(Some(reason))`: it gets `reason`
    /// as the reply.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Hello, Option<String>> {
        let hello: Hello = bytemuck::try_pod_read_unaligned(bytes).map_err(|_| None)?;
        let Hello { magic, version, attached, .. } = hello;
        if magic != MAGIC {
            return Err(None);
        }
        if version != VERSION {
            return Err(Some(format!(
                "expected protocol version {VERSION}, got {version}; run the same build on all ranks"
            )));
        }
        if attached as usize > MAX_ATTACHED {
            return Err(Some(format!("expected at most {MAX_ATTACHED} bytes after the proof, got {attached}")));
        }
        Ok(hello)
    }

    /// Returns the purpose, if it is of this type.
    pub(crate) fn purpose<P: Purpose>(&self) -> Option<P> {
        let body = bytemuck::bytes_of(&self.body).get(..size_of::<P>()).filter(|_| self.purpose == P::NUMBER);
        body.map(bytemuck::pod_read_unaligned)
    }

    /// Returns the number of bytes that follow the dialer's proof.
    pub(crate) fn attached(&self) -> usize {
        self.attached as usize
    }
}

/// A dialer: its hello, the secret that it shares with the acceptor, and what it sends behind its proof.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub(crate) hello: Hello,
    pub(crate) secret: Secret,
    /// True if the connection is encrypted where its ends encrypt.
    pub(crate) sealable: bool,
    pub(crate) attached: &'a [u8],
}

impl<'a> Caller<'a> {
    /// `attached` is sent behind the proof: at most [`MAX_ATTACHED`] bytes of it.
    pub(crate) fn new<P: Purpose>(purpose: &P, secret: Secret, attached: &'a [u8]) -> Caller<'a> {
        let attached = attached.get(..MAX_ATTACHED).unwrap_or(attached);
        Caller { hello: Hello::new(purpose, attached.len()), secret, sealable: P::SEALABLE, attached }
    }

    /// Returns this caller with a fresh nonce, for another connection: one that is encrypted if `sealed`.
    pub(crate) fn fresh(&self, sealed: bool) -> OurResult<Caller<'a>> {
        let flags = if sealed { SEALED } else { 0 };
        Ok(Caller { hello: Hello { nonce: secret::random()?, flags, ..self.hello }, ..*self })
    }

    /// Returns the dialer's proof, if the acceptor has proven that it knows the secret. `binding` is that of the
    /// connection's encryption, empty if there is none.
    pub(crate) fn answer(&self, challenge: &Challenge, binding: &[u8]) -> Result<Proof, String> {
        let parts: [&[u8]; 3] = [bytemuck::bytes_of(&self.hello), &challenge.nonce, binding];
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
    pub(crate) fn to(hello: &Hello, secret: &Secret, binding: &[u8]) -> OurResult<Challenge> {
        let nonce = secret::random()?;
        Ok(Challenge { nonce, proof: secret.prove(ACCEPTOR, &[bytemuck::bytes_of(hello), &nonce, binding]) })
    }

    /// Returns true if `proof` shows that the dialer of `hello` knows the secret.
    pub(crate) fn is_met(&self, hello: &Hello, secret: &Secret, binding: &[u8], proof: &Proof) -> bool {
        secret.accepts(proof, DIALER, &[bytemuck::bytes_of(hello), &self.nonce, binding])
    }
}

/// Reason for which one side rejects the other.
pub(crate) const WRONG_SECRET: &str = "it does not know this job's secret";

/// Reply of an acceptor to a dialer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The acceptor requests a proof first, and sends its own; and its message of the encryption's handshake, if the
    /// dialer has sent one.
    Prove(Challenge, Option<[u8; MESSAGE]>),
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
            Reply::Prove(challenge, _) => (PROVE, bytemuck::bytes_of(challenge)),
        };
        let message = if let Reply::Prove(_, Some(message)) = self { &message[..] } else { &[] };
        let head = ReplyHead { magic: MAGIC, status, detail: (detail.len() + message.len()) as u32 };
        [bytemuck::bytes_of(&head), detail, message].concat()
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
            let (challenge, message) = detail.split_at_checked(size_of::<Challenge>()).unwrap_or_default();
            let challenge = bytemuck::try_pod_read_unaligned(challenge).ok();
            let message = if message.is_empty() { Some(None) } else { message.try_into().ok().map(Some) };
            return challenge
                .zip(message)
                .map(|(challenge, message)| Reply::Prove(challenge, message))
                .ok_or_else(|| format!("expected a challenge, got {} bytes", detail.len()));
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
pub(crate) fn cut(text: &str, most: usize) -> &str {
    let fits = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..fits.unwrap_or(0)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Test([u32; 2]);

    impl Purpose for Test {
        const NUMBER: u32 = 77;
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
    #[repr(C)]
    struct Other([u32; BODY]);

    impl Purpose for Other {
        const NUMBER: u32 = 78;
    }

    fn hello() -> Hello {
        Hello::new(&Test([1, 2]), 3)
    }

    #[test]
    fn a_hello_is_taken_only_with_our_version() {
        let bytes = bytemuck::bytes_of(&hello()).to_vec();
        assert_eq!(Hello::parse(&bytes), Ok(hello()));
        let refused = |hello: Hello| Hello::parse(bytemuck::bytes_of(&hello)).unwrap_err().unwrap();
        let old = refused(Hello { version: 0, ..hello() });
        assert!(old.contains(&format!("version {VERSION}, got 0")), "{old}");
        let long = refused(Hello { attached: MAX_ATTACHED as u32 + 1, ..hello() });
        assert!(long.contains("got 8193"), "{long}");
        let other = Hello { magic: *b"GET / HT", ..hello() };
        assert_eq!(Hello::parse(bytemuck::bytes_of(&other)), Err(None));
        assert_eq!(Hello::parse(&bytes[1..]), Err(None));
    }

    #[test]
    fn both_ends_prove_for_one_connection_and_one_link() {
        let (ours, theirs) = (Secret::new([1; 32]), Secret::new([2; 32]));
        let caller = Caller::new(&Test([1, 2]), ours, b"abc").fresh(false).unwrap();
        let hello = caller.hello;
        let challenge = Challenge::to(&hello, &ours, &[]).unwrap();
        let proof = caller.answer(&challenge, &[]).unwrap();
        assert!(challenge.is_met(&hello, &ours, &[], &proof));
        // A replay gets another nonce; the acceptor's own proof is no dialer's; an unauthenticated client has none.
        assert!(!Challenge::to(&hello, &ours, &[]).unwrap().is_met(&hello, &ours, &[], &proof));
        assert!(!challenge.is_met(&hello, &ours, &[], &challenge.proof));
        let forged = Challenge { nonce: challenge.nonce, proof: theirs.prove(ACCEPTOR, &[b"hello"]) };
        assert!(caller.answer(&forged, &[]).unwrap_err().contains("secret"));
        assert!(!challenge.is_met(&hello, &theirs, &[], &proof));
        // A proof over one connection's encryption is none for another's.
        let sealed = Challenge::to(&hello, &ours, &[7; 32]).unwrap();
        let proof = caller.answer(&sealed, &[7; 32]).unwrap();
        assert!(sealed.is_met(&hello, &ours, &[7; 32], &proof));
        assert!(!sealed.is_met(&hello, &ours, &[8; 32], &proof) && !sealed.is_met(&hello, &ours, &[], &proof));
        assert!(caller.answer(&sealed, &[8; 32]).is_err() && caller.answer(&sealed, &[]).is_err());
        let proof = caller.answer(&challenge, &[]).unwrap();
        // Every byte of the hello is covered.
        for at in 0..Hello::BYTES {
            let mut bytes = bytemuck::bytes_of(&hello).to_vec();
            bytes[at] ^= 1;
            let other: Hello = bytemuck::pod_read_unaligned(&bytes);
            assert!(!challenge.is_met(&other, &ours, &[], &proof), "byte {at}");
            assert!(Caller { hello: other, ..caller }.answer(&challenge, &[]).is_err(), "byte {at}");
        }
    }

    #[test]
    fn replies_round_trip_and_long_reasons_are_cut() {
        for reply in [
            Reply::Welcome,
            Reply::Refused("no".to_owned()),
            Reply::Refused("größer".to_owned()),
            Reply::Stranger(String::new()),
            Reply::Prove(Challenge { nonce: [1; 16], proof: [2; 32] }, None),
            Reply::Prove(Challenge { nonce: [1; 16], proof: [2; 32] }, Some([3; MESSAGE])),
        ] {
            assert_eq!(Reply::parse(&reply.to_bytes()), Ok(reply));
        }
        assert!(Reply::Refused("ü".repeat(1000)).to_bytes().len() <= Reply::MAX);
    }

    proptest! {
        #[test]
        fn any_purpose_goes_there_and_back_as_what_it_is(words: [u32; BODY], attached in 0..=MAX_ATTACHED) {
            let hello = Caller::new(&Other(words), Secret::new([0; 32]), &vec![0; attached]).fresh(false).unwrap().hello;
            let parsed = Hello::parse(bytemuck::bytes_of(&hello)).unwrap();
            prop_assert_eq!(parsed, hello);
            prop_assert_eq!((parsed.purpose(), parsed.attached()), (Some(Other(words)), attached));
            prop_assert_eq!(parsed.purpose::<Test>(), None);
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
            let _ = Hello::parse(&bytes);
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
