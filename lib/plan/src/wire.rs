//! The header of every message, so that ranks which disagree get an error naming both values.

use std::fmt;

use crate::dtype::{DType, ReduceOp};

/// A communication pattern, as named by MPI and NCCL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Collective {
    /// Every rank ends with the reduction of all inputs.
    AllReduce = 0,
    /// Every rank ends with all inputs, in rank order.
    AllGather = 1,
    /// Rank `r` ends with segment `r` of the reduction.
    ReduceScatter = 2,
    /// Every rank ends with the root's input.
    Broadcast = 3,
    /// The root ends with the reduction.
    Reduce = 4,
    /// The root ends with all inputs, in rank order.
    Gather = 5,
    /// Rank `r` ends with segment `r` of the root's input.
    Scatter = 6,
    /// Rank `r` ends with segment `r` of every rank's input.
    AllToAll = 7,
    /// No rank leaves before all have entered.
    Barrier = 8,
    /// Point to point: `root` in the header is the sender.
    SendRecv = 9,
    /// Rank `r` ends with the reduction of the inputs of ranks `0..=r`.
    Scan = 10,
}

impl Collective {
    /// Every collective, in code order.
    pub const ALL: [Collective; 11] = [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::Barrier,
        Collective::SendRecv,
        Collective::Scan,
    ];

    /// Snake-case name as used in the API.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Barrier => "barrier",
            Collective::SendRecv => "send/recv",
            Collective::Scan => "scan",
        }
    }

    /// The collective with this wire code.
    #[inline]
    pub fn from_code(code: u8) -> Option<Collective> {
        Collective::ALL.get(code as usize).copied()
    }

    /// True when there is a root, which must be the same on all ranks.
    #[inline]
    pub const fn has_root(self) -> bool {
        matches!(
            self,
            Collective::Broadcast
                | Collective::Reduce
                | Collective::Gather
                | Collective::Scatter
                | Collective::SendRecv
        )
    }

    /// True when values are combined, so that the operator matters.
    #[inline]
    pub const fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce | Collective::Scan)
    }

    /// Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md): how many times the
    /// size, which is the larger of a rank's input and output, the busiest rank's link carries at least.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks.max(1) as f64;
        match self {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::AllGather
            | Collective::ReduceScatter
            | Collective::AllToAll
            | Collective::Gather
            | Collective::Scatter => (n - 1.0) / n,
            Collective::Broadcast | Collective::Reduce | Collective::Scan | Collective::SendRecv => 1.0,
            Collective::Barrier => 0.0,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Schedule of a collective; the header carries the value because all ranks must choose the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Algorithm {
    /// Neighbour to neighbour around a ring: bandwidth-optimal, latency grows with the number of ranks.
    Ring = 0,
    /// One binary tree: logarithmic latency.
    Tree = 1,
    /// Two complementary binary trees, each carrying half: logarithmic latency and full bandwidth.
    DoubleTree = 2,
    /// Every rank exchanges directly with every other (or with the root): one hop.
    Direct = 3,
    /// Recursive halving (reduce-scatter) and doubling (all-gather) over a hypercube.
    HalvingDoubling = 4,
    /// Each rank reduces its own part of all inputs and sends it to all ranks: two hops at full bandwidth.
    AllPairs = 5,
    /// In shared memory: each rank writes once, and all read and reduce. No schedule: see `symmetric`.
    OneShot = 6,
    /// In symmetric memory: ranks read and write each other's buffers. No schedule: see `symmetric`.
    TwoShot = 7,
    /// Neighbours in a hypercube exchange all their data, at twice the distance each time: fewest messages.
    RecursiveDoubling = 8,
    /// In shared memory: chunks of ordinary buffers pass through stages that all ranks map. No schedule: see
    /// `symmetric`.
    Staged = 9,
    /// Inside each host, and between ranks with the same place on their hosts: each carries its share over the network.
    Hierarchical = 10,
}

impl Algorithm {
    /// Every algorithm, in code order.
    pub const ALL: [Algorithm; 11] = [
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::DoubleTree,
        Algorithm::Direct,
        Algorithm::HalvingDoubling,
        Algorithm::AllPairs,
        Algorithm::OneShot,
        Algorithm::TwoShot,
        Algorithm::RecursiveDoubling,
        Algorithm::Staged,
        Algorithm::Hierarchical,
    ];

    /// Kebab-case name as used on command lines and in `TINYNCCL_ALGO`.
    #[inline]
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::DoubleTree => "double-tree",
            Algorithm::Direct => "direct",
            Algorithm::HalvingDoubling => "halving-doubling",
            Algorithm::AllPairs => "all-pairs",
            Algorithm::OneShot => "one-shot",
            Algorithm::TwoShot => "two-shot",
            Algorithm::RecursiveDoubling => "recursive-doubling",
            Algorithm::Staged => "staged",
            Algorithm::Hierarchical => "hierarchical",
        }
    }

    /// The algorithm with this wire code.
    #[inline]
    pub fn from_code(code: u8) -> Option<Algorithm> {
        Algorithm::ALL.get(code as usize).copied()
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Algorithm::ALL.into_iter().find(|a| a.name() == s).ok_or_else(|| {
            format!("unknown algorithm '{s}', expected one of {}", Algorithm::ALL.map(Algorithm::name).join(" "))
        })
    }
}

