//! The symbols of the library.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

/// The host API of 2.30.7, from the list that `header.rs` has the compiler check.
fn host() -> BTreeSet<String> {
    let names: BTreeSet<String> = include_str!("functions.h")
        .lines()
        .filter_map(|line| line.strip_prefix("SAME(")?.split(", ").nth(1).map(|name| name.trim().to_owned()))
        .collect();
    assert_eq!(names.len(), 64);
    names
}

/// Functions of the device API that 2.28.9 and 2.30.7 export beside it.
const DEVICE: [&str; 18] = [
    "ncclDevCommCreate",
    "ncclDevCommDestroy",
    "ncclTeamWorld",
    "ncclTeamLsa",
    "ncclTeamRail",
    "ncclTeamRankToWorld",
    "ncclTeamRankToLsa",
    "ncclLsaBarrierCreateRequirement",
    "ncclGinBarrierCreateRequirement",
    "ncclLLA2ACalcSlots",
    "ncclLLA2ACreateRequirement",
    "ncclCommQueryProperties",
    "ncclGetLsaDevicePointer",
    "ncclGetLsaMultimemDevicePointer",
    "ncclGetMultimemDevicePointer",
    "ncclGetPeerDevicePointer",
    "ncclGinOutboxCreateRequirement",
    "ncclGinInboxA2ACreateRequirement",
];

/// The library beside this test's folder.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap();
    let places = [folder.join("libnccl.so"), folder.parent().unwrap().join("libnccl.so")];
    let found = places.iter().find(|place| place.exists());
    found.unwrap_or_else(|| panic!("none of {places:?} is there: cargo build -p tinynccl-nccl")).clone()
}

/// Output of a program of the binutils over the library; `None` where it is missing.
fn binutil(program: &str, option: &str) -> Option<String> {
    match Command::new(program).arg(option).arg(library()).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8(output.stdout).unwrap())
        }
        Err(error) => {
            eprintln!("SKIPPED: {program}, of the binutils: {error}");
            None
        }
    }
}

#[test]
fn every_function_is_exported_under_both_names_and_nothing_else_is() {
    let Some(text) = binutil("nm", "-D") else { return };
    let exported: BTreeSet<String> = text
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // Address, kind, name; undefined symbols have no address.
            matches!(fields[..], [_, kind, _] if kind != "U" && kind != "w").then(|| fields[2].to_owned())
        })
        .collect();
    let first = host().into_iter().chain(DEVICE.map(str::to_owned));
    let expected: BTreeSet<String> = first.flat_map(|name| [format!("p{name}"), name]).collect();
    let missing: Vec<_> = expected.difference(&exported).collect();
    let strange: Vec<_> = exported.difference(&expected).collect();
    assert!(missing.is_empty() && strange.is_empty(), "missing: {missing:?}; unexpected: {strange:?}");
}

#[test]
fn the_library_has_the_name_that_programs_look_for() {
    let Some(text) = binutil("readelf", "-d") else { return };
    assert!(text.lines().any(|line| line.contains("SONAME") && line.contains("[libnccl.so.2]")), "{text}");
}
