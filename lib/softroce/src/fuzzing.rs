//! Entry points of the fuzzer: bytes that come from outside, with what must hold whatever comes.
//!
//! The fuzzing targets in `fuzz/` call them, and so do the tests below, also with the inputs in `fuzz/corpus`. Not part
//! of the library's interface: it is there only under `--cfg fuzzing` and in the library's own tests, and panics where
//! a property does not hold.

use crate::wire::icrc::{Icrc, Route};
use crate::wire::packet::{ICRC_LEN, MAX_HEADERS};
use crate::wire::{Packet, grh};

pub use crate::qp::stranger::roce_responder;

/// A target's name and its entry point.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 2] = [("roce_packet", roce_packet), ("roce_responder", roce_responder)];

/// Parses bytes as a socket gives them, a packet with its ICRC. The first byte chooses its route. A parsed packet
/// builds to the same bytes; with an ICRC of ours it is accepted, and with a damaged one it is not.
pub fn roce_packet(data: &[u8]) {
    let Some((how, bytes)) = data.split_first() else { return };
    let end = |v6: bool, host: u8, port: u16| match v6 {
        true => ([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(host)], port).into(),
        false => ([192, 0, 2, host], port).into(),
    };
    let v6 = how & 1 != 0;
    let route = Route { src: end(v6, 1, 50_000), dst: end(v6, 2, crate::wire::UDP_PORT) };
    let mut icrc = Icrc::new(route);
    let id = u16::from(how >> 1);
    icrc.check(bytes, id);
    if let Some(Some(header)) = (how & 2 != 0).then(|| bytes.first_chunk()) {
        let _ = grh::addresses(header);
    }
    let Ok(packet) = Packet::parse(bytes) else { return };
    let mut headers = [0; MAX_HEADERS];
    let len = packet.headers.build(&mut headers);
    let mut built = headers[..len].to_vec();
    built.extend_from_slice(packet.payload);
    built.resize(built.len() + usize::from(packet.headers.bth.pad), 0);
    let crc = icrc.seal(&built[..len], [&built[len..]], id);
    built.extend(crc);
    assert_eq!(built.len(), bytes.len());
    assert_eq!(Packet::parse(&built), Ok(packet));
    assert!(icrc.check(&built, id), "our own ICRC");
    // Any one bit that the ICRC covers. A damage of up to 32 bits in a row is always found with a known identification.
    let at = usize::from(*how) % (built.len() - ICRC_LEN);
    if v6 && at != 4 {
        built[at] ^= 0x20;
        assert!(!icrc.check(&built, id), "a damaged packet");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// A step of [`roce_responder`] as bytes: mostly packets with fields that a queue pair expects.
    fn step() -> impl Strategy<Value = Vec<u8>> {
        let near = prop_oneof![5 => Just(0u8), 1 => prop::sample::select(vec![1u8, 2, 0xff, 0xfe, 0xfd])];
        // Solicited, asked to acknowledge, which region, a key or an address or a length of the unauthenticated
        // sender's.
        let flags = prop_oneof![(0u8..16), (0u8..128)];
        let rest = prop::collection::vec(prop_oneof![Just(0xffu8), 0u8..16, any::<u8>()], 1..7);
        let packet = (0u8..24, flags, near, rest);
        prop_oneof![
            8 => packet.prop_map(|(code, flags, near, rest)| [&[1, code, flags, near], &rest[..]].concat()),
            2 => any::<[u8; 2]>().prop_map(|[slot, split]| vec![4, slot, split]),
            1 => any::<[u8; 2]>().prop_map(|[kind, split]| vec![5, kind, split]),
            3 => any::<u8>().prop_map(|time| vec![6, time]),
            1 => any::<u8>().prop_map(|what| vec![7, what]),
        ]
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_by_every_target(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
        }

        #[test]
        fn a_stranger_does_no_harm(how: u8, steps in prop::collection::vec(step(), 0..60)) {
            roce_responder(&[&[how], &steps.concat()[..]].concat());
        }
    }

    /// Every input of the corpus still has the properties, cut short and with a flipped bit, too.
    #[test]
    #[cfg_attr(miri, ignore = "reads files")]
    fn the_corpus_still_holds() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
        for (name, target) in TARGETS {
            let folder = corpus.join(name);
            let files = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
            let mut inputs = 0;
            for file in files {
                let mut input = std::fs::read(file.expect("listed").path()).expect("read");
                inputs += 1;
                target(&input);
                target(&input[..input.len() / 2]);
                let middle = input.len() / 3;
                if let Some(byte) = input.get_mut(middle) {
                    *byte ^= 0x10;
                    target(&input);
                }
            }
            assert!(inputs > 0, "no inputs in {}", folder.display());
            target(&[]);
        }
    }
}
