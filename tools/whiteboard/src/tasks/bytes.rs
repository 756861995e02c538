//! Bytes in transfer: frames in a stream, packets of a message, sectors of a load.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

/// Bytes before a payload; the last four are its length.
const HEADER: usize = 8;
/// Sequence numbers have 24 bits.
const PSN_MASK: u64 = (1 << 24) - 1;
/// Bytes that the memory system of a GPU loads at once.
const SECTOR: u64 = 32;
const WARP: u64 = 32;

/// Gives a reader the frames in reads of the lengths `reads`.
pub(super) fn frames(payloads: &[u16], reads: &[u16]) -> Result<Vec<String>> {
    let mut stream = Vec::new();
    for &payload in payloads {
        stream.extend([0; HEADER - 4]);
        stream.extend(u32::from(payload).to_le_bytes());
        stream.resize(stream.len() + usize::from(payload), 0);
    }
    let all: usize = reads.iter().map(|&n| usize::from(n)).sum();
    ensure!(all == stream.len(), "the reads have {all} bytes, the frames {}", stream.len());
    let (mut kept, mut complete): (Vec<u8>, usize) = (Vec::new(), 0);
    let mut lines = Vec::new();
    let mut rest = stream.as_slice();
    for (read, &length) in (1..).zip(reads) {
        let (piece, behind) = rest.split_at(usize::from(length));
        rest = behind;
        kept.extend(piece);
        while let Some((header, after)) = kept.split_first_chunk::<HEADER>() {
            let [.., a, b, c, d] = *header;
            let payload = u32::from_le_bytes([a, b, c, d]) as usize;
            if after.len() < payload {
                break;
            }
            kept.drain(..HEADER + payload);
            complete += 1;
        }
        lines.push(format!("{read} {complete} {}", kept.len()));
    }
    Ok(lines)
}

/// Cuts a message.
pub(super) fn packets(bytes: u32, mtu: u32, psn: u32) -> Vec<String> {
    let (mut packets, mut last, mut next, mut payload, mut left) = (0u64, 0, u64::from(psn), 0, bytes);
    while left > 0 {
        payload = left.min(mtu);
        left -= payload;
        packets += 1;
        last = next;
        next = (next + 1) & PSN_MASK;
    }
    vec![format!("packets {packets}"), format!("last {last}"), format!("next {next}"), format!("payload {payload}")]
}

/// Counts the sectors of each load.
pub(super) fn sectors(loads: &[(u32, u32)]) -> Vec<String> {
    let touched = |offset: u64, stride: u64| -> usize {
        let first = |thread: u64| offset + 4 * stride * thread;
        let both = |thread| [first(thread) / SECTOR, (first(thread) + 3) / SECTOR];
        (0..WARP).flat_map(both).collect::<BTreeSet<u64>>().len()
    };
    loads.iter().map(|&(o, s)| format!("{o} {s} {}", touched(o.into(), s.into()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let lines = frames(&[5, 0, 20], &[3, 10, 8, 12, 16]).unwrap();
        assert_eq!(lines, ["1 0 3", "2 1 0", "3 2 0", "4 2 12", "5 3 0"]);
        assert!(frames(&[5], &[12]).is_err());
        assert_eq!(packets(100_001, 1024, 16_777_200), ["packets 98", "last 81", "next 82", "payload 673"]);
        assert_eq!(packets(1024, 1024, 0), ["packets 1", "last 0", "next 1", "payload 1024"]);
        assert_eq!(sectors(&[(0, 1), (0, 2), (0, 8), (4, 1), (0, 0)]), ["0 1 4", "0 2 8", "0 8 32", "4 1 5", "0 0 1"]);
    }
}
