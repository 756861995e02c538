//! Arrows point down only: no module of the source imports one that is listed above it.

use std::fs;
use std::path::{Path, PathBuf};

/// Folder of modules, the path that names them, and the modules from top to bottom.
const LAYERS: &[(&str, &str, &str)] = &[
    ("src", "", "shared_state ddp process_group launch declared"),
    ("cuda/src", "", "start hosts calls comm verify hosted phased peer path kernels checked window driver"),
    (
        "comm/src",
        "",
        "join survive start calls engine status state membership symmetric executor verify trace topology reduce",
    ),
    (
        "transport/src",
        "",
        "fuzzing rails endpoint verbs tcp inproc shm fabric relay linger info beacon wrap memory accept explore forward \
         wait bootstrap seal",
    ),
    ("comm/src/status", "status", "text findings view ask registry serve record member place report"),
    ("transport/src/rails", "rails", "links connect relay address health connection rdma data stream failover worker"),
    ("transport/src/bootstrap", "bootstrap", "fuzzing client server environment wire ledger"),
    ("sys/src", "", "config half_open strangers secret signal interrupt doorbell threads ticks backoff sync unix fork"),
    (
        "softroce/src",
        "",
        "qpair fuzzing context engine qp wire queue psn netlink memory fork counters device path interface gids sync error",
    ),
    (
        "softroce-verbs/src",
        "",
        "open qp wr srq query post window numbers names device cq cq_ex completion ah memory context uses tables extended \
         types named constants",
    ),
    ("../bindings/nccl-net/src", "", "v12 v11 v10 v9 v8 table plugin logger device abi"),
    ("../bindings/ibverbs/src", "", "exports objects system forwards slot symbol"),
    ("plan/src", "", "simulate topology algorithm schedule device call error wire dtype float8"),
    ("../bindings/nccl/src", "", "calls query memory lifecycle submit comm ras rendezvous abi env"),
    ("../bindings/nccl/src/calls", "calls", "collectives rma pre_mul_sum"),
    ("../bindings/nccl/src/query", "query", "info params"),
    ("../bindings/nccl/src/memory", "memory", "device_api windows buffers stats"),
    ("../bindings/nccl/src/lifecycle", "lifecycle", "split init start finalize"),
    ("../bindings/nccl/src/submit", "submit", "group jobs launch"),
    ("../bindings/nccl/src/comm", "comm", "handle communicator operators registered gpu"),
    (
        "../bindings/nccl/src/rendezvous",
        "rendezvous",
        "join unique_id client listener directory protocol id address digest",
    ),
    ("../bindings/nccl/src/ras", "ras", "server monitor text json look commands"),
    ("../bindings/nccl/src/abi", "abi", "export config datatypes last_error error types"),
    ("../bindings/nccl/src/env", "env", "debug settings version variables conf lists"),
];

/// The code of a file, without comments and without what is compiled for tests alone.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    // A module in a file of its own is no end of the code.
    let inline = |&(at, mark): &(usize, &str)| text[at + mark.len()..].lines().next().is_some_and(|l| l.ends_with('{'));
    let tests = text.match_indices("\n#[cfg(test)]\nmod ").find(inline);
    let text = &text[..tests.map_or(text.len(), |(at, _)| at)];
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

fn is_test(file: &Path) -> bool {
    let name = file.file_stem().unwrap_or_default().to_string_lossy();
    name.ends_with("tests") || name == "model" || name == "fuzzing" || file.iter().any(|part| part == "tests")
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") && !is_test(&path) {
            found.push(path);
        }
    }
    found
}

/// The first words of the paths that begin with `prefix` in `code`, of lists in braces as well.
fn named<'a>(code: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(prefix).filter(move |&(at, _)| !code[..at].ends_with([':', '_'])).flat_map(move |(at, _)| {
        let rest = &code[at + prefix.len()..];
        let list = match rest.strip_prefix('{') {
            Some(inside) => inside.split('}').next().unwrap_or_default(),
            None => &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())],
        };
        list.split(',').map(move |item| item.trim_start().split(|c| !is_word(c)).next().unwrap_or_default())
    })
}

#[test]
fn no_module_imports_one_above_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for &(folder, path, order) in LAYERS {
        let order: Vec<&str> = order.split_whitespace().collect();
        let folder = root.join(folder);
        for file in sources(&folder) {
            let inside = file.strip_prefix(&folder).unwrap().with_extension("");
            let parts: Vec<&str> = inside.iter().map(|part| part.to_str().unwrap()).collect();
            if matches!(parts[..], ["mod" | "lib"]) {
                continue;
            }
            let Some(ours) = order.iter().position(|module| *module == parts[0]) else {
                panic!("{}: its module has no place in LAYERS", file.display());
            };
            let text = code(&file);
            let from_root = if path.is_empty() { "crate::".to_owned() } else { format!("crate::{path}::") };
            let up = "super::".repeat(parts.len() - usize::from(parts.last() == Some(&"mod")));
            for other in named(&text, &from_root).chain(named(&text, &up)) {
                if order.iter().position(|module| *module == other).is_some_and(|theirs| theirs < ours) {
                    wrong.push(format!("{} imports {other}", file.strip_prefix(root).unwrap().display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "modules that import what is above them:\n{}", wrong.join("\n"));
}
