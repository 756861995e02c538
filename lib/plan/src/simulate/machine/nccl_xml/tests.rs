//! Files as NCCL writes them and as people write them, and broken ones.

use proptest::prelude::*;

use super::*;
use crate::simulate::machine::{Graph, Machine as _};

const DGX_1: &str = include_str!("../../../../topologies/dgx-1.xml");

/// Two GPUs below one bridge with a card, joined by NVSwitches.
const PAIR: &str = r#"<system version="1">
  <cpu host_hash="0x1" numaid="0" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:02:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="0" gdr="1"><nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:03:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="1" gdr="1"><nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:04:00.0" class="0x020700" link_speed="32.0 GT/s PCIe" link_width="16">
        <nic><net name="mlx5_0" dev="0" speed="400000"/><net name="unused" speed="1"/></nic>
      </pci>
    </pci>
    <nic><net name="eth0" dev="1" speed="-1"/></nic>
  </cpu>
</system>
"#;

fn error(text: &str) -> String {
    read(text).unwrap_err()
}

fn link<'a>(description: &'a Description, a: &str, b: &str) -> &'a Link {
    let ends = |link: &&Link| link.between == [a, b] || link.between == [b, a];
    description.link.iter().find(ends).unwrap_or_else(|| panic!("{a} - {b} is not in {description:?}"))
}

fn names(description: &Description) -> Vec<&str> {
    description.node.iter().map(|node| node.name.as_str()).collect()
}

#[test]
fn gpus_are_ranks_and_links_have_their_widths() {
    let read = read(PAIR).unwrap();
    assert_eq!(
        names(&read),
        ["gpu1", "gpu0", "numa0", "pcie 0000:01:00.0", "mlx5_0", "eth0", "nvswitch"],
        "by rank, not by number; a port without a number is not used"
    );
    let gb_s = |a, b| link(&read, a, b).bandwidth_gb_s;
    approx::assert_relative_eq!(gb_s("gpu0", "nvswitch"), 18.0 * 20.6);
    approx::assert_relative_eq!(gb_s("gpu0", "pcie 0000:01:00.0"), 48.0);
    approx::assert_relative_eq!(gb_s("mlx5_0", "pcie 0000:01:00.0"), 48.0);
    approx::assert_relative_eq!(gb_s("eth0", "numa0"), 1.25);
    let graph = Graph::new(&read).unwrap();
    let mut way = Vec::new();
    graph.route(0, 1, &mut way);
    let way: Vec<String> = way.into_iter().map(|link| graph.link_name(link)).collect();
    assert_eq!(way, ["gpu1 to nvswitch", "nvswitch to gpu0"]);
}

#[test]
fn a_cube_of_nvlinks() {
    let read = read(DGX_1).unwrap();
    assert_eq!((read.name.as_str(), Graph::new(&read).unwrap().ranks()), ("DGX-1 (V100)", 8));
    for (a, b, links) in [("gpu0", "gpu1", 1.0), ("gpu0", "gpu3", 2.0), ("gpu3", "gpu7", 1.0)] {
        approx::assert_relative_eq!(link(&read, a, b).bandwidth_gb_s, links * 20.0);
    }
    let nvlinks = read.link.iter().filter(|link| link.kind.as_deref() == Some("nvlink"));
    approx::assert_relative_eq!(nvlinks.map(|link| link.bandwidth_gb_s).sum::<f64>(), 24.0 * 20.0);
    assert_eq!(link(&read, "numa0", "numa1").bandwidth_gb_s, 6.0);
}

/// Files as clouds ship them: devices by their class alone, which NCCL completes at run time.
#[test]
fn gpus_and_cards_that_are_known_by_their_class() {
    let bridge = |at: u32| {
        format!(
            r#"<pci busid="ffff:ff:0{at}.0" class="0x060400" link_speed="16 GT/s" link_width="16">
            <pci busid="000{at}:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
            <pci busid="010{at}:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/></pci>"#
        )
    };
    let text = format!("<system version=\"1\"><cpu numaid=\"0\">{}{}</cpu></system>", bridge(1), bridge(2));
    let read = read(&text).unwrap();
    assert_eq!(names(&read)[..3], ["gpu0", "gpu1", "numa0"]);
    assert_eq!(link(&read, "gpu1", "pcie ffff:ff:02.0").bandwidth_gb_s, 24.0);
    assert!(names(&read).contains(&"nic 0101:00:00.0"));
    Graph::new(&read).unwrap();
}

#[test]
fn the_hosts_of_an_nvlink_domain() {
    let inner = &PAIR[PAIR.find("<cpu").unwrap()..PAIR.find("</system>").unwrap()];
    let other = inner.replace("0x1", "0x2").replace("rank=\"1\"", "rank=\"3\"").replace("rank=\"0\"", "rank=\"2\"");
    let read = read(&format!("<system version=\"1\">{inner}{other}</system>")).unwrap();
    assert_eq!(names(&read)[..4], ["host0/gpu1", "host0/gpu0", "host1/gpu1", "host1/gpu0"]);
    assert_eq!(names(&read).iter().filter(|name| **name == "nvswitch").count(), 1, "one domain");
    assert_eq!(link(&read, "host1/mlx5_0", "network").bandwidth_gb_s, 50.0);
    assert!(read.link.iter().all(|link| link.kind.as_deref() != Some("socket")), "one socket each");
    assert_eq!(Graph::new(&read).unwrap().ranks(), 4);
}

