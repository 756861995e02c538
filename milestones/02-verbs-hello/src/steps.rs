//! The attributes of each step of a queue pair's life, with their meanings. `states` hands them to the device.
//!
//! A reliable connection goes RESET → INIT → RTR → RTS, and each step must set exactly the attributes listed here
//! (InfiniBand specification, volume 1, section 11.2.5; manual page `ibv_modify_qp`).

use verbs_kit::endpoint::Endpoint;
use verbs_kit::words;

/// One attribute of a step, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attribute {
    /// Its name in `struct ibv_qp_attr`.
    pub(crate) name: &'static str,
    /// Its decoded value.
    pub(crate) value: String,
    /// Its purpose.
    pub(crate) meaning: &'static str,
}

fn attribute(name: &'static str, value: impl ToString, meaning: &'static str) -> Attribute {
    Attribute { name, value: value.to_string(), meaning }
}

/// RESET → INIT: the QP's port and the peer's access rights. From here on RECVs can be posted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Init {
    /// Port of the device.
    pub(crate) port_num: u8,
    /// Entry of the port's partition key table.
    pub(crate) pkey_index: u16,
    /// The peer's access rights to our memory: bits of `enum ibv_access_flags`.
    pub(crate) access: u32,
}

/// INIT → RTR, ready to receive: the peer's address. From here on the QP accepts packets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rtr {
    /// The peer.
    pub(crate) peer: Endpoint,
    /// Payload bytes per packet.
    pub(crate) path_mtu: u32,
    /// READs and atomics that the peer may have outstanding.
    pub(crate) max_dest_rd_atomic: u8,
    /// Code of the pause we request from the peer when no RECV is posted.
    pub(crate) min_rnr_timer: u8,
    /// Our port.
    pub(crate) port_num: u8,
    /// Index of our own GID.
    pub(crate) sgid_index: u8,
    /// Routers that a packet may pass.
    pub(crate) hop_limit: u8,
    /// Packets carry GIDs: always true on Ethernet.
    pub(crate) is_global: bool,
}

/// RTR → RTS, ready to send: timeouts and retries. From here on SENDs can be posted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rts {
    /// Sequence number of our first packet.
    pub(crate) sq_psn: u32,
    /// Code of the acknowledgement timeout.
    pub(crate) timeout: u8,
    /// Retries after such a timeout; 7 at most.
    pub(crate) retry_cnt: u8,
    /// Retries when the peer has no RECV posted; 7 means forever.
    pub(crate) rnr_retry: u8,
    /// READs and atomics that we may have outstanding.
    pub(crate) max_rd_atomic: u8,
}

impl Rtr {
    /// Towards `peer`, from entry `sgid_index` of our GID table.
    pub(crate) fn to(peer: Endpoint, path_mtu: u32, port_num: u8, sgid_index: u8, is_global: bool) -> Rtr {
        Rtr { peer, path_mtu, max_dest_rd_atomic: 1, min_rnr_timer: 12, port_num, sgid_index, hop_limit: 64, is_global }
    }
}

impl Rts {
    /// Gives up after about a second, so that a dead peer becomes an error instead of an endless wait.
    pub(crate) fn patient(sq_psn: u32) -> Rts {
        Rts { sq_psn, timeout: 14, retry_cnt: 6, rnr_retry: 6, max_rd_atomic: 1 }
    }
}

impl Init {
    /// In the order of the header.
    pub(crate) fn attributes(&self) -> Vec<Attribute> {
        vec![
            attribute("qp_access_flags", words::access(self.access), "what the peer may do to our memory, at most"),
            attribute("pkey_index", self.pkey_index, "the partition: like a VLAN; 0 is the default one"),
            attribute("port_num", self.port_num, "the port that it sends and receives through"),
        ]
    }
}

impl Rtr {
    /// In the order of the header.
    pub(crate) fn attributes(&self) -> Vec<Attribute> {
        let mut list = vec![
            attribute(
                "path_mtu",
                self.path_mtu,
                "payload bytes per packet; the same on both sides, or packets are dropped",
            ),
            attribute("rq_psn", self.peer.psn, "sequence number of the first packet to expect: the peer's sq_psn"),
            attribute("dest_qp_num", self.peer.qpn, "the peer's QP; packets from any other are dropped"),
        ];
        if self.is_global {
            list.extend([
                attribute("ah_attr.grh.dgid", self.peer.gid, "the peer's address (RoCE v2: its IP address)"),
                attribute("ah_attr.grh.sgid_index", self.sgid_index, "our address: an index of our GID table"),
                attribute("ah_attr.grh.hop_limit", self.hop_limit, "routers that a packet may pass: IP's time to live"),
            ]);
        } else {
            list.push(attribute("ah_attr.dlid", self.peer.lid, "the peer's address within the InfiniBand subnet"));
        }
        list.extend([
            attribute("ah_attr.is_global", u8::from(self.is_global), "1: packets carry GIDs (always, on Ethernet)"),
            attribute("ah_attr.port_num", self.port_num, "the port to send from; the one given in INIT"),
            attribute("max_dest_rd_atomic", self.max_dest_rd_atomic, "READs and atomics of the peer we serve at once"),
            attribute(
                "min_rnr_timer",
                format!("{} ({})", self.min_rnr_timer, rnr_timer(self.min_rnr_timer)),
                "how long the peer shall pause when we have no RECV posted",
            ),
        ]);
        list
    }
}

