//! Requests that are built call by call: `ibv_wr_start`, `ibv_wr_rdma_write`, `ibv_wr_set_sge`, `ibv_wr_complete`.

use std::ffi::{c_int, c_void};
use std::sync::PoisonError;

use softroce::{Datagram, Remote, SendFlags, SendOp, SendRequest, Sge};

use crate::ah::Ah;
use crate::code;
use crate::post::{self, Pending, Qp};
use crate::tables::ibv_qp_ex;
use crate::types::{ibv_ah, ibv_data_buf, ibv_mw, ibv_mw_bind_info, ibv_qp, ibv_sge};
use crate::window;

/// A queue pair with the table of its calls.
pub(crate) fn table(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: Some(cmp_swp),
        wr_atomic_fetch_add: Some(fetch_add),
        wr_bind_mw: Some(bind_mw),
        wr_local_inv: Some(local_inv),
        wr_rdma_read: Some(rdma_read),
        wr_rdma_write: Some(rdma_write),
        wr_rdma_write_imm: Some(rdma_write_imm),
        wr_send: Some(send),
        wr_send_imm: Some(send_imm),
        wr_send_inv: Some(send_inv),
        wr_send_tso: None,
        wr_set_ud_addr: Some(set_ud_addr),
        wr_set_xrc_srqn: None,
        wr_set_inline_data: Some(set_inline_data),
        wr_set_inline_data_list: Some(set_inline_data_list),
        wr_set_sge: Some(set_sge),
        wr_set_sge_list: Some(set_sge_list),
        wr_start: Some(start),
        wr_complete: Some(complete),
        wr_abort: Some(abort),
        wr_atomic_write: None,
        wr_flush: None,
    }
}

/// Works on the batch of a queue pair.
unsafe fn batch<R>(qp: *mut ibv_qp_ex, f: impl FnOnce(&mut Vec<Pending>) -> R) -> R {
    // SAFETY: a queue pair of ours.
    let ours = unsafe { &*qp.cast::<Qp>() };
    f(&mut ours.batch.lock().unwrap_or_else(PoisonError::into_inner).0)
}

/// Begins a request with the queue pair's `wr_id` and `wr_flags`.
unsafe fn begin(qp: *mut ibv_qp_ex, op: SendOp) {
    // SAFETY: a queue pair of ours, whose fields the program set.
    unsafe {
        let (id, flags) = ((*qp).wr_id, post::flags((*qp).wr_flags));
        batch(qp, |all| all.push(Pending { id, op, flags, sges: Vec::new(), inline: None, to: None, refused: None }));
    }
}

/// Goes on with the request that was begun last.
unsafe fn change(qp: *mut ibv_qp_ex, f: impl FnOnce(&mut Pending)) {
    // SAFETY: as the caller promises.
    unsafe { batch(qp, |all| all.last_mut().map(f)) };
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: as the caller promises.
    unsafe { batch(qp, Vec::clear) };
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as the caller promises.
    unsafe { batch(qp, Vec::clear) };
}

/// Posts the batch, or nothing of it where one is refused (`ibv_wr_complete(3)`).
unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as the caller promises: memory of the requests stays until they complete.
    unsafe {
        let all = batch(qp, std::mem::take);
        if let Some(e) = all.iter().find_map(|p| p.refused.as_ref()) {
            return code(e);
        }
        let lists: Vec<Vec<Sge>> = all
            .iter()
            .map(|p| match &p.inline {
                Some(bytes) => vec![Sge { addr: bytes.as_ptr() as u64, len: bytes.len() as u32, lkey: 0 }],
                None => p.sges.clone(),
            })
            .collect();
        let requests: Vec<SendRequest<'_>> = all
            .iter()
            .zip(&lists)
            .map(|(p, sges)| {
                let flags = SendFlags { inline: p.inline.is_some(), ..p.flags };
                SendRequest { id: p.id, op: p.op, sges, flags, to: p.to.clone() }
            })
            .collect();
        (*qp.cast::<Qp>()).inner.post_send_all(&requests).map_or_else(|(_, e)| code(&e), |()| 0)
    }
}

unsafe extern "C" fn cmp_swp(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, compare: u64, swap: u64) {
    // SAFETY: as the caller promises; so in all that follow.
    unsafe { begin(qp, SendOp::CompareSwap { remote: Remote { addr, rkey }, compare, swap }) };
}

unsafe extern "C" fn fetch_add(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, add: u64) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::FetchAdd { remote: Remote { addr, rkey }, add }) };
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: see `cmp_swp`; a window of ours, and the program's output buffer with a region of ours.
    unsafe { begin(qp, window::request(mw, rkey, &*info)) };
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::LocalInv(rkey)) };
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::Read(Remote { addr, rkey })) };
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, addr: u64) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::Write(Remote { addr, rkey })) };
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, addr: u64, imm: u32) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::WriteImm(Remote { addr, rkey }, imm.to_ne_bytes())) };
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::Send) };
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, imm: u32) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::SendImm(imm.to_ne_bytes())) };
}

unsafe extern "C" fn send_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: see `cmp_swp`.
    unsafe { begin(qp, SendOp::SendInv(rkey)) };
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: see `cmp_swp`; an address handle of ours.
    unsafe {
        let path = ah.cast::<Ah>().as_ref().map(|ah| ah.path.clone());
        change(qp, |p| p.to = path.map(|path| Datagram { path, qpn, qkey }));
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, at: *mut c_void, len: usize) {
    let list = ibv_data_buf { addr: at, length: len };
    // SAFETY: see `cmp_swp`.
    unsafe { set_inline_data_list(qp, 1, &raw const list) };
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    let mut bytes = Vec::new();
    for i in 0..count {
        // SAFETY: the program's list and its buffers, which are copied here.
        unsafe {
            let part = &*list.add(i);
            if part.length > 0 {
                bytes.extend_from_slice(std::slice::from_raw_parts(part.addr.cast::<u8>(), part.length));
            }
        }
    }
    // SAFETY: see `cmp_swp`.
    unsafe { change(qp, |p| p.inline = Some(bytes)) };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, len: u32) {
    // SAFETY: see `cmp_swp`.
    unsafe { change(qp, |p| p.sges.push(Sge { addr, len, lkey })) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: see `cmp_swp`; the program's list.
    unsafe {
        let sges = post::elements(list, c_int::try_from(count).unwrap_or(c_int::MAX));
        change(qp, |p| match sges {
            Ok(sges) => p.sges.extend_from_slice(sges),
            Err(e) => p.refused = Some(e),
        });
    }
}
