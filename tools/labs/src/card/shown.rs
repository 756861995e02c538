//! Packets as lines of text.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use softroce::wire::aeth::rnr_nanos;
use softroce::wire::icrc::{Icrc, Route};
use softroce::wire::{Nak, Operation, Packet, Position, Syndrome};

/// A packet's number, what it does, and the values of its further headers.
pub(crate) fn packet(packet: &Packet<'_>) -> String {
    let headers = &packet.headers;
    let mut line = format!("psn {}  {:<19}", headers.bth.psn.get(), name(packet));
    if packet.opcode.has_payload() {
        let _ = write!(line, "  {:>4} B", packet.payload.len());
    }
    match (headers.reth, packet.opcode.operation) {
        (Some(reth), Operation::ReadRequest) => drop(write!(line, "  asks for {} B", reth.len)),
        (Some(reth), _) => drop(write!(line, " of {}", reth.len)),
        (None, _) => {}
    }
    if let Some(atomic) = headers.atomic {
        let _ = write!(line, "  operand {}", atomic.swap_or_add);
    }
    if let Some(aeth) = headers.aeth {
        let _ = write!(line, "  msn {}", aeth.msn);
        if let Syndrome::Rnr(code) = aeth.syndrome {
            let _ = write!(line, "  wait {:.2} ms", rnr_nanos(code) as f64 / 1e6);
        }
    }
    if let Some(ack) = headers.atomic_ack {
        let _ = write!(line, "  it was {}", ack.original);
    }
    if headers.bth.ack_req {
        line.push_str("  ack_req");
    }
    line
}

fn name(packet: &Packet<'_>) -> String {
    let operation = match (packet.opcode.operation, packet.headers.aeth.map(|aeth| aeth.syndrome)) {
        (Operation::Ack, Some(Syndrome::Rnr(_))) => return "RNR NAK".to_owned(),
        (Operation::Ack, Some(Syndrome::Nak(nak))) => {
            return match nak {
                Nak::Sequence => "NAK sequence error",
                Nak::InvalidRequest => "NAK invalid request",
                Nak::RemoteAccess => "NAK remote access",
                Nak::RemoteOperational => "NAK operation",
            }
            .to_owned();
        }
        (Operation::Ack, _) => return "ACK".to_owned(),
        (Operation::AtomicAck, _) => return "ATOMIC ACK".to_owned(),
        (Operation::CompareSwap, _) => return "COMPARE_SWAP".to_owned(),
        (Operation::FetchAdd, _) => return "FETCH_ADD".to_owned(),
        (Operation::ReadRequest, _) => return "READ request".to_owned(),
        (Operation::ReadResponse, _) => "READ response",
        (Operation::Send, _) => "SEND",
        (Operation::SendImm, _) => "SEND_IMM",
        (Operation::SendInv, _) => "SEND_INV",
        (Operation::Write, _) => "WRITE",
        (Operation::WriteImm, _) => "WRITE_IMM",
    };
    let position = match packet.opcode.position {
        Position::First => "first",
        Position::Middle => "mid",
        Position::Last => "last",
        Position::Only => "only",
    };
    format!("{operation} {position}")
}

/// A packet of a trace.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    /// Nanoseconds since the trace's first packet.
    nanos: u64,
    route: Route,
    /// IPv4 identification.
    id: u16,
    /// UDP payload.
    pub(crate) bytes: Vec<u8>,
}

/// Prints a trace that `TINYROCE_TRACE` wrote.
pub(crate) fn print(trace: &Path) -> Result<()> {
    let file = std::fs::read(trace).with_context(|| format!("reading {}", trace.display()))?;
    let records = read(&file).with_context(|| format!("{} is no trace of a card", trace.display()))?;
    for record in &records {
        println!("{}", line(record));
    }
    Ok(())
}

fn line(Record { nanos, route, id, bytes }: &Record) -> String {
    let icrc = if Icrc::new(*route).check(bytes, *id) { "" } else { "  ICRC WRONG" };
    let what = match Packet::parse(bytes) {
        Ok(packet) => format!("qp {}  {}", packet.headers.bth.dest_qpn, self::packet(&packet)),
        Err(e) => e.to_string(),
    };
    format!("{:>8} us  {} > {}  {what}{icrc}", nanos / 1000, route.src, route.dst)
}