impl Rts {
    /// In the order of the header.
    pub(crate) fn attributes(&self) -> Vec<Attribute> {
        vec![
            attribute(
                "sq_psn",
                self.sq_psn,
                "sequence number of our first packet; random, so that old packets do not fit",
            ),
            attribute(
                "max_rd_atomic",
                self.max_rd_atomic,
                "our READs and atomics at once; at most the peer's max_dest",
            ),
            attribute(
                "timeout",
                format!("{} ({})", self.timeout, ack_timeout(self.timeout)),
                "how long to wait for an acknowledgement before sending again",
            ),
            attribute("retry_cnt", self.retry_cnt, "how often; then the request fails with RETRY_EXC_ERR"),
            attribute("rnr_retry", self.rnr_retry, "the same when the peer has no RECV posted; 7 means forever"),
        ]
    }
}

/// The attributes as lines of text, in columns.
pub(crate) fn lines(attributes: &[Attribute]) -> Vec<String> {
    let name = attributes.iter().map(|a| a.name.len()).max().unwrap_or(0);
    let value = attributes.iter().map(|a| a.value.len()).max().unwrap_or(0);
    attributes.iter().map(|a| format!("  {:<name$}  {:<value$}  {}", a.name, a.value, a.meaning)).collect()
}

/// The time until an unacknowledged packet is sent again: 4.096 us * 2^timeout; 0 waits forever.
fn ack_timeout(timeout: u8) -> String {
    match timeout {
        0 => "forever".to_owned(),
        n => duration_us(4.096 * (1u64 << (n & 31)) as f64),
    }
}

/// The pause requested by a receiver without a posted RECV: the 5-bit code of the specification.
fn rnr_timer(code: u8) -> String {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    duration_us(f64::from(HUNDREDTHS_OF_MS[usize::from(code & 31)]) * 10.0)
}

fn duration_us(us: f64) -> String {
    match us {
        us if us < 1e3 => format!("{us:.1} us"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(attributes: &[Attribute]) -> Vec<&str> {
        attributes.iter().map(|a| a.name).collect()
    }

    #[test]
    fn roce_packets_carry_gids_and_infiniband_ones_a_lid() {
        let peer: Endpoint = "qpn=18 psn=77 gid=::ffff:10.9.9.1 lid=3 mtu=1024".parse().expect("valid");
        let roce = Rtr::to(peer, 1024, 1, 1, true).attributes();
        assert!(names(&roce).contains(&"ah_attr.grh.dgid") && !names(&roce).contains(&"ah_attr.dlid"));
        let ib = Rtr::to(peer, 1024, 1, 1, false).attributes();
        assert!(!names(&ib).contains(&"ah_attr.grh.dgid") && names(&ib).contains(&"ah_attr.dlid"));
        let psn = roce.iter().find(|a| a.name == "rq_psn").expect("there");
        assert_eq!(psn.value, "77", "we expect what the peer sends first");
    }

    #[test]
    fn codes_are_decoded_and_columns_line_up() {
        let lines = lines(&Rts::patient(9).attributes());
        assert_eq!(lines[0].find("sequence"), lines[4].find("the same"));
        assert!(lines[2].starts_with("  timeout        14 (67.11 ms)  how long"), "{}", lines[2]);
    }

    #[test]
    fn retries_end() {
        let rts = Rts::patient(0);
        assert!(rts.retry_cnt < 7 && rts.rnr_retry < 7 && rts.timeout > 0, "7 and 0 mean forever");
    }

    #[test]
    fn times() {
        assert_eq!(ack_timeout(0), "forever");
        assert_eq!(ack_timeout(1), "8.2 us");
        assert_eq!(ack_timeout(14), "67.11 ms");
        assert_eq!(ack_timeout(31), "8796.09 s");
        assert_eq!(rnr_timer(0), "655.36 ms");
        assert_eq!(rnr_timer(1), "10.0 us");
        assert_eq!(rnr_timer(12), "640.0 us");
        assert_eq!(rnr_timer(31), "491.52 ms");
    }
}
