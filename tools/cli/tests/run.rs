//! `run` and the doctor's list of NCCL's libraries, on libraries that the tests make.

use std::path::{Path, PathBuf};
use std::process::Command;

use program_kit::testing;
use serde_json::Value;

fn cli(arguments: &[&str]) -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    command.args(arguments);
    for name in ["LD_PRELOAD", "LD_AUDIT", "TINYNCCL_NCCL_LIB"] {
        command.env_remove(name);
    }
    command
}

/// A library that has two of NCCL's functions. It prints, as NCCL does with `NCCL_DEBUG`.
fn library(folder: &Path, name: &str, version: u32) -> PathBuf {
    let source = format!(
        "#include <stdio.h>\nint ncclSend(void) {{ return 5; }}\n\
         int ncclGetVersion(int *v) {{ puts(\"said\"); *v = {version}; return 0; }}"
    );
    testing::compiled(folder, name, &source, &["-shared", "-Wl,-soname,libnccl.so.2"])
}

#[test]
fn a_linked_program_gets_the_library_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let theirs = library(folder.path(), "libnccl.so.2", 1);
    let ours = folder.path().join("ours");
    std::fs::create_dir(&ours).unwrap();
    let ours = library(&ours, "libnccl.so", 2);
    let source = r#"
        #include <stdio.h>
        int ncclGetVersion(int *);
        int main(int n, char **a) { int v; ncclGetVersion(&v); printf("%d %s", v, n > 1 ? a[1] : ""); return 7; }"#;
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", folder.path().display());
    let program = testing::compiled(folder.path(), "program", source, &[theirs.to_str().unwrap(), &rpath]);
    let plain = testing::run(testing::program(&program).arg("-x"));
    assert_eq!((plain.code, plain.stdout.as_str()), (Some(7), "said\n1 -x"));
    let arguments = ["run", "--library", ours.to_str().unwrap(), "--", program.to_str().unwrap(), "--help"];
    let with = testing::run(&mut cli(&arguments));
    assert_eq!((with.code, with.stdout.as_str()), (Some(7), "said\n2 --help"), "{}", with.stderr);
}

#[test]
fn who_takes_no_notice_of_children_can_run_programs() {
    let folder = tempfile::tempdir().unwrap();
    let ours = library(folder.path(), "libnccl.so", 2);
    let run = |how: &str| {
        let cli = cli(&["run", "--library", ours.to_str().unwrap(), "--", "cat", "/proc/self/status"]);
        let mut command = Command::new("env");
        command.arg(how).arg(cli.get_program()).args(cli.get_args());
        let status = testing::output(&mut command);
        let has = |mask: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(mask)).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap() & 1 << (libc::SIGCHLD - 1) != 0
        };
        (has("SigIgn:"), has("SigBlk:"))
    };
    // The program has what it would have without us.
    assert_eq!(run("--ignore-signal=CHLD"), (true, false));
    assert_eq!(run("--block-signal=CHLD"), (false, true));
    assert_eq!(run("--default-signal=CHLD"), (false, false));
}

#[test]
fn what_is_preloaded_and_audited_stays() {
    let folder = tempfile::tempdir().unwrap();
    let ours = library(folder.path(), "libnccl.so", 2).canonicalize().unwrap();
    let other = testing::compiled(folder.path(), "other.so", "int other;", &["-shared"]);
    let source = "unsigned la_version(unsigned v) { return v; }";
    let audit = testing::compiled(folder.path(), "libnccl_audit.so", source, &["-shared"]).canonicalize().unwrap();
    let script = "echo $LD_PRELOAD; echo $LD_AUDIT; echo $TINYNCCL_NCCL_LIBRARY";
    let run = |flags: &[&str]| {
        let mut command = cli(&["run", "--library", ours.to_str().unwrap()]);
        command.args(flags).args(["--", "sh", "-c", script]).env("LD_PRELOAD", &other);
        testing::output(&mut command)
    };
    let preload = format!("{}:{}", ours.display(), other.display());
    assert_eq!(run(&[]), format!("{preload}\n\n\n"));
    assert_eq!(run(&["--audit"]), format!("{preload}\n{}\n{}\n", audit.display(), ours.display()));
}

