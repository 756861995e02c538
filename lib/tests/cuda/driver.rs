//! Drivers that are missing, too old or not usable, on any machine: stand-ins for libcuda.so, built by the C compiler
//! that links Rust programs. This test binary runs itself again with each of them in `LD_LIBRARY_PATH`.

use std::path::Path;
use std::process::Command;

/// Set for a process that only prints what it finds.
const ASKS: &str = "TINYNCCL_TEST_ASKS";

/// Prints the GPUs that a program sees. It does nothing unless it is started for that.
#[test]
fn a_program() {
    if std::env::var_os(ASKS).is_none() {
        return;
    }
    let count = tinynccl::cuda::device_count().map_or_else(|e| e.to_string(), |count| format!("{count} GPUs"));
    println!("\n@{count}");
    let seventh = tinynccl::cuda::open(7).map_or_else(|e| e.to_string(), |context| format!("{context:?}"));
    println!("@{seventh}");
    let inventory = tinynccl::cuda::inventory().map_or_else(|e| e.to_string(), |found| format!("{found:?}"));
    println!("@{inventory}");
}

/// The lines that a program prints where `library` is found first.
fn said(library: &Path) -> Vec<String> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "driver::a_program", "--nocapture"])
        .env(ASKS, "1")
        .env("LD_LIBRARY_PATH", library)
        .env("CUDA_VISIBLE_DEVICES", "3,4")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.strip_prefix('@')).map(str::to_owned).collect()
}

/// A libcuda.so of CUDA `version` whose cuInit returns `init`, with `count` GPUs, of which each reaches the next one's
/// memory. `None`, said aloud, without a C compiler.
fn stand_in(folder: &Path, version: u32, init: u32, count: u32) -> Option<()> {
    let source = folder.join("cuda.c");
    let text = format!(
        "int cuDriverGetVersion(int *to) {{ *to = {version}; return 0; }}\n\
         int cuInit(unsigned flags) {{ return {init}; }}\n\
         int cuDeviceGetCount(int *to) {{ *to = {count}; return 0; }}\n\
         int cuDeviceGet(int *to, int ordinal) {{ *to = 40 + ordinal; return ordinal >= {count}; }}\n\
         int cuDeviceGetName(char *to, int size, int device) {{ to[0] = 'A' + device - 40; to[1] = 0; return size < 2; }}\n\
         int cuDeviceTotalMem_v2(unsigned long *to, int device) {{ *to = 1000ul * device; return 0; }}\n\
         int cuDeviceGetAttribute(int *to, int what, int device) {{ *to = what == 75 ? 9 : what == 76 ? device - 40 : -1; return 0; }}\n\
         int cuDeviceCanAccessPeer(int *to, int device, int peer) {{ *to = peer == device + 1; return 0; }}\n\
         int cuGetErrorName(int e, const char **to) {{ *to = \"CUDA_ERROR_OF_TEST\"; return 0; }}\n\
         int cuGetErrorString(int e, const char **to) {{ *to = \"some words\"; return 0; }}\n"
    );
    std::fs::write(&source, text).unwrap();
    let library = folder.join("libcuda.so");
    match Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status() {
        Ok(status) => assert!(status.success(), "cc: {status}"),
        Err(error) => {
            use std::io::Write;
            // Not by a macro: the test harness would keep it to itself.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: a test of drivers that are not usable: no C compiler (cc: {error})"
            );
            return None;
        }
    }
    Some(())
}

#[test]
fn each_unusable_driver_is_named_in_one_line_with_what_to_do() {
    for (version, init, words) in [
        (11_040, 0, &["the driver is for CUDA 11.4", "12.0 or later: install a newer driver"][..]),
        (12_000, 100, &["CUDA_ERROR_OF_TEST (100): some words", "the driver is here, a GPU is not"]),
        (13_000, 34, &["(34)", "stub", "LD_LIBRARY_PATH"]),
        (13_000, 803, &["(803)", "restart the machine"]),
        (13_000, 802, &["(802)", "nvidia-fabricmanager"]),
        (13_000, 999, &["CUDA is not available here: CUDA_ERROR_OF_TEST (999): some words"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        if stand_in(folder.path(), version, init, 0).is_none() {
            return;
        }
        let said = said(folder.path());
        assert_eq!(said.len(), 3, "{said:?}");
        for line in said {
            assert!(line.starts_with("CUDA is not available here: "), "{line}");
            for word in words {
                assert!(line.contains(word), "no {word:?}: {line}");
            }
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_named_with_those_that_are() {
    for (count, words) in [(2, "GPUs 0 to 1"), (1, "only GPU 0"), (0, "none")] {
        let folder = tempfile::tempdir().unwrap();
        if stand_in(folder.path(), 12_040, 0, count).is_none() {
            return;
        }
        let said = said(folder.path());
        let expected =
            format!("cuda::open: there is no GPU 7: the driver sees {words} (CUDA_VISIBLE_DEVICES is \"3,4\")");
        assert_eq!(said[..2], [format!("{count} GPUs"), expected]);
    }
}

#[test]
fn the_inventory_is_what_the_driver_says_of_each_gpu() {
    let folder = tempfile::tempdir().unwrap();
    if stand_in(folder.path(), 12_040, 0, 3).is_none() {
        return;
    }
    let gpu = |ordinal: usize, peers: &str| {
        let (name, memory) = (["A", "B", "C"][ordinal], 1000 * (40 + ordinal));
        format!("Gpu {{ name: {name:?}, capability: (9, {ordinal}), memory: {memory}, peers: {peers} }}")
    };
    let gpus = [gpu(0, "[1]"), gpu(1, "[2]"), gpu(2, "[]")].join(", ");
    assert_eq!(said(folder.path())[2], format!("Inventory {{ driver: (12, 4), gpus: [{gpus}] }}"));
}

#[test]
fn what_is_no_library_is_as_good_as_none() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libcuda.so"), "cut off").unwrap();
    for line in said(folder.path()) {
        // Unless the system has a driver, which is found then; with the GPUs that `said` leaves visible, or none.
        let found = line.ends_with(" GPUs")
            || line.starts_with("cuda::open")
            || line.starts_with("CudaContext")
            || line.starts_with("Inventory")
            || line.contains("the driver is here, a GPU is not");
        assert!(found || line.contains("libcuda.so.1 was not found; it comes with NVIDIA's driver"), "{line}");
    }
}
