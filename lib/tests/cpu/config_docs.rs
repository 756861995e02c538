//! `docs/config.md` is made from the table of knobs; `UPDATE_DOCS=1 cargo test -p tinynccl --test cpu config_docs`
//! rewrites it.

use std::fmt::Write;
use std::path::Path;

use tinynccl::Config;

#[test]
fn the_page_matches_the_code() {
    let mut page = String::from(
        "# Settings\n\nEvery knob of the library, as `tinynccl::Config` documents it. This page is made from the code\n\
         (`UPDATE_DOCS=1 cargo test -p tinynccl --test cpu config_docs`); a test fails when it is stale.\n\
         `Comm::from_env` reads the variables; a value that does not parse is an error, and a\n\
         variable TINYNCCL_... that nothing reads is a warning with the nearest name. K, M and G are powers of 1024.\n\n\
         | variable | values | default | meaning |\n|---|---|---|---|\n",
    );
    for knob in Config::describe() {
        let default = if knob.default.is_empty() { "(empty)" } else { &knob.default };
        writeln!(page, "| `{}` | {} | {default} | {} |", knob.env, knob.values, knob.doc).expect("a String");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/config.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).expect("docs/config.md can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == page, "docs/config.md is stale: run this test with UPDATE_DOCS=1");
}
