//! Completion queues that are read field by field (`ibv_create_cq_ex`, `ibv_start_poll`, `ibv_wc_read_*`).

use std::ffi::{c_int, c_uint};

use crate::completion::{Cq, completion};
use crate::constants::ibv_wc_opcode;
use crate::extended::{ibv_cq_ex, ibv_poll_cq_attr};
use crate::types::{ibv_cq, ibv_wc};

/// Fills the table of the calls, with none that reads what a completion has not.
pub(crate) fn table(of: &mut ibv_cq_ex) {
    of.start_poll = Some(start_poll);
    of.next_poll = Some(next_poll);
    of.end_poll = Some(end_poll);
    of.read_opcode = Some(read_opcode);
    of.read_vendor_err = Some(read_vendor_err);
    of.read_byte_len = Some(read_byte_len);
    of.read_imm_data = Some(read_imm_data);
    of.read_qp_num = Some(read_qp_num);
    of.read_src_qp = Some(read_src_qp);
    of.read_wc_flags = Some(read_wc_flags);
    of.read_slid = Some(read_slid);
    of.read_sl = Some(read_sl);
    of.read_dlid_path_bits = Some(read_dlid_path_bits);
}

/// Goes to the next completion, if there is one.
unsafe fn step(queue: *mut ibv_cq_ex) -> c_int {
    // SAFETY: a queue of ours; one thread reads it at a time, as verbs asks for between `start_poll` and `end_poll`.
    unsafe {
        let ours = queue.cast::<Cq>();
        if let Err(e) = (*ours).inner.check_here() {
            return crate::code(&e);
        }
        let Some(wc) = (*ours).inner.poll_one() else { return libc::ENOENT };
        let wc = completion(&wc);
        ((*queue).status, (*queue).wr_id) = (wc.status, wc.wr_id);
        *(*ours).current.get() = wc;
    }
    0
}

unsafe extern "C" fn start_poll(queue: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the program's attributes.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: as the caller promises.
    unsafe { step(queue) }
}

unsafe extern "C" fn next_poll(queue: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { step(queue) }
}

unsafe extern "C" fn end_poll(_queue: *mut ibv_cq_ex) {}

/// The completion that the queue stands at.
unsafe fn current<'a>(queue: *mut ibv_cq_ex) -> &'a ibv_wc {
    // SAFETY: a queue of ours, which goes on only by the caller.
    unsafe { &*(*queue.cast::<Cq>()).current.get() }
}

macro_rules! reads {
    ($($name:ident: $type:ty = $field:ident $(. $part:tt)?;)*) => {$(
        unsafe extern "C" fn $name(queue: *mut ibv_cq_ex) -> $type {
            // SAFETY: as the caller promises.
            unsafe { current(queue) }.$field $(. $part)?
        }
    )*};
}

reads! {
    read_opcode: ibv_wc_opcode::Type = opcode;
    read_vendor_err: u32 = vendor_err;
    read_byte_len: u32 = byte_len;
    read_imm_data: u32 = imm_data;
    read_qp_num: u32 = qp_num;
    read_src_qp: u32 = src_qp;
    read_wc_flags: c_uint = wc_flags.0;
    read_sl: u8 = sl;
    read_dlid_path_bits: u8 = dlid_path_bits;
}

unsafe extern "C" fn read_slid(queue: *mut ibv_cq_ex) -> u32 {
    // SAFETY: as the caller promises.
    u32::from(unsafe { current(queue) }.slid)
}

/// The plain form of an extended queue, as `ibv_cq_ex_to_cq` has it.
const _: () = assert!(std::mem::offset_of!(ibv_cq_ex, comp_mask) == size_of::<ibv_cq>());