/// A message's call and length. 32 bytes, little endian on the wire (all supported targets are).
///
/// Both sides derive the header from their own call, so a receiver compares it with the expected one
/// ([`Header::agrees_with`]) before it reads a payload byte.
#[derive(Clone, Copy, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Header {
    /// Elements per segment of the whole call; of the pair of ranks if each pair has its own ([`Header::UNEVEN`]). Its
    /// upper bits have a part of the hash or the fingerprint that begins in `root`: [`Header::elements`] has the elements.
    pub count: u64,
    /// Communicator id.
    pub comm: u32,
    /// Position of the call in the communicator's sequence (collectives) or of the message on the pair (point to
    /// point).
    pub seq: u32,
    /// Root rank, or [`Header::NO_ROOT`]; in an all_reduce that carries several calls, how many they are (the upper 12
    /// bits) and the lower bits of a hash of their list; in a call by a program of the caller's, the lower bits of its
    /// fingerprint.
    pub root: u32,
    /// Payload length of this message in bytes.
    pub len: u32,
    /// Check of this message: the digest of the collective calls that the sender had made before it, never 0; 0: none
    /// (point to point).
    pub check: u32,
    /// [`Collective`] code.
    pub collective: u8,
    /// [`DType`] code.
    pub dtype: u8,
    /// [`ReduceOp`] code, or [`Header::NO_OP`], or [`Header::UNEVEN`].
    pub op: u8,
    /// [`Algorithm`] code.
    pub algorithm: u8,
}

impl Header {
    /// `root` of a collective without one.
    pub const NO_ROOT: u32 = u32::MAX;
    /// `op` of a collective that does not reduce.
    pub const NO_OP: u8 = u8::MAX;
    /// `op` of a collective where each pair of ranks has a separate length, such as all_to_all_v.
    pub const UNEVEN: u8 = u8::MAX - 1;
    /// `collective` of a relay's notice to an end of a link: its payload is the reason why no more messages will come.
    pub const NOTICE: u8 = u8::MAX;
    /// Bits of `count` with the elements of packed calls. The other 44 are those of the hash of their list that do not
    /// fit in the lower 20 bits of `root`.
    const PACK_COUNT: u32 = 20;
    /// Bits of `root` with the lower part of that hash.
    const PACK_HASH: u32 = 20;
    /// Most packed calls that `root` can count; it stands for any larger number.
    const MAX_PACKED: usize = (1 << 12) - 2;
    /// Elements of packed calls, and those of a call by a program of the caller's, are below these.
    pub const PACK_LIMIT: u64 = 1 << Header::PACK_COUNT;
    /// See [`Header::PACK_LIMIT`].
    pub const PROGRAM_LIMIT: u64 = 1 << Header::PROGRAM_COUNT;
    /// Bits of `count` with the elements of a call by a program of the caller's. The other 24 are those of its
    /// fingerprint that do not fit in `root`.
    const PROGRAM_COUNT: u32 = 40;
    /// Bits of a program's fingerprint.
    pub const FINGERPRINT: u32 = 32 + 64 - Header::PROGRAM_COUNT;
    /// `algorithm` of a call by a program of the caller's.
    pub const PROGRAM: u8 = u8::MAX - 1;
    /// `algorithm` of a call that is announced without a message.
    pub const NO_ALGORITHM: u8 = u8::MAX;
    /// `algorithm` of a message with the sums of those before it.
    pub const SUMS: u8 = u8::MAX - 2;
    /// Bytes on the wire.
    pub const BYTES: usize = 32;

