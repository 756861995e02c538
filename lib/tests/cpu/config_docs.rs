//! `docs/config.md` is made from the table of settings; `UPDATE_DOCS=1 cargo test -p tinynccl --test cpu config_docs`
//! rewrites it.

use std::fmt::Write;
use std::path::Path;

use tinynccl::Config;

#[test]
fn the_page_matches_the_code() {
    let mut page = String::from(
        "# Settings\n\nEvery setting of the library, as `tinynccl::Config` documents it. This page is made from the code\n\
         (`UPDATE_DOCS=1 cargo test -p tinynccl --test cpu config_docs`); a test fails when it is stale.\n\
         `Comm::from_env` reads the variables; a value that does not parse is an error, and a\n\
         variable TINYNCCL_... that nothing reads is a warning with the nearest name. K, M and G are powers of 1024.\n",
    );
    for (advanced, title) in [
        (false, ""),
        (true, "\n## Advanced\n\nFor experiments, and for hardware and networks that the defaults do not fit.\n"),
    ] {
        page.push_str(title);
        page.push_str("\n| variable | values | default | meaning |\n|---|---|---|---|\n");
        for setting in Config::describe().into_iter().filter(|setting| setting.advanced == advanced) {
            let default = if setting.default.is_empty() { "(empty)" } else { &setting.default };
            writeln!(page, "| `{}` | {} | {default} | {} |", setting.env, setting.values, setting.doc)
                .expect("a String");
        }
    }
    page.push_str(
        "\n## softroce, the RDMA device in user space\n\nRead by every program that opens a device of `lib/softroce`, also through \
         `libibverbs.so.1`. A value that does not parse is an error.\n\n| variable | values | default | meaning |\n\
         |---|---|---|---|\n",
    );
    for (name, values, meaning) in [
        (
            softroce::DEVICES_VARIABLE,
            "interfaces, comma-separated",
            "Interfaces that get a device, in this order; unset: all that are up and have an address, loopback last; empty: none.",
        ),
        (softroce::LOSS_VARIABLE, "0 to 100", "Packets that get lost, in percent."),
        (
            softroce::FLIP_VARIABLE,
            "0 to 100",
            "Packets of 256 bytes and more in which a bit flips before their sum is made, in percent: TINYNCCL_VERIFY finds it.",
        ),
        (softroce::DELAY_VARIABLE, "0 to 1e9", "Microseconds that each packet is held back before it is sent."),
        (
            "TINYROCE_SYSTEM_LIBRARY",
            "path",
            "The system's libibverbs, whose devices `libibverbs.so.1` lists before softroce's; unset: that of the usual folders; empty: none.",
        ),
        (softroce::TRACE_VARIABLE, "path", "Records all packets, sent and received, in a pcap file, for Wireshark."),
    ] {
        writeln!(page, "| `{name}` | {values} | (unset) | {meaning} |").expect("a String");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/config.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).expect("docs/config.md can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == page, "docs/config.md is stale: run this test with UPDATE_DOCS=1");
}
