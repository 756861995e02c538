//! The conversation of `hello` through the safe interface of the crate `ibverbs`: `unsafe` only for the two posts, and
//! one call for INIT, RTR and RTS. The crate hides the steps that this milestone shows, fixes the first sequence number
//! to 0 and the port to 1, and offers only SEND and RECV. Milestone 05 needs more.

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ibverbs::ibv_qp_type::IBV_QPT_RC;
use verbs_kit::choice::Choice;
use verbs_kit::completion::Completion;
use verbs_kit::endpoint::Endpoint;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::Local;
use verbs_kit::words;

use crate::cli::Talk;
use crate::endpoint::parse;
use crate::requests::{RECV_ID, Role, SEND_ID, await_completion, show};

pub(crate) fn run(role: Role, local: &Local, mut side: Side, choice: &Choice, talk: &Talk, text: &str) -> Result<()> {
    ensure!(choice.port == 1, "--port {}: crate ibverbs uses port 1 only; --api steps takes any", choice.port);
    ensure!(local.port.ethernet, "--api safe is written for RoCE here; --api steps takes InfiniBand too");
    let devices = ibverbs::devices().context("devices")?;
    let device = devices
        .iter()
        .find(|d| d.name().is_some_and(|n| n.to_bytes() == local.context.name().as_bytes()))
        .context("the device is gone")?;
    let context = device.open().with_context(|| format!("open {}", local.context.name()))?;
    let pd = context.alloc_pd().context("protection domain")?;
    let cq = context.create_cq(16, 0).context("completion queue")?;
    let mut inbox = pd.allocate::<u8>(talk.recv_bytes as usize).context("memory region")?;
    let mut outbox = pd.allocate::<u8>(text.len()).context("memory region")?;
    outbox.copy_from_slice(text.as_bytes());

    // The crate's `set_gid_index` takes a position in its own list, which has no empty entries, and panics beyond it.
    let place = context.gid_table().iter().position(|g| g.gid_index == local.gid.index && g.port_num == 1);
    let place = place.filter(|&p| p as u32 == local.gid.index);
    let Some(place) = place else {
        bail!("GID index {}: crate ibverbs cannot use a table with empty entries; --api steps can", local.gid.index)
    };
    let mut builder = pd.create_qp(&cq, &cq, IBV_QPT_RC);
    builder.set_gid_index(place as u32).set_max_send_wr(4).set_max_recv_wr(4);
    // The crate's default is 4 (65 us), too short for a software device.
    builder.set_timeout(14).set_retry_count(6).set_rnr_retry(6).set_min_rnr_timer(12);

    // MTU and the peer's first sequence number must be set before `build`, but our own QP's number is known only after
    // it. One exchange cannot negotiate both, so both sides must start with the same values.
    builder.set_path_mtu(words::mtu_number(local.mtu).context("MTU")?).set_rq_psn(0);
    let prepared = builder.build().context("queue pair")?;
    let endpoint = prepared.endpoint();
    let mine = Endpoint { qpn: endpoint.num, psn: 0, gid: local.gid.gid, lid: endpoint.lid, mtu: local.mtu };
    say!("QP {} created, kind RC", mine.qpn);
    say!("to the peer:   {mine}");
    side.send(&mine.to_string())?;
    let line = side.receive("endpoint")?;
    let peer = parse(&line).map_err(|e| anyhow!("{} is no verbs-hello: {e}", side.peer()))?;
    say!("from the peer: {peer}");
    ensure!(peer.psn == 0, "the peer's psn is {}, crate ibverbs wants 0: both sides must use --api safe", peer.psn);
    ensure!(peer.mtu == mine.mtu, "our MTU is {}, the peer's {}: give both the same --mtu", mine.mtu, peer.mtu);

    let gid = verbs_kit::verbs::ffi::ibv_gid { raw: peer.gid.0 }.into();
    let remote = ibverbs::QueuePairEndpoint { num: peer.qpn, lid: peer.lid, gid: Some(gid) };
    let mut qp = prepared.handshake(remote).context("handshake: INIT, RTR, RTS")?;
    say!("handshake: INIT, RTR and RTS in one call, path MTU {}", mine.mtu);
    // SAFETY: `inbox` lives until `qp` is gone, and is read only after the completion.
    unsafe { qp.post_receive(&mut inbox, .., RECV_ID) }.context("RECV")?;
    say!("RECV of up to {} bytes, wr_id {RECV_ID}", talk.recv_bytes);
    side.meet("ready")?;

    let mut poll = |deadline: std::time::Instant| {
        let mut room = [ibverbs::ibv_wc::default()];
        loop {
            if let [wc] = cq.poll(&mut room).context("poll")? {
                return Ok(Some(completion(wc)));
            }
            if std::time::Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::yield_now();
        }
    };
    let mut early = Vec::new();
    for step in 0..2 {
        if (step == 0) == (role == Role::Client) {
            say!("SEND of {} bytes, wr_id {SEND_ID}", text.len());
            // SAFETY: `outbox` lives until `qp` is gone, and nothing changes it after this.
            unsafe { qp.post_send(&mut outbox, .., SEND_ID) }.context("SEND")?;
            await_completion(SEND_ID, &mut early, choice.timeout, &mut poll)?;
        } else {
            let received = await_completion(RECV_ID, &mut early, choice.timeout, &mut poll)?;
            show(inbox.get(..received.byte_len as usize).context("byte_len beyond the buffer")?);
        }
    }
    side.meet("done")?;
    say!("done");
    Ok(())
}

fn completion(wc: &ibverbs::ibv_wc) -> Completion {
    let (status, vendor_err) = wc.error().unwrap_or((0, 0));
    Completion {
        wr_id: wc.wr_id(),
        status,
        opcode: wc.opcode(),
        byte_len: wc.len() as u32,
        imm: wc.imm_data().map(u32::from_be),
        vendor_err,
        qp_num: wc.qp_num,
    }
}