    /// The header of an all_reduce that carries `calls` calls; `hash` stands for their list.
    pub fn packed(self, calls: usize, hash: u64) -> Header {
        let number = calls.min(Header::MAX_PACKED) as u32;
        let (low, high) = (hash as u32 & ((1 << Header::PACK_HASH) - 1), hash >> Header::PACK_HASH);
        let count = self.count | high << Header::PACK_COUNT;
        Header { count, root: number << Header::PACK_HASH | low, ..self }
    }

    /// The number of calls that an all_reduce carries and the hash of their list; `None` for a header of one call.
    pub fn pack(&self) -> Option<(u32, u64)> {
        let collective = Collective::AllReduce as u8;
        let is_pack =
            self.collective == collective && self.root != Header::NO_ROOT && self.algorithm != Header::PROGRAM;
        is_pack.then(|| {
            let low = u64::from(self.root & ((1 << Header::PACK_HASH) - 1));
            (self.root >> Header::PACK_HASH, self.count >> Header::PACK_COUNT << Header::PACK_HASH | low)
        })
    }

    /// The header of a call by a program of the caller's with this fingerprint, of [`Header::FINGERPRINT`] bits.
    pub const fn by_program(self, fingerprint: u64) -> Header {
        let count = self.count | fingerprint >> 32 << Header::PROGRAM_COUNT;
        Header { count, root: fingerprint as u32, algorithm: Header::PROGRAM, ..self }
    }

    /// The fingerprint of the caller's program, if the call is by one.
    pub fn program(&self) -> Option<u64> {
        let high = self.count >> Header::PROGRAM_COUNT;
        (self.algorithm == Header::PROGRAM).then_some(high << 32 | u64::from(self.root))
    }

    /// Elements per segment, or of the pair of ranks.
    pub fn elements(&self) -> u64 {
        match (self.pack(), self.program()) {
            (Some(_), _) => self.count & (Header::PACK_LIMIT - 1),
            (None, Some(_)) => self.count & (Header::PROGRAM_LIMIT - 1),
            (None, None) => self.count,
        }
    }

    /// `algorithm` where calls are compared without their messages: ranks may have chosen differently, but a program of
    /// the caller's is part of the call.
    #[inline]
    pub const fn compared_algorithm(&self) -> u8 {
        if self.algorithm == Header::PROGRAM { Header::PROGRAM } else { Header::NO_ALGORITHM }
    }

    /// True when `self` and `other` describe the same message after the same calls, if both have digests.
    #[inline]
    pub fn agrees_with(&self, other: &Header) -> bool {
        *self == *other || (self.check == 0 || other.check == 0) && self.is_same_call(other)
    }

    /// True when `self` and `other` differ at most in the calls before them.
    #[inline]
    pub fn is_same_call(&self, other: &Header) -> bool {
        *self == Header { check: self.check, ..*other }
    }
}