#[test]
fn coherent_links_and_ends_that_disagree() {
    let gpu =
        |bus: &str, links: &str| format!(r#"<pci busid="{bus}" class="0x030200"><gpu sm="90">{links}</gpu></pci>"#);
    let text = format!(
        "<system version=\"1\"><cpu numaid=\"0\" arch=\"arm64\">{}{}</cpu></system>",
        gpu(
            "0000:0A:00.0",
            r#"<c2c bw="44712" count="10"/><nvlink target="0000:0b:00.0" count="4" tclass="0x030200"/>"#
        ),
        gpu(
            "0000:0b:00.0",
            r#"<nvlink target="0000:0a:00.0" count="3" tclass="0x030200"/><nvlink target="0000:0c:00.0"
             count="1" tclass="0x030200"/>"#
        )
    );
    let read = read(&text).unwrap();
    let c2c = read.link.iter().find(|link| link.kind.as_deref() == Some("c2c")).unwrap();
    approx::assert_relative_eq!(c2c.bandwidth_gb_s, 447.12, max_relative = 1e-9);
    approx::assert_relative_eq!(link(&read, "gpu0", "gpu1").bandwidth_gb_s, 3.0 * 20.6, max_relative = 1e-9);
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    for (from, to, expected) in [
        ("version=\"1\"", "version=\"2\"", "line 1: version 2, expected 1"),
        ("system", "graphs", "line 1: <graphs>, expected NCCL's <system>"),
        (
            "link_width=\"16\"",
            "link_width=\"wide\"",
            "line 3: <pci> has link_width=\"wide\", expected a whole number from 0",
        ),
        ("sm=\"90\"", "sm=\"99999999999\"", "line 5: <gpu> has sm=\"99999999999\", expected a whole number from 0"),
        ("count=\"18\"", "count=\"4000000000\"", "line 5: count is 4000000000, expected at most 1024"),
        ("0000:03:00.0", "0000:02:00.0", "line 7: busid 0000:02:00.0 is there twice"),
        (
            "target=\"fffffff:ffff:ff\"",
            "target=\"0000:02:00.0\"",
            "line 5: an NVLink of 0000:02:00.0 leads to 0000:02:00.0 itself",
        ),
        ("busid=\"0000:04:00.0\"", "", "line 10: <pci> has no busid"),
        ("speed=\"400000\"", "speed=\"fast\"", "line 11: <net> has speed=\"fast\", expected a number"),
        ("</cpu>", "", "line 16: "),
        ("<cpu", "<!DOCTYPE x [<!ENTITY a \"b\">]><cpu", "line 2: "),
    ] {
        let text = error(&PAIR.replace(from, to));
        assert!(text.starts_with(expected), "{from} -> {to}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    assert_eq!(error("<system version=\"1\"/>"), "line 1: no GPU is in it: expected a <gpu>, or a <pci> of class 0x03");
    // Devices inside each other without end.
    let deep: String = (0..5000).map(|at| format!("<pci busid=\"{at}\">")).collect();
    let deep = format!("<system version=\"1\"><cpu>{deep}{}</cpu></system>", "</pci>".repeat(5000));
    assert!(error(&deep).contains("more than 32 PCIe devices inside each other"), "{}", error(&deep));
    let many = format!("<system version=\"1\">{}</system>", "<x/>".repeat(MOST_ELEMENTS as usize + 1));
    assert!(error(&many).starts_with("line 1: "), "{}", error(&many));
}

#[test]
fn a_huge_bandwidth_is_refused_or_finite() {
    for bw in ["1e308", "inf", "NaN", "-5"] {
        let text = format!(
            "<system version=\"1\"><cpu><pci busid=\"1\" class=\"0x03\"><gpu><c2c bw=\"{bw}\" count=\"1000\"/></gpu></pci></cpu></system>"
        );
        assert!(error(&text).starts_with("line 1: "), "{bw}: {}", error(&text));
    }
    let fast = PAIR.replace("32.0 GT/s PCIe", "1e308 GT/s");
    assert!(Graph::new(&read(&fast).unwrap()).is_ok());
}

proptest! {
    /// Every text is read or refused in one line that names a line, and what is read is a machine or refused by name.
    #[test]
    fn cut_and_changed_files(cut in 0usize..3000, at in 0usize..3000, to in any::<char>(), dgx in any::<bool>()) {
        let whole: Vec<char> = if dgx { DGX_1 } else { PAIR }.chars().collect();
        let short: String = whole[..cut.min(whole.len())].iter().collect();
        let mut changed = whole.clone();
        let place = at % changed.len();
        changed[place] = to;
        for text in [short, changed.into_iter().collect()] {
            match read(&text) {
                Ok(description) => drop(Graph::new(&description)),
                Err(why) => prop_assert!(why.starts_with("line ") && why.lines().count() == 1, "{why:?}"),
            }
        }
    }

    /// Numbers of every size in every attribute.
    #[test]
    fn any_numbers(numbers in prop::collection::vec("-?[0-9]{1,24}(\\.[0-9]{1,3})?(e[0-9]{1,3})?", 6)) {
        let [dev, sm, rank, count, width, speed] = &numbers[..] else { unreachable!() };
        let text = format!(
            "<system version=\"1\"><cpu numaid=\"{dev}\"><pci busid=\"a\" class=\"0x03\" link_width=\"{width}\"><gpu dev=\"{dev}\" \
             sm=\"{sm}\" rank=\"{rank}\"><nvlink count=\"{count}\" tclass=\"0x068000\"/></gpu></pci><nic><net dev=\"{dev}\" \
             speed=\"{speed}\" latency=\"{speed}\"/></nic></cpu></system>"
        );
        match read(&text) {
            Ok(description) => drop(Graph::new(&description).unwrap()),
            Err(why) => prop_assert!(why.starts_with("line 1: "), "{why}"),
        }
    }
}
