//! The library as programs find it: symbols with their versions, and the pingpongs of rdma-core where they are
//! installed.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use program_kit::port::Port;

fn library() -> PathBuf {
    let program = std::env::current_exe().expect("this program");
    // Beside this program; only `cargo build` links it one folder higher.
    let library = program.with_file_name("libibverbs_roce.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Some of the symbols that NVIDIA's NCCL looks up with `dlvsym`, and that perftest is linked to.
const WANTED: [(&str, &str); 47] = [
    ("ibv_get_device_list", "IBVERBS_1.1"),
    ("ibv_free_device_list", "IBVERBS_1.1"),
    ("ibv_get_device_name", "IBVERBS_1.1"),
    ("ibv_open_device", "IBVERBS_1.1"),
    ("ibv_close_device", "IBVERBS_1.1"),
    ("ibv_get_async_event", "IBVERBS_1.1"),
    ("ibv_ack_async_event", "IBVERBS_1.1"),
    ("ibv_query_device", "IBVERBS_1.1"),
    ("ibv_query_port", "IBVERBS_1.1"),
    ("ibv_query_gid", "IBVERBS_1.1"),
    ("ibv_query_qp", "IBVERBS_1.1"),
    ("ibv_alloc_pd", "IBVERBS_1.1"),
    ("ibv_dealloc_pd", "IBVERBS_1.1"),
    ("ibv_reg_mr", "IBVERBS_1.1"),
    ("ibv_reg_mr_iova2", "IBVERBS_1.8"),
    ("ibv_reg_dmabuf_mr", "IBVERBS_1.12"),
    ("ibv_dereg_mr", "IBVERBS_1.1"),
    ("ibv_create_cq", "IBVERBS_1.1"),
    ("ibv_destroy_cq", "IBVERBS_1.1"),
    ("ibv_create_qp", "IBVERBS_1.1"),
    ("ibv_modify_qp", "IBVERBS_1.1"),
    ("ibv_destroy_qp", "IBVERBS_1.1"),
    ("ibv_fork_init", "IBVERBS_1.1"),
    ("ibv_event_type_str", "IBVERBS_1.1"),
    ("ibv_query_ece", "IBVERBS_1.10"),
    ("ibv_set_ece", "IBVERBS_1.10"),
    ("ibv_create_comp_channel", "IBVERBS_1.0"),
    ("ibv_qp_to_qp_ex", "IBVERBS_1.6"),
    ("ibv_query_port_speed", "IBVERBS_1.16"),
    // Of rdma-core 65.
    ("ibv_alloc_dmah", "IBVERBS_1.15"),
    ("ibv_dealloc_dmah", "IBVERBS_1.15"),
    ("ibv_reg_mr_ex", "IBVERBS_1.15"),
    ("ibv_dm_export_dmabuf_fd", "IBVERBS_1.16"),
    ("ibv_alloc_buf", "IBVERBS_1.17"),
    ("ibv_free_buf", "IBVERBS_1.17"),
    ("ibv_reg_buf_mr", "IBVERBS_1.17"),
    ("_ibv_query_comp_cntr_caps", "IBVERBS_1.18"),
    ("ibv_create_comp_cntr", "IBVERBS_1.18"),
    ("ibv_export_buf_dmabuf_fd", "IBVERBS_1.18"),
    ("ibv_set_err_comp_cntr", "IBVERBS_1.18"),
    ("ibv_query_gid_type", "IBVERBS_PRIVATE_34"),
    ("ibv_query_gid_type", "IBVERBS_PRIVATE_65"),
    ("ibv_cmd_alloc_pd", "IBVERBS_PRIVATE_34"),
    ("ibv_cmd_alloc_pd", "IBVERBS_PRIVATE_65"),
    ("ibv_cmd_reg_mr_ex", "IBVERBS_PRIVATE_65"),
    ("verbs_register_driver_65", "IBVERBS_PRIVATE_65"),
    ("verbs_allow_disassociate_destroy", "IBVERBS_PRIVATE_65"),
];

#[test]
fn symbols_have_their_versions() {
    // SAFETY: loading the library runs no code in it.
    let library = unsafe { libloading::os::unix::Library::new(library()) }.expect("loaded");
    let handle = library.into_raw();
    for (name, version) in WANTED {
        let (c_name, c_version) = (CString::new(name).expect("text"), CString::new(version).expect("text"));
        // SAFETY: an open library and two texts.
        let found = unsafe { libc::dlvsym(handle, c_name.as_ptr(), c_version.as_ptr()) };
        assert!(!found.is_null(), "{name}@{version}");
    }
}

/// Defined dynamic symbols with their kind (text or data) and version; `None` where binutils are not installed.
fn symbols(library: &Path) -> Option<BTreeSet<String>> {
    let output =
        Command::new("nm").args(["-D", "--defined-only", "--with-symbol-versions"]).arg(library).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let line = |line: &str| {
        let (kind, name) = line.split_whitespace().nth(1).zip(line.split_whitespace().nth(2))?;
        // The versions themselves are absolute symbols where GNU ld made the library.
        (kind != "A").then(|| format!("{} {name}", if kind == "T" { "function" } else { "data" }))
    };
    Some(String::from_utf8_lossy(&output.stdout).lines().filter_map(line).collect())
}

#[test]
fn every_symbol_of_the_systems_library_is_there() {
    let machine = std::env::consts::ARCH;
    let folders = [format!("/usr/lib/{machine}-linux-gnu"), "/usr/lib64".to_owned(), "/usr/lib".to_owned()];
    let system = folders.iter().map(|folder| Path::new(folder).join("libibverbs.so.1")).find(|path| path.exists());
    let Some(system) = system else {
        return eprintln!("SKIPPED: no libibverbs.so.1 in {folders:?} to compare with (Debian's libibverbs1)");
    };
    let (Some(ours), Some(theirs)) = (symbols(&library()), symbols(&system)) else {
        return eprintln!("SKIPPED: nm is not installed (Debian's binutils)");
    };
    let (private, public): (BTreeSet<_>, BTreeSet<_>) = theirs.iter().partition(|s| s.contains("@IBVERBS_PRIVATE_"));
    assert!(public.len() > 100, "{} lists {} symbols", system.display(), public.len());
    let missing: Vec<_> = public.iter().filter(|s| !ours.contains(**s)).collect();
    assert!(missing.is_empty(), "not there, of {}: {missing:#?}", system.display());
    // The private ones change with rdma-core; ours are those of Debian 12 and Ubuntu 22.04, for their providers.
    if private.iter().any(|s| s.contains("@IBVERBS_PRIVATE_34")) {
        let missing: Vec<_> = private.iter().filter(|s| !ours.contains(**s)).collect();
        assert!(missing.is_empty(), "not there, of {}: {missing:#?}", system.display());
    } else {
        eprintln!("SKIPPED: the private symbols of {}, which are not IBVERBS_PRIVATE_34", system.display());
    }
    let stray: Vec<_> = ours.iter().filter(|s| !s.contains("@IBVERBS_")).collect();
    assert!(stray.is_empty(), "symbols without a version: {stray:#?}");
}

/// Name of the loopback device, which is the last one, and index of its IPv4 address.
fn loopback() -> (String, String) {
    let devices = softroce::Device::list().expect("interfaces");
    let device = devices.iter().find(|d| d.is_loopback()).expect("a loopback interface");
    (device.name().to_owned(), device.default_gid_index().to_string())
}

/// Runs a program as server and as client; `None` where it is not installed.
fn pair(program: &str, arguments: &[&str]) -> Option<String> {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().ok()?;
    let folder = tempfile::tempdir().expect("a folder");
    symlink(library(), folder.path().join("libibverbs.so.1")).expect("a link");
    let held = Port::loopback();
    let port = held.at.port().to_string();
    let (device, gid) = loopback();
    let command = || {
        // They have no time limit.
        let mut command = Command::new("timeout");
        command.args(["120", program, "-d", &device, "-g", &gid, "-p", &port]).args(arguments);
        command.env("LD_LIBRARY_PATH", folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let server = command().spawn().expect("started");
    // The server listens soon; a client that is too early reports that and is started again.
    let client = loop {
        let client = command().arg("127.0.0.1").output().expect("ran");
        let text = String::from_utf8_lossy(&client.stderr).into_owned() + &String::from_utf8_lossy(&client.stdout);
        if !text.contains("Couldn't connect") {
            break (client.status, text);
        }
        std::thread::yield_now();
    };
    let server = server.wait_with_output().expect("waited");
    assert!(client.0.success() && server.status.success(), "{program}: {}\n{server:?}", client.1);
    Some(client.1)
}

#[test]
fn the_pingpongs_of_rdma_core_run() {
    for (program, arguments) in [
        ("ibv_rc_pingpong", &["-c", "-n", "100"][..]),
        ("ibv_rc_pingpong", &["-e", "-s", "100000", "-n", "100"]),
        ("ibv_srq_pingpong", &["-n", "100"]),
        ("ibv_ud_pingpong", &["-n", "100"]),
    ] {
        match pair(program, arguments) {
            Some(text) => assert!(text.contains("iters in"), "{text}"),
            None => eprintln!("SKIPPED: {program} is not installed (Debian's ibverbs-utils)"),
        }
    }
}
