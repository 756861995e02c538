//! Datagrams: one packet each, from any sender that has the key (InfiniBand specification, 9.8.3).

use super::scatter::scatter;
use super::{Machine, Turn};
use crate::counters::COUNTING;
use crate::queue::Status;
use crate::wire::grh;
use crate::wire::icrc::Route;
use crate::wire::packet::{ICRC_LEN, padding};
use crate::wire::{Bth, Deth, ImmDt, Packet};

impl Machine {
    /// Takes a datagram. One without the key, without a receive, or too long for it is dropped, and no one is notified.
    pub(super) fn take_datagram(&mut self, packet: &Packet<'_>, route: &Route, turn: &mut Turn<'_>) {
        let Some(deth) = packet.headers.deth.filter(|deth| deth.qkey == self.attr.qkey) else {
            COUNTING.qkey_viol_cntr.add(1);
            return;
        };
        let bytes = packet.payload;
        let Some(recv) = self.take_recv() else { return };
        let total = grh::LEN + bytes.len();
        let imm = packet.headers.imm.map_or(0, |_| ImmDt::LEN);
        let udp = 8 + Bth::LEN + Deth::LEN + imm + bytes.len() + usize::from(padding(bytes.len())) + ICRC_LEN;
        let header = grh::build(route, udp as u16);
        let (pd, sges) = (self.recv_pd(), recv.sges.as_slice());
        let status = if total as u64 > recv.sges.len() {
            Status::LocalLength
        } else if scatter(turn.memory, pd, sges, 0, &header, false).is_err()
            || scatter(turn.memory, pd, sges, grh::LEN as u32, bytes, true).is_err()
        {
            Status::LocalProtection
        } else {
            Status::Success
        };
        let mut wc = self.recv_completion(recv.id, status);
        (wc.byte_len, wc.src_qpn, wc.grh) = (total as u32, deth.src_qpn, true);
        wc.ipv4 = route.dst.is_ipv4();
        wc.imm = packet.headers.imm.map(|imm| imm.0);
        self.parts.recv_cq.push(wc, packet.headers.bth.solicited);
    }
}
