//! NCCL's variables.

use nccl::abi::UniqueId;
use program_kit::port::Port;

use super::apart::{rank as process, role, wait};
use super::functions::*;
use super::rank::{Rank, each, ok, threads, unique_id};

fn version() -> i32 {
    let mut version = 0;
    ok(ncclGetVersion(&mut version));
    version
}

apart! {
    fn the_version_is_2_28_9() {
        assert_eq!(version(), 22_809);
    }

    fn the_version_is_what_it_is_told_to_be() with [("TINYNCCL_NCCL_VERSION", "23007")] {
        assert_eq!(version(), 23_007);
    }

    // A file per process, one line per fact, in NCCL's form.
    fn the_log_says_what_was_loaded_and_which_path_is_taken()
        with [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/tmp/tinynccl-abi.%p.log"), ("NCCL_NET_GDR_LEVEL", "3")] {
        threads(2, Rank::still_works);
        let file = format!("/tmp/tinynccl-abi.{}.log", std::process::id());
        let log = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        for line in log.lines() {
            assert!(line.contains(&format!(":{}:", std::process::id())) && line.contains(" NCCL "), "{line}");
        }
        for words in ["NCCL version 2.28.9 by tinynccl", "libnccl.so", "rank 0 of 2 on GPU 0", "through the hosts' memory", "NCCL_NET_GDR_LEVEL"] {
            assert!(log.contains(words), "no {words:?} in\n{log}");
        }
    }

    fn warnings_name_what_failed() with [("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", "/tmp/tinynccl-abi-warn.%p.log")] {
        assert_ne!(ncclCommDestroy([0u64; 16].as_mut_ptr().cast()), 0);
        let file = format!("/tmp/tinynccl-abi-warn.{}.log", std::process::id());
        let log = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert!(log.contains("NCCL WARN ncclCommDestroy: ") && log.lines().count() == 1, "{log}");
    }

    // The ranks share no id, only an address in their environment; two communicators, one after the other.
    fn ranks_meet_at_an_address() {
        if let Some((rank, size, _)) = role() {
            for _ in 0..2 {
                let rank = Rank::join(unique_id(), rank, size);
                rank.still_works();
                rank.destroy();
            }
            return;
        }
        let name = concat!(module_path!(), "::ranks_meet_at_an_address");
        let port = Port::loopback();
        let address = port.at.to_string();
        let ranks: Vec<_> = (0..3).map(|rank| process(name, rank, 3, "", &[("NCCL_COMM_ID", &address)])).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = wait(child);
            assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }

    fn every_id_is_another() {
        let ids: Vec<UniqueId> = (0..4).map(|_| unique_id()).collect();
        for (i, one) in ids.iter().enumerate() {
            assert!(ids[..i].iter().all(|other| other.internal != one.internal));
        }
        // Made first, used last.
        for id in ids.into_iter().rev() {
            each(2, id, |rank| {
                rank.still_works();
                rank.destroy();
            });
        }
    }
}
