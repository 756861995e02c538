//! NCCL's variables.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use nccl::abi::UniqueId;
use program_kit::port::Port;

use super::apart::{rank as process, role, wait};
use super::functions::*;
use super::rank::{INVALID_USAGE, Rank, each, gpu, ok, refused, threads, unique_id};

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

    // Of the program, of NCCL, of this library; as names and as values.
    fn variables_that_are_not_utf_8_do_no_harm() with [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/dev/null")] {
        for name in [&b"FOO"[..], b"F\xffO", b"NCCL_FOO", b"NCCL_\xff", b"TINYNCCL_\xfe", b"CUDA_DEVICE_MAX_CONNECTIONS"] {
            // SAFETY: before the library is loaded; no other thread of this process looks at the environment.
            unsafe { std::env::set_var(OsStr::from_bytes(name), OsStr::from_bytes(b"\xff=\xf0")) };
        }
        threads(2, Rank::still_works);
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

    fn ranks_meet_at_an_address_with_a_name() {
        if let Some((rank, size, _)) = role() {
            let rank = Rank::join(unique_id(), rank, size);
            rank.still_works();
            return rank.destroy();
        }
        let name = concat!(module_path!(), "::ranks_meet_at_an_address_with_a_name");
        let port = Port::loopback();
        let address = format!("localhost:{}", port.at.port());
        let ranks: Vec<_> = (0..2).map(|rank| process(name, rank, 2, "", &[("NCCL_COMM_ID", &address)])).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            let output = wait(child);
            assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }

    fn an_address_without_a_port_is_refused() with [("NCCL_COMM_ID", "127.0.0.1:0")] {
        let mut id = UniqueId { internal: [0; 128] };
        refused(ncclGetUniqueId(&mut id), INVALID_USAGE, &["NCCL_COMM_ID", "port is 0"]);
    }

    fn an_address_is_no_key_to_encrypt_with() with [("NCCL_COMM_ID", "127.0.0.1:9"), ("TINYNCCL_ENCRYPT", "1")] {
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        let words = ["TINYNCCL_ENCRYPT", "NCCL_COMM_ID", "set TINYNCCL_SECRET"];
        refused(ncclCommInitRank(&mut comm, 2, unique_id(), 0), INVALID_USAGE, &words);
    }

    fn a_version_that_is_none_is_refused() with [("TINYNCCL_NCCL_VERSION", "abc")] {
        let mut version = 0;
        refused(ncclGetVersion(&mut version), INVALID_USAGE, &["TINYNCCL_NCCL_VERSION", "abc", "22809"]);
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        refused(ncclCommInitRank(&mut comm, 1, unique_id(), 0), INVALID_USAGE, &["TINYNCCL_NCCL_VERSION"]);
    }

    fn one_interface_of_a_list_is_enough() with [("NCCL_SOCKET_IFNAME", "ib0,bond0,lo,eth9")] {
        threads(2, Rank::still_works);
    }

    fn interfaces_that_are_not_there_are_told_under_the_name_that_was_set() with [("NCCL_SOCKET_IFNAME", "=ib0,bond0")] {
        let mut id = UniqueId { internal: [0; 128] };
        let words = ["NCCL_SOCKET_IFNAME", "ib0", "bond0", "lo (127.0.0.1)"];
        refused(ncclGetUniqueId(&mut id), INVALID_USAGE, &words);
        assert!(!last_error(std::ptr::null_mut()).contains("TINYNCCL_IFNAME"));
    }

    fn lists_of_algorithms_are_read_as_nccl_reads_them()
        with [("NCCL_ALGO", "ring,tree;allreduce:tree"), ("NCCL_PROTO", "^LL128"), ("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_FILE", "/tmp/tinynccl-abi-lists.%p.log")] {
        threads(2, Rank::still_works);
        let file = format!("/tmp/tinynccl-abi-lists.{}.log", std::process::id());
        let log = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert!(log.contains("NCCL WARN NCCL_ALGO=ring,tree;allreduce:tree: Tree is taken for all functions"), "{log}");
    }

    fn a_list_that_is_none_is_refused() with [("NCCL_ALGO", "ring;tree")] {
        let (_context, mut comm) = (gpu(0), std::ptr::null_mut());
        refused(ncclCommInitRank(&mut comm, 1, unique_id(), 0), INVALID_USAGE, &["NCCL_ALGO", "tree", "first"]);
    }

    fn variables_come_from_a_file_and_those_of_the_environment_win() {
        if role().is_some() {
            assert_eq!(version(), 23_007);
            refused(ncclGetUniqueId(&mut UniqueId { internal: [0; 128] }), INVALID_USAGE, &["NCCL_COMM_ID", "port is 0"]);
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nccl.conf");
        let text = "# a comment\nNCCL_COMM_ID=127.0.0.1:0\nTINYNCCL_NCCL_VERSION=abc\nno value\nNCCL_DEBUG=VERSION\n";
        std::fs::write(&file, text).unwrap();
        let name = concat!(module_path!(), "::variables_come_from_a_file_and_those_of_the_environment_win");
        let settings = [("NCCL_CONF_FILE", file.to_str().unwrap()), ("TINYNCCL_NCCL_VERSION", "23007")];
        let output = wait(process(name, 0, 1, "", &settings));
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("NCCL version 2.30.7 by tinynccl"), "{out}{err}");
    }

    fn every_id_is_another() {
        let ids: Vec<UniqueId> = (0..4).map(|_| unique_id()).collect();
        for (i, one) in ids.iter().enumerate() {
            assert!(ids[..i].iter().all(|other| other.internal != one.internal));
        }
        // Created first, used last.
        for id in ids.into_iter().rev() {
            each(2, id, |rank| {
                rank.still_works();
                rank.destroy();
            });
        }
    }
}
