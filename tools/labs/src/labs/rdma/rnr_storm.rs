//! A sender that is faster than its receiver posts RECVs, and retries forever.

use std::time::Duration;

use anyhow::{Result, ensure};
use verbs_kit::verbs::Mr;
use verbs_kit::verbs::ffi::ibv_access_flags as Access;

use super::{Pair, pair};
use crate::ranks::Announced;

const MESSAGES: u64 = 20;
/// Time that the receiver spends on each message before it posts the next RECV.
const WORK: Duration = Duration::from_millis(20);
/// Code of 0.01 ms: how long a sender shall pause.
const SHORTEST_PAUSE: u8 = 1;
/// RNR retry count that means forever.
const FOR_EVER: u8 = 7;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    let mut pair = pair(SHORTEST_PAUSE, FOR_EVER)?;
    let data = Mr::new(&pair.pd, 64, Access::IBV_ACCESS_LOCAL_WRITE.0)?;
    let inbox = Mr::new(&pair.pd, 64, Access::IBV_ACCESS_LOCAL_WRITE.0)?;
    let before = counters(&pair)?;
    if fixed {
        // The receiver owes the sender these: the sender has as many credits, and sends no more.
        for id in 0..MESSAGES {
            pair.receiver.qp.post_recv(id, &inbox, 0..64)?;
        }
    }
    for id in 0..MESSAGES {
        pair.sender.qp.post_send(id, &data, 0..64)?;
    }
    for id in 0..MESSAGES {
        if !fixed {
            std::thread::sleep(WORK);
            pair.receiver.qp.post_recv(id, &inbox, 0..64)?;
        }
        pair.receiver.complete()?;
        pair.sender.complete()?;
    }
    let after = counters(&pair)?;
    let (packets, refused) = (after.0 - before.0, after.1 - before.1);
    println!("{MESSAGES} messages arrived, in order, without an error");
    println!("{packets} packets sent, {refused} refused because no RECV was posted (RNR)");
    ensure!(fixed == (refused == 0), "{refused} packets were refused");
    match refused {
        0 => Ok(0),
        _ => Err(Announced("the sender has no error, and the wire is full of repetitions".to_owned()).into()),
    }
}

/// Packets sent, and refusals, by the device's own counters.
#[cfg(not(feature = "verbs"))]
fn counters(_: &Pair) -> Result<(u64, u64)> {
    let counters = softroce::counters();
    Ok((counters.sent_pkts, counters.rcvd_rnr_err))
}

/// Packets sent, and refusals, by the hardware counters of a kernel's device.
#[cfg(feature = "verbs")]
fn counters(pair: &Pair) -> Result<(u64, u64)> {
    use anyhow::Context as _;

    // The kernel reads the device again when its last values are older than 10 ms.
    std::thread::sleep(Duration::from_millis(50));
    let (device, port) = (pair.local.context.name(), pair.local.gid.port);
    let folder = format!("/sys/class/infiniband/{device}/ports/{port}/hw_counters");
    let read = |name: &str| {
        let path = format!("{folder}/{name}");
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        text.trim().parse::<u64>().with_context(|| format!("{path}: {text:?}"))
    };
    Ok((read("sent_pkts")?, read("rcvd_rnr_err")?))
}