impl fmt::Display for Header {
    /// The call in words: `all_reduce #3 of comm 1 (f32, sum, count 10, ring; message of 40 bytes)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Collective::from_code(self.collective) {
            Some(c) => write!(f, "{c}")?,
            None => write!(f, "unknown collective {}", self.collective)?,
        }
        if self.op == Header::UNEVEN {
            f.write_str("_v")?;
        }
        write!(f, " #{} of comm {} (", self.seq, self.comm)?;
        match DType::from_code(self.dtype) {
            Some(d) => write!(f, "{d}")?,
            None => write!(f, "unknown dtype {}", self.dtype)?,
        }
        if self.op < Header::UNEVEN {
            match ReduceOp::from_code(self.op) {
                Some(o) => write!(f, ", {o}")?,
                None => write!(f, ", unknown op {}", self.op)?,
            }
        }
        write!(f, ", count {}", self.elements())?;
        if let Some(fingerprint) = self.program() {
            return write!(f, ", program {fingerprint:014x})");
        }
        if let Some((calls, hash)) = self.pack() {
            write!(f, " in {calls} calls of lengths with hash {hash:016x}")?;
        } else if self.root != Header::NO_ROOT {
            write!(f, ", root {}", self.root)?;
        }
        match Algorithm::from_code(self.algorithm) {
            None if self.algorithm == Header::NO_ALGORITHM => return f.write_str(")"),
            Some(a) => write!(f, ", {a}")?,
            None if self.algorithm == Header::SUMS => f.write_str(", sums")?,
            None => write!(f, ", unknown algorithm {}", self.algorithm)?,
        }
        write!(f, "; message of {} bytes)", self.len)
    }
}

impl fmt::Debug for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Header[{self}]")
    }
}

