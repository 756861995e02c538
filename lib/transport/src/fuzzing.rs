//! One entry point for each parser of bytes or text that comes from outside, with what must hold whatever comes.
//!
//! The fuzzing targets in `fuzz/` call them, and so does the test below with the inputs in `fuzz/corpus`: what the
//! fuzzer found once is checked by every run of the tests. Not part of the library's interface: it is there only under
//! `--cfg fuzzing` and in the library's own tests, and panics where a property does not hold.

pub use crate::accept::fuzzing::handshake;
pub use crate::bootstrap::fuzzing::{bootstrap_frame, environment, interfaces, store_request, unique_id};
pub use crate::tcp::fuzzing::tcp_frame;

use tinynccl_plan::wire::Header;
use tinynccl_sys::config::Config;

/// A target's name and its entry point.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 9] = [
    ("wire_header", wire_header),
    ("bootstrap_frame", bootstrap_frame),
    ("store_request", store_request),
    ("unique_id", unique_id),
    ("handshake", handshake),
    ("tcp_frame", tcp_frame),
    ("config", config),
    ("environment", environment),
    ("interfaces", interfaces),
];

/// A message's header, of any 32 bytes: it reads as words, and goes back to the same bytes.
pub fn wire_header(data: &[u8]) {
    let Some(bytes) = data.get(..Header::BYTES) else { return };
    let header: Header = bytemuck::pod_read_unaligned(bytes);
    assert_eq!(bytemuck::bytes_of(&header), bytes);
    assert!(header.algorithm >= Header::PROGRAM || header.to_string().contains("message of"));
    assert!(
        header.agrees_with(&Header { check: 0, ..header })
            && header.is_same_call(&Header { check: !header.check, ..header })
    );
    // The first difference from a default header, if any but the checksum, is told.
    let plain = Header { check: header.check, ..Header::default() };
    assert_eq!(header.agrees_with(&plain), header == plain);
}

/// Settings: lines of `NAME=value`. What is accepted is within the documented ranges.
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lookup = |name: &str| variable(&text, name);
    match Config::from_lookup(lookup) {
        Ok(config) => {
            assert!((1..=16).contains(&config.channels) && (2..=64).contains(&config.fifo_depth));
            assert!((4 << 10..=16 << 20).contains(&config.shm_chunk) && !config.timeout.is_zero());
        }
        Err(e) => assert!(e.to_string().contains("TINYNCCL_"), "{e}"),
    }
}

/// The value of `NAME` in lines of `NAME=value`.
pub(crate) fn variable(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| line.split_once('=').filter(|(n, _)| *n == name)).map(|(_, value)| value.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    /// Names that the parsers of the environment and the settings know, and some values that they take.
    fn setting() -> impl Strategy<Value = String> {
        let mut names: Vec<&str> = Config::describe().iter().map(|k| k.env).collect();
        names.extend(["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TINYNCCL_UNIQUE_ID"]);
        names.extend(["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"]);
        names.extend(["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_NODELIST"]);
        names.extend(["SLURM_LAUNCH_NODE_IPADDR", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"]);
        let value = prop_oneof![
            "[0-9]{1,3}",
            any::<i64>().prop_map(|n| n.to_string()),
            any::<f64>().prop_map(|n| n.to_string()),
            "[a-z0-9\\[\\],. ^@:-]{0,20}",
            "\\PC{0,8}[KMG]?",
            Just("true".to_owned()),
        ];
        (prop::sample::select(names), value).prop_map(|(name, value)| format!("{name}={value}\n"))
    }

    proptest! {
        #[test]
        fn any_environment_is_read_or_refused(lines in prop::collection::vec(setting(), 0..10)) {
            environment(lines.concat().as_bytes());
            config(lines.concat().as_bytes());
        }

        #[test]
        fn any_selection_of_interfaces_is_done_or_refused(
            filter in "\\PC{0,10}|\\^?[a-z0-9, ]{0,20}|\\^?(eth|lo|docker|point)[,0]{0,3}",
            peers in prop::collection::vec(any::<std::net::SocketAddr>(), 0..4),
        ) {
            let peers: Vec<String> = peers.iter().map(|p| p.to_string()).collect();
            interfaces(format!("{filter}\n{}", peers.join("\n")).as_bytes());
        }

        #[test]
        fn any_bytes_are_taken_by_every_parser(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
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
                let mut input = std::fs::read(file.unwrap().path()).unwrap();
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
