//! Errors that occur over RDMA only: settings and subnets. For networks that fail see `tests/cpu/rdma_faults.rs`.

use crate::harness::*;
use tinynccl::config::TransportChoice;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, LinkPair, rdma_ports};

fn connect(from: &Endpoint, to: &Endpoint, peer_rank: usize) -> Result<LinkPair> {
    let info = to.info();
    let to = ConnectTo { comm: 0, peer_rank, info: &info, channel: 0, options: OPTIONS };
    from.connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE)
}

#[test]
fn a_setting_that_fits_nothing_is_refused_with_what_exists() {
    if !has_verbs() {
        return;
    }
    let config = config(TransportChoice::Verbs);
    let device = rdma_ports(&config).unwrap().first().unwrap().device.clone();
    for (setting, value, words) in [
        ("TINYNCCL_VERBS_DEVICE", "nosuch", [device.as_str(), "no RDMA device is left"]),
        ("TINYNCCL_VERBS_PORT", "7", [device.as_str(), "ports 1 to 1"]),
        ("TINYNCCL_VERBS_GID_INDEX", "200", ["no such entry", "RoceV2"]),
    ] {
        let mut config = config.clone();
        match setting {
            "TINYNCCL_VERBS_DEVICE" => config.verbs_device = Some(value.to_owned()),
            "TINYNCCL_VERBS_PORT" => config.verbs_port = value.parse().unwrap(),
            _ => config.verbs_gid_index = Some(value.to_owned()),
        }
        let e = Endpoint::new(0, SECRET, &config).unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::Config { .. }) && text.contains(setting), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn different_numbers_of_queue_pairs_are_refused_with_both() {
    if !has_verbs() {
        return;
    }
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &of_rank(&queue_pairs(1 + rank), rank)).unwrap());
    let errors = both(|rank| connect(&endpoints[rank], &endpoints[1 - rank], 1 - rank).unwrap_err());
    for e in errors {
        let text = e.to_string();
        assert!(matches!(e, Error::Protocol { .. }), "{text}");
        assert!(text.contains("queue pairs 2, rank 0 wants") && text.contains("queue pairs 1;"), "{text}");
    }
}

#[test]
fn without_a_common_subnet_both_ends_name_all_ports_at_once() {
    if !has_verbs() {
        return;
    }
    let config = config(TransportChoice::Verbs);
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, SECRET, &of_rank(&config, rank)).unwrap());
    for rank in [0, 1] {
        let mut info = endpoints[1 - rank].info();
        for port in &mut info.verbs {
            port.device = "far_away".to_owned();
            // Another network, whatever the prefix.
            port.gid[12] ^= 0xff;
        }
        let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options: OPTIONS };
        let e = endpoints[rank].connect(&to, &Doorbell::new().unwrap(), &|| None, PATIENCE).unwrap_err();
        let text = e.to_string();
        let ours = endpoints[rank].info().verbs.first().unwrap().to_string();
        assert!(matches!(e, Error::Unsupported { .. }), "{text}");
        assert!(text.contains("far_away port 1") && text.contains(&ours) && text.contains("share a subnet"), "{text}");
    }
    // A rank that was not configured to use RDMA has no ports.
    let tcp = Endpoint::new(1, SECRET, &crate::harness::config(TransportChoice::Tcp)).unwrap();
    let e = connect(&endpoints[0], &tcp, 1).unwrap_err().to_string();
    assert!(e.contains("The other: none"), "{e}");
}