const _: () = assert!(size_of::<Header>() == Header::BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        let codes = (any::<u8>(), any::<u8>(), any::<u8>(), any::<u8>());
        (any::<u64>(), any::<[u32; 5]>(), codes).prop_map(
            |(count, [comm, seq, root, len, check], (collective, dtype, op, algorithm))| Header {
                count,
                comm,
                seq,
                root,
                len,
                check,
                collective,
                dtype,
                op,
                algorithm,
            },
        )
    }

    /// The layout as a peer of another build reads it, field by field.
    fn written(h: &Header) -> Vec<u8> {
        let words = [h.comm, h.seq, h.root, h.len, h.check].map(u32::to_le_bytes).concat();
        [&h.count.to_le_bytes()[..], &words, &[h.collective, h.dtype, h.op, h.algorithm]].concat()
    }

    proptest! {
        #[test]
        fn every_field_stands_where_the_format_has_it(header in any_header()) {
            prop_assert_eq!(bytemuck::bytes_of(&header), written(&header));
            prop_assert_eq!(bytemuck::pod_read_unaligned::<Header>(&written(&header)), header);
        }

        #[test]
        fn any_bytes_are_a_header_and_go_back(bytes in any::<[u8; Header::BYTES]>()) {
            let header: Header = bytemuck::pod_read_unaligned(&bytes);
            prop_assert_eq!(bytemuck::bytes_of(&header), &bytes);
            let length = format!("message of {} bytes", header.len);
            prop_assert!(header.algorithm >= Header::PROGRAM || header.to_string().contains(&length));
        }

        /// Two headers agree exactly when all their bytes do, those of the digest only if both have one.
        #[test]
        fn one_flipped_bit_is_seen(header in any_header(), bit in 0usize..256) {
            let mut bytes = written(&header);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let other: Header = bytemuck::pod_read_unaligned(&bytes);
            let in_digest = (24..28).contains(&(bit / 8));
            prop_assert_eq!(header.agrees_with(&other), in_digest && (header.check == 0 || other.check == 0));
            prop_assert_eq!(header.is_same_call(&other), in_digest);
            let unknown = Header { check: 0, ..other };
            prop_assert_eq!((header.agrees_with(&unknown), unknown.agrees_with(&header)), (in_digest, in_digest));
        }

        /// Every bit of what stands for a list or a program is in the header, beside the elements.
        #[test]
        fn a_hash_and_a_fingerprint_come_back_whole(
            header in any_header(), calls in 2usize..10_000, hash in any::<u64>(), elements in any::<u64>()
        ) {
            let all_reduce = Header { collective: Collective::AllReduce as u8, algorithm: 0, ..header };
            let few = Header { count: elements % Header::PACK_LIMIT, ..all_reduce };
            let packed = few.packed(calls, hash);
            let number = calls.min(Header::MAX_PACKED) as u32;
            prop_assert_eq!((packed.pack(), packed.program()), (Some((number, hash)), None));
            prop_assert_eq!(packed.elements(), few.count);
            prop_assert_ne!(packed.root, Header::NO_ROOT);
            let some = Header { count: elements % Header::PROGRAM_LIMIT, ..header };
            let fingerprint = hash >> (64 - Header::FINGERPRINT);
            let own = some.by_program(fingerprint);
            prop_assert_eq!((own.program(), own.pack(), own.elements()), (Some(fingerprint), None, some.count));
            let plain = Header { root: Header::NO_ROOT, ..all_reduce };
            prop_assert_eq!((plain.pack(), plain.program(), plain.elements()), (None, None, plain.count));
        }

        #[test]
        fn codes_go_there_and_back(code in any::<u8>()) {
            prop_assert!(Collective::from_code(code).is_none_or(|c| c as u8 == code));
            prop_assert!(Algorithm::from_code(code).is_none_or(|a| a as u8 == code && a.name().parse() == Ok(a)));
            prop_assert!(DType::from_code(code).is_none_or(|d| d as u8 == code));
            prop_assert!(ReduceOp::from_code(code).is_none_or(|o| o as u8 == code));
        }
    }

    #[test]
    fn the_bus_factors_of_nccl_tests() {
        let factors = |ranks| Collective::ALL.map(|collective| collective.bus_factor(ranks));
        // all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all, barrier, send/recv, scan
        assert_eq!(factors(8), [1.75, 0.875, 0.875, 1.0, 1.0, 0.875, 0.875, 0.875, 0.0, 1.0, 1.0]);
        assert_eq!(factors(2), [1.0, 0.5, 0.5, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0, 1.0, 1.0]);
        assert_eq!(factors(1), [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
        assert_eq!(factors(0), factors(1), "no rank is no division by zero");
    }

    #[test]
    fn everything_is_compared_but_a_digest_that_is_not_told() {
        let h = Header { count: 10, comm: 1, seq: 3, len: 40, check: 5, ..Header::default() };
        assert!(h.agrees_with(&Header { check: 0, ..h }) && !h.agrees_with(&Header { check: 7, ..h }));
        for other in [
            Header { count: 11, ..h },
            Header { comm: 2, ..h },
            Header { seq: 4, ..h },
            Header { root: 1, ..h },
            Header { len: 41, ..h },
            Header { collective: 1, ..h },
            Header { dtype: 1, ..h },
            Header { op: 1, ..h },
            Header { algorithm: 1, ..h },
        ] {
            assert!(!h.agrees_with(&other), "{other}");
        }
    }

    #[test]
    fn header_reads_as_words_even_when_corrupt() {
        let h = Header { count: 10, comm: 1, seq: 3, root: Header::NO_ROOT, len: 40, ..Header::default() };
        assert_eq!(h.to_string(), "all_reduce #3 of comm 1 (f32, sum, count 10, ring; message of 40 bytes)");
        let packed = h.packed(3, 0xfedc_0000_0000_0abc);
        let words = "count 10 in 3 calls of lengths with hash fedc000000000abc, ring";
        assert!(packed.to_string().contains(words), "{packed}");
        let uneven = Header { collective: Collective::AllToAll as u8, op: Header::UNEVEN, ..h };
        assert_eq!(uneven.to_string(), "all_to_all_v #3 of comm 1 (f32, count 10, ring; message of 40 bytes)");
        let own = h.by_program(0xfe_dc00_0000_0abc);
        assert_eq!(own.to_string(), "all_reduce #3 of comm 1 (f32, sum, count 10, program fedc0000000abc)");
        let bad = Header { collective: 99, dtype: 99, op: 99, algorithm: 99, ..h };
        assert!(bad.to_string().contains("unknown collective 99"));
    }
}
