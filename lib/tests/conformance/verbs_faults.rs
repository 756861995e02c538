//! What only goes wrong over RDMA: settings, subnets, loss, limits.

use std::io::Write;
use std::process::Command;
use std::sync::Arc;

use crate::harness::*;
use tinynccl::config::TransportChoice;
use tinynccl::error::{Error, Result};
use tinynccl::transport::{ConnectTo, Doorbell, Endpoint, LinkPair, rdma_ports};

fn skip(what: &str) {
    let _ = writeln!(std::io::stderr().lock(), "SKIPPED: {what}");
}

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
        let e = Endpoint::new(0, TOKEN, &config).unwrap_err();
        let text = e.to_string();
        assert!(matches!(e, Error::Config { .. }) && text.contains(setting), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn without_a_common_subnet_both_ends_name_all_ports_at_once() {
    if !has_verbs() {
        return;
    }
    let config = config(TransportChoice::Verbs);
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, TOKEN, &of_rank(&config, rank)).unwrap());
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
    // A rank that was not told to use RDMA has no ports.
    let tcp = Endpoint::new(1, TOKEN, &crate::harness::config(TransportChoice::Tcp)).unwrap();
    let e = connect(&endpoints[0], &tcp, 1).unwrap_err().to_string();
    assert!(e.contains("Rank 1: none"), "{e}");
}

/// Sets or takes back the loss of packets that leave node b for node c: the other tests use the link of a and b.
fn lose(percent: Option<u8>) {
    let mut command = Command::new("tc");
    command.args(["qdisc", "replace", "dev", "bc", "root"]);
    match percent {
        Some(percent) => command.args(["netem", "loss", &format!("{percent}%")]),
        None => command.arg("pfifo"),
    };
    assert!(command.status().unwrap().success(), "{command:?}");
}

#[test]
fn when_no_packet_gets_through_the_status_names_it() {
    if !has_verbs() || std::env::var("RXE_VM").as_deref() != Ok("triangle") {
        return skip("total loss over RDMA: it takes scripts/rxe-vm.sh --triangle");
    }
    let mut config = config(TransportChoice::Verbs);
    (config.verbs_timeout, config.verbs_retries) = (10, 3);
    let endpoints = ["rxe_bc", "rxe_cb"].map(|device| {
        config.verbs_device = Some(device.to_owned());
        Arc::new(Endpoint::new(usize::from(device == "rxe_cb"), TOKEN, &config).unwrap())
    });
    let [mut a, mut b] = both(|rank| {
        let bell = Doorbell::new().unwrap();
        let info = endpoints[1 - rank].info();
        let to = ConnectTo { comm: 0, peer_rank: 1 - rank, info: &info, channel: 0, options: OPTIONS };
        let link = endpoints[rank].connect(&to, &bell, &|| None, PATIENCE).unwrap();
        End { link, bell, endpoints: vec![endpoints[rank].clone()] }
    });
    send_from(&mut a.link, 0, 5000);
    recv_into(&mut b.link, 0, 5000);
    lose(Some(100));
    let sleeper = std::thread::spawn(move || {
        // Nothing comes for it; its own queue pair learns nothing. The other end closes the link.
        let lost = recv_sleeping(&mut b, 1, 8);
        (b, lost)
    });
    let lost = (1u32..).map(|seq| send_sleeping(&mut a, seq, 8)).find(Result::is_err).unwrap();
    let text = lost.as_ref().unwrap_err().to_string();
    assert!(is_peer_lost(&lost, 0), "{text}");
    assert!(text.contains("status 12") && text.contains("3 repetitions") && text.contains("10.1.23.3"), "{text}");
    // Every waiter gets it, the other half too.
    assert!(is_peer_lost(&a.link.recv.check_peer(), 0));
    assert!(is_peer_lost(&a.link.recv.arm(), 0));
    drop(a);
    let (_b, lost) = sleeper.join().unwrap();
    assert!(is_peer_lost(&lost, 1), "{lost:?}");
    lose(None);
}

#[test]
fn a_low_limit_of_locked_memory_is_explained() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    if !has_verbs() || limit.is_none_or(|bytes| bytes > 256 << 10) {
        return skip("locked memory: it takes scripts/rxe-vm.sh --memlock 64");
    }
    let config = config(TransportChoice::Verbs);
    let endpoints = [0, 1].map(|rank| Endpoint::new(rank, TOKEN, &of_rank(&config, rank)).unwrap());
    let errors = both(|rank| connect(&endpoints[rank], &endpoints[1 - rank], 1 - rank).unwrap_err().to_string());
    for e in errors {
        assert!(e.contains("limit of locked memory") && e.contains("ulimit -l"), "{e}");
    }
}
