//! A port's GID table: shown, and which entry to use.

use verbs_kit::gid::{GidKind, GidRow};

/// The rows as a text table with a heading, one line each.
pub(crate) fn table(rows: &[GidRow]) -> String {
    let heading = ["Dev", "Port", "Index", "GID", "IPv4", "Type", "Netdev"].map(str::to_owned);
    let cells: Vec<[String; 7]> = std::iter::once(heading)
        .chain(rows.iter().map(|r| {
            let ipv4 = r.gid.ipv4().map_or_else(|| "-".to_owned(), |a| a.to_string());
            let netdev = if r.netdev.is_empty() { "-" } else { &r.netdev };
            let text = [r.device.clone(), r.port.to_string(), r.index.to_string(), r.gid.to_string(), ipv4];
            let [device, port, index, gid, ipv4] = text;
            [device, port, index, gid, ipv4, r.kind.to_string(), netdev.to_owned()]
        }))
        .collect();
    let width: Vec<usize> = (0..7).map(|c| cells.iter().map(|row| row[c].len()).max().unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &cells {
        let line: Vec<String> = row.iter().zip(&width).map(|(cell, w)| format!("{cell:<w$}")).collect();
        text.push_str(line.join(" | ").trim_end());
        text.push('\n');
    }
    text
}

/// A GID's rank, 0 for the best, with the reason in words.
// EXERCISE 1 (The GID table): the preference order of the kinds of GIDs: a number, 0 for the best, and the reason in
// words.
pub(crate) fn rank(row: &GidRow) -> (u8, &'static str) {
    match (row.kind, row.gid.ipv4()) {
        (GidKind::RoceV2, Some(_)) => {
            (0, "RoCE v2 with an IPv4 address: UDP over IP, reachable wherever the address is")
        }
        (GidKind::RoceV2, None) if !row.gid.is_link_local() => {
            (1, "RoCE v2 with an IPv6 address; there is no IPv4 one")
        }
        (GidKind::RoceV2, None) => (2, "RoCE v2, but only a link-local address: give the network device an IP address"),
        (GidKind::Ib, _) => (3, "InfiniBand: one GID per port is normal"),
        (GidKind::RoceV1, _) => (4, "RoCE v1 only: works within one Ethernet segment"),
        (GidKind::Unknown, _) => (5, "of a type that is not known, and there is no other"),
    }
}

#[cfg(test)]
mod tests {
    use verbs_kit::gid::choose;

    use super::*;

    fn row(index: u32, gid: &str, kind: GidKind) -> GidRow {
        GidRow {
            device: "rxe0".to_owned(),
            port: 1,
            index,
            gid: gid.parse().expect("a GID"),
            kind,
            netdev: "eth0".to_owned(),
        }
    }

    #[test]
    fn the_roce_v2_ipv4_gid_wins_and_the_order_of_the_rest_is_fixed() {
        let mut rows = vec![
            row(0, "fe80::1", GidKind::RoceV1),
            row(1, "fe80::1", GidKind::RoceV2),
            row(2, "::ffff:10.0.0.1", GidKind::RoceV1),
            row(3, "2001:db8::1", GidKind::RoceV2),
            row(5, "::ffff:10.0.0.1", GidKind::RoceV2),
            row(7, "::ffff:10.0.0.2", GidKind::RoceV2),
        ];
        for expected in [5, 7, 3, 1, 0, 2] {
            let (chosen, why) = choose(&rows, "rxe0 port 1", None, rank).expect("a row");
            assert_eq!(chosen.index, expected, "{why}");
            let index = chosen.index;
            rows.retain(|r| r.index != index);
        }
        assert!(choose(&rows, "rxe0 port 1", None, rank).expect_err("no row").contains("rxe0 port 1 is empty"));
    }

    #[test]
    fn the_table_lines_up() {
        let text = table(&[row(0, "fe80::1", GidKind::RoceV2), row(11, "::ffff:10.0.0.1", GidKind::RoceV2)]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Dev  | Port | Index | GID             | IPv4     | Type    | Netdev");
        assert_eq!(lines[1], "rxe0 | 1    | 0     | fe80::1         | -        | RoCE v2 | eth0");
        assert_eq!(lines[2], "rxe0 | 1    | 11    | ::ffff:10.0.0.1 | 10.0.0.1 | RoCE v2 | eth0");
    }
}
