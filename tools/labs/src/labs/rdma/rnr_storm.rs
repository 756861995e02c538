//! A sender that is faster than its receiver posts RECVs, and retries for ever.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ibverbs_sys::ibv_access_flags as Access;
use verbs_hello::verbs::Mr;

use super::Pair;
use crate::ranks::Announced;

const MESSAGES: u64 = 20;
/// Time that the receiver spends on each message before it posts the next RECV.
const WORK: Duration = Duration::from_millis(20);
/// Code of 0.01 ms: how long a sender shall pause.
const SHORTEST_PAUSE: u8 = 1;
/// Code of "for ever".
const FOR_EVER: u8 = 7;

pub(crate) fn run(fixed: bool) -> Result<u8> {
    let mut pair = Pair::new(SHORTEST_PAUSE, FOR_EVER)?;
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
    // The kernel asks the device anew when its last answer is older than 10 ms.
    std::thread::sleep(Duration::from_millis(50));
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
fn counters(pair: &Pair) -> Result<(u64, u64)> {
    let folder: PathBuf =
        ["/sys/class/infiniband", pair.local.context.name(), "ports", &pair.local.gid.port.to_string(), "hw_counters"]
            .iter()
            .collect();
    let read = |name: &str| {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        text.trim().parse::<u64>().with_context(|| format!("{}: {text:?}", path.display()))
    };
    Ok((read("sent_pkts")?, read("rcvd_rnr_err")?))
}