/// `cargo run -p tinynccl-cli` starts the debug program, and the page on NCCL builds the library in release mode.
#[test]
fn the_library_of_either_build_is_found_and_the_doctor_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().canonicalize().unwrap().join("target");
    for profile in ["release", "debug/deps", "debug/.fingerprint"] {
        std::fs::create_dir_all(target.join(profile)).unwrap();
    }
    let program = target.join("debug/tinynccl-cli");
    std::fs::copy(env!("CARGO_BIN_EXE_tinynccl-cli"), &program).unwrap();
    // What tests leave, where `cargo run` lets the loader look.
    let by_product = library(&target.join("debug/deps"), "libnccl.so", 1);
    let start = |arguments: &[&str]| {
        let mut command = testing::program(&program);
        command.args(arguments).env("LD_LIBRARY_PATH", target.join("debug/deps")).current_dir(folder.path());
        command.env_remove("LD_PRELOAD").env_remove("TINYNCCL_NCCL_LIB");
        testing::output(&mut command)
    };
    for profile in ["release", "debug"] {
        let ours = library(&target.join(profile), "libnccl.so", 2);
        assert_eq!(start(&["run", "--", "sh", "-c", "echo $LD_PRELOAD"]), format!("{}\n", ours.display()));
        let page: Value = serde_json::from_str(&start(&["doctor", "--json"])).unwrap();
        let places = page["nccl_libraries"].as_array().unwrap();
        assert_eq!((&places[0]["asked"], &places[0]["ours"]), (&ours.to_str().into(), &true.into()), "{page}");
        assert!(!page.to_string().contains(by_product.to_str().unwrap()), "{page}");
    }
    let text = start(&["doctor"]);
    assert!(text.contains("`target/debug/tinynccl-cli run -- COMMAND` starts a program over it"), "{text}");
}

#[test]
fn a_missing_or_broken_library_is_an_error_with_a_next_step() {
    let words = ["/nowhere/libnccl.so is not there", "cargo build --release -p tinynccl-nccl", "--library"];
    testing::refused(&mut cli(&["run", "--library", "/nowhere/libnccl.so", "--", "true"]), 1, &words);
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("libnccl.so");
    std::fs::write(&broken, "not a library").unwrap();
    let path = broken.to_str().unwrap();
    // The loader would print so and go on over the other library.
    testing::refused(&mut cli(&["run", "--library", path, "--", "true"]), 1, &[path, "cannot be loaded"]);
    let ours = library(folder.path(), "libnccl.so", 2);
    let arguments = ["run", "--library", ours.to_str().unwrap(), "--", "/nowhere/program"];
    testing::refused(&mut cli(&arguments), 1, &["starting /nowhere/program"]);
}

#[test]
fn the_doctor_lists_libraries_and_what_they_lack() {
    let folder = tempfile::tempdir().unwrap();
    let wheel = folder.path().join("lib/python3.12/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&wheel).unwrap();
    let file = library(&wheel, "libnccl.so.2", 22809).canonicalize().unwrap();
    // Where CUDA_HOME says: one that takes its process with it.
    let cuda = folder.path().join("cuda/lib64");
    std::fs::create_dir_all(&cuda).unwrap();
    let ends = "#include <stdlib.h>\n__attribute__((constructor)) void die(void) { abort(); }";
    let broken = testing::compiled(&cuda, "libnccl.so.2", ends, &["-shared"]);
    let doctor = |arguments: &[&str]| {
        let mut command = cli(&["doctor"]);
        command.args(arguments).env("VIRTUAL_ENV", folder.path()).env("CUDA_HOME", folder.path().join("cuda"));
        testing::output(&mut command)
    };
    let page: Value = serde_json::from_str(&doctor(&["--json"])).unwrap();
    let places = page["nccl_libraries"].as_array().unwrap();
    let found = places.iter().find(|place| place["opened"]["Ok"]["file"] == file.to_str().unwrap());
    let opened = &found.unwrap_or_else(|| panic!("{page}"))["opened"]["Ok"];
    assert_eq!(opened["version"], 22809);
    let lacks = |of: &str| opened[of].as_array().unwrap().len();
    assert_eq!((lacks("torch_2_11_lacks"), lacks("torch_2_15_lacks")), (36, 49), "it has ncclGetVersion and ncclSend");
    let found = places.iter().find(|place| place["asked"] == broken.to_str().unwrap()).unwrap();
    assert!(found["opened"]["Err"].as_str().unwrap().contains("ended with"), "{found}");
    let text = doctor(&[]);
    for words in
        ["NCCL libraries", "2.28.9", file.to_str().unwrap(), "36 of the 38 of torch 2.11 missing (ncclAllGather"]
    {
        assert!(text.contains(words), "{words} in\n{text}");
    }
}