/// Reads a file of packets: pcap with nanoseconds, link type "raw IP", as `softroce` writes it.
pub(crate) fn read(file: &[u8]) -> Result<Vec<Record>> {
    let (header, mut rest) = file.split_at_checked(24).context("too short for a header")?;
    ensure!(header.starts_with(&0xa1b2_3c4d_u32.to_le_bytes()), "expected pcap with nanoseconds");
    let mut records = Vec::new();
    let mut start = None;
    // The last record may be cut off where the process was killed.
    while let Some((head, behind)) = rest.split_first_chunk::<16>() {
        let word = |at: usize| head[at..at + 4].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
        let (time, len) = (word(0) * 1_000_000_000 + word(4), word(8) as usize);
        let Some((ip, behind)) = behind.split_at_checked(len) else { break };
        rest = behind;
        let (src, dst, id, udp) = addresses(ip)?;
        let port = |at: usize| udp.get(at..at + 2).map_or(0, |b| u16::from_be_bytes([b[0], b[1]]));
        let route = Route { src: SocketAddr::new(src, port(0)), dst: SocketAddr::new(dst, port(2)) };
        let bytes = udp.get(8..).context("no UDP header")?.to_vec();
        records.push(Record { nanos: time.saturating_sub(*start.get_or_insert(time)), route, id, bytes });
    }
    Ok(records)
}

/// Source, destination, identification, and what follows the header.
fn addresses(ip: &[u8]) -> Result<(IpAddr, IpAddr, u16, &[u8])> {
    let short = "too short for an IP header";
    match ip.first().map(|byte| byte >> 4) {
        Some(4) => {
            let (header, rest) = ip.split_first_chunk::<20>().context(short)?;
            let quad = |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]).into();
            Ok((quad(12), quad(16), u16::from_be_bytes([header[4], header[5]]), rest))
        }
        Some(6) => {
            let (header, rest) = ip.split_first_chunk::<40>().context(short)?;
            let sixteen = |at: usize| Ipv6Addr::from(header[at..at + 16].try_into().unwrap_or([0; 16])).into();
            Ok((sixteen(8), sixteen(24), 0, rest))
        }
        _ => bail!("a packet that is neither IPv4 nor IPv6"),
    }
}

#[cfg(test)]
mod tests {
    use softroce::wire::{Bth, Headers, Opcode, Service};

    use super::*;

    /// A trace of one IPv4 packet, a SEND of one packet without payload.
    fn trace(damage: u8) -> Vec<u8> {
        let route = Route {
            src: "127.0.0.1:50000".parse().expect("address"),
            dst: "127.77.0.5:4791".parse().expect("address"),
        };
        let bth = Bth {
            opcode: Opcode::code(Service::Rc, Operation::Send, Position::Only),
            solicited: false,
            pad: 0,
            pkey: 0xffff,
            dest_qpn: 0x14003,
            ack_req: true,
            psn: softroce::psn::Psn::new(100),
        };
        let mut raw = [0; softroce::wire::packet::MAX_HEADERS];
        let n = Headers::new(bth).build(&mut raw);
        let mut udp = raw[..n].to_vec();
        udp.extend(Icrc::new(route).seal(&raw[..n], [], 0));
        udp[11] ^= damage;
        let len = (28 + udp.len()) as u32;
        let mut file = 0xa1b2_3c4d_u32.to_le_bytes().to_vec();
        file.extend([0; 20]);
        for word in [7, 8000, len, len] {
            file.extend(word.to_le_bytes());
        }
        file.extend([0x45, 0, 0, len as u8, 0, 0, 0x40, 0, 64, 17, 0, 0, 127, 0, 0, 1, 127, 77, 0, 5]);
        file.extend([0xc3, 0x50, 0x12, 0xb7, 0, len as u8 - 20, 0, 0]);
        file.extend(udp);
        file
    }

    #[test]
    fn a_trace_becomes_lines() {
        let records = read(&trace(0)).expect("a trace");
        let expected =
            "       0 us  127.0.0.1:50000 > 127.77.0.5:4791  qp 81923  psn 100  SEND only               0 B  ack_req";
        assert_eq!(records.iter().map(line).collect::<Vec<_>>(), [expected]);
    }

    #[test]
    fn damage_is_said() {
        let records = read(&trace(1)).expect("a trace");
        assert!(
            line(&records[0]).ends_with("psn 101  SEND only               0 B  ack_req  ICRC WRONG"),
            "{}",
            line(&records[0])
        );
    }

    #[test]
    fn what_is_cut_off_is_left_out() {
        let file = trace(0);
        assert!(read(&file[..file.len() - 1]).expect("a trace").is_empty());
        assert!(read(&file[..20]).is_err() && read(&[0; 30]).is_err());
    }
}
