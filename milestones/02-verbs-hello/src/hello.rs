//! The conversation step by step, with every attribute, through the objects of [`verbs_kit::verbs`].

use std::hash::{BuildHasher, RandomState};

use anyhow::{Context as _, Result, anyhow, ensure};
use verbs_kit::choice::Choice;
use verbs_kit::endpoint::Endpoint;
use verbs_kit::say;
use verbs_kit::side::Side;
use verbs_kit::verbs::ffi::ibv_access_flags;
use verbs_kit::verbs::{Cq, Depth, Local, Mr, Pd, Qp};

use crate::cli::Talk;
use crate::endpoint::parse;
use crate::requests::{RECV_ID, Role, SEND_ID, await_completion, show};
use crate::states::{to_init, to_rtr, to_rts};
use crate::steps::{self, Attribute, Init, Rtr, Rts};

/// `IBV_ACCESS_LOCAL_WRITE`: our own device may write here, as RECV requires. The peer gets no rights: SEND and RECV
/// need none, because the receiver chooses where the bytes go.
const LOCAL_WRITE: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;

pub(crate) fn run(role: Role, local: &Local, mut side: Side, choice: &Choice, talk: &Talk, text: &str) -> Result<()> {
    // 1. The objects.
    let pd = Pd::new(&local.context)?;
    let cq = Cq::new(&local.context, 16)?;
    let (inbox, outbox) = (talk.recv_bytes as usize, text.len());
    let mr = Mr::new(&pd, inbox + outbox, LOCAL_WRITE)?;
    say!("memory region: {} bytes at {:#x}, lkey {:#x}, LOCAL_WRITE", mr.len(), mr.address(), mr.lkey());
    let mut qp = Qp::new(&pd, &cq, Depth { send: 4, receive: 4 })?;
    say!("QP {} created, kind RC, state {}", qp.number(), qp.state()?);

    // 2. RESET -> INIT.
    let init = Init { port_num: local.gid.port, pkey_index: 0, access: LOCAL_WRITE };
    to_init(&mut qp, &init)?;
    explain("RESET -> INIT", &qp, &init.attributes(), talk)?;

    // 3. A posted buffer for the peer's message, before the peer can send: a message without a RECV is refused.
    say!("RECV of up to {inbox} bytes, wr_id {RECV_ID}");
    qp.post_recv(RECV_ID, &mr, 0..inbox)?;

    // 4. Exchange of addresses.
    let psn = RandomState::new().hash_one(qp.number()) as u32 & 0xff_ffff;
    let mine = Endpoint { qpn: qp.number(), psn, gid: local.gid.gid, lid: local.port.lid, mtu: local.mtu };
    say!("to the peer:   {mine}");
    side.send(&mine.to_string())?;
    let line = side.receive("endpoint")?;
    let peer = parse(&line).map_err(|e| anyhow!("{} is no verbs-hello: {e}", side.peer()))?;
    say!("from the peer: {peer}");

    // 5. INIT -> RTR -> RTS.
    let mtu = mine.mtu.min(peer.mtu);
    let sgid_index = u8::try_from(local.gid.index).context("GID index")?;
    let rtr = Rtr::to(peer, mtu, local.gid.port, sgid_index, local.port.ethernet);
    to_rtr(&mut qp, &rtr)?;
    explain("INIT -> RTR", &qp, &rtr.attributes(), talk)?;
    let rts = Rts::patient(mine.psn);
    to_rts(&mut qp, &rts)?;
    explain("RTR -> RTS", &qp, &rts.attributes(), talk)?;

    // 6. A QP that is not yet in RTR drops packets, and the sender repeats them only after `timeout`.
    side.meet("ready")?;

    // 7. Hello.
    let mut early = Vec::new();
    let send = |qp: &mut Qp| {
        mr.write(inbox, text.as_bytes())?;
        say!("SEND of {outbox} bytes, wr_id {SEND_ID}");
        qp.post_send(SEND_ID, &mr, inbox..inbox + outbox)
    };
    if role == Role::Client {
        send(&mut qp)?;
    }
    let received = await_completion(RECV_ID, &mut early, choice.timeout, |deadline| cq.spin(deadline))?;
    let length = received.byte_len as usize;
    ensure!(length <= inbox, "byte_len {length} for a buffer of {inbox}");
    show(&mr.read(0..length)?);
    if role == Role::Server {
        send(&mut qp)?;
    }
    await_completion(SEND_ID, &mut early, choice.timeout, |deadline| cq.spin(deadline))?;

    // 8. A destroyed QP acknowledges nothing: wait until the peer has all its completions.
    side.meet("done")?;
    say!("done");
    Ok(())
}

/// Prints one step: its attributes, and the state that the device reports.
fn explain(step: &str, qp: &Qp, attributes: &[Attribute], talk: &Talk) -> Result<()> {
    say!("{step}, the device says {}", qp.state()?);
    if !talk.brief {
        for line in steps::lines(attributes) {
            say!("{line}");
        }
    }
    Ok(())
}
