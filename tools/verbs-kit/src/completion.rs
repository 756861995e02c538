//! A decoded work completion: a completion queue's report on one finished request.

use std::fmt;

use crate::words;

/// One work completion (`struct ibv_wc`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The number of the request.
    pub wr_id: u64,
    /// `enum ibv_wc_status`; 0 is success.
    pub status: u32,
    /// `enum ibv_wc_opcode`. The device need not set it when the request failed.
    pub opcode: u32,
    /// Bytes received (RECV) or read (READ).
    pub byte_len: u32,
    /// The sender's 32 bits of immediate data, if any.
    pub imm: Option<u32>,
    /// The vendor's error code.
    pub vendor_err: u32,
    /// Our QP's number.
    pub qp_num: u32,
}

impl Completion {
    /// True if the request was executed.
    pub fn ok(&self) -> bool {
        self.status == 0
    }
}

impl fmt::Display for Completion {
    /// Prints only valid fields: after an error the opcode and the length are invalid, and a SEND has no length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = words::wc_status(self.status);
        write!(f, "wr_id {}, status {} ({})", self.wr_id, status.name, self.status)?;
        if !self.ok() {
            return write!(f, ": {}; vendor_err {:#x}", status.meaning, self.vendor_err);
        }
        write!(f, ", opcode {}", words::wc_opcode(self.opcode))?;
        if matches!(self.opcode, 2 | 128 | 129) {
            write!(f, ", byte_len {}", self.byte_len)?;
        }
        match self.imm {
            // The sender's own completion carries none, even if the driver sets the flag (as rxe does).
            Some(imm) if self.opcode >= 128 => write!(f, ", imm_data {imm:#x}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: Completion =
        Completion { wr_id: 7, status: 0, opcode: 128, byte_len: 21, imm: None, vendor_err: 0, qp_num: 17 };

    #[test]
    fn only_valid_fields_are_shown() {
        assert_eq!(DONE.to_string(), "wr_id 7, status SUCCESS (0), opcode RECV, byte_len 21");
        let sent = Completion { opcode: 0, byte_len: 99, ..DONE };
        assert_eq!(sent.to_string(), "wr_id 7, status SUCCESS (0), opcode SEND");
        let imm = Completion { opcode: 129, imm: Some(0xbeef), ..DONE };
        assert_eq!(
            imm.to_string(),
            "wr_id 7, status SUCCESS (0), opcode RECV_RDMA_WITH_IMM, byte_len 21, imm_data 0xbeef"
        );
        let sender = Completion { opcode: 1, imm: Some(0), ..DONE };
        assert_eq!(sender.to_string(), "wr_id 7, status SUCCESS (0), opcode RDMA_WRITE");
        let failed = Completion { status: 5, vendor_err: 0x88, ..DONE };
        assert_eq!(
            failed.to_string(),
            "wr_id 7, status WR_FLUSH_ERR (5): never executed: the QP was in state ERR; look at the first completion \
             that failed; vendor_err 0x88"
        );
    }
}
