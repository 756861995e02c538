//! A program in C, compiled against our header and linked to the library and to the stand-in by their names.

use std::path::Path;
use std::process::{Command, Stdio};

use super::apart::{folders, library, wait};

#[test]
fn a_program_in_c_is_linked_and_runs() {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("SKIPPED a_program_in_c_is_linked_and_runs: there is no C compiler ({compiler}; CC names another)");
        return;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("ring");
    let made = Command::new(&compiler)
        .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-DNCCL_WITHOUT_CUDA", "-o"])
        .arg(&program)
        .arg(here.join("tests/abi/client/ring.c"))
        .arg("-I")
        .arg(here.join("include"))
        .arg("-L")
        .arg(library())
        .arg("-L")
        .arg(cuda_standin::folder().unwrap())
        .args(["-lnccl", "-lcuda"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let started = Command::new(&program)
        .env("LD_LIBRARY_PATH", folders())
        .env("TINYNCCL_STANDIN_DEVICES", "3")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let output = wait(started.unwrap());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.ends_with("right\n"), "{}\n{out}\n{err}", output.status);
}
