//! Our header against the types of `abi`, and, where they are, NVIDIA's headers against both.
//!
//! A C program writes what the compiler makes of a header: sizes, offsets, values. `functions.h` compares the
//! functions' types while it is compiled.

use std::collections::BTreeMap;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use nccl::abi::*;

/// C's expression, and what it is here.
type Facts = Vec<(String, i64)>;

/// Size of a struct, and offsets of its fields as C names them.
macro_rules! layout {
    ($facts:ident, $type:ty as $name:literal { $($field:ident as $theirs:literal),* $(,)? }) => {
        $facts.push((concat!("sizeof(", $name, ")").to_owned(), size_of::<$type>() as i64));
        $($facts.push((
            concat!("offsetof(", $name, ", ", $theirs, ")").to_owned(),
            offset_of!($type, $field) as i64,
        ));)*
    };
}

fn facts() -> Facts {
    let mut facts = Facts::new();
    layout!(facts, UniqueId as "ncclUniqueId" { internal as "internal" });
    layout!(facts, Config as "ncclConfig_t" {
        size as "size", magic as "magic", version as "version", blocking as "blocking",
        cga_cluster_size as "cgaClusterSize", min_ctas as "minCTAs", max_ctas as "maxCTAs", net_name as "netName",
        split_share as "splitShare", traffic_class as "trafficClass", comm_name as "commName",
        collnet_enable as "collnetEnable", cta_policy as "CTAPolicy", shrink_share as "shrinkShare",
        nvls_ctas as "nvlsCTAs", n_channels_per_net_peer as "nChannelsPerNetPeer",
        nvlink_centric_sched as "nvlinkCentricSched", graph_usage_mode as "graphUsageMode",
        num_rma_ctx as "numRmaCtx", max_p2p_peers as "maxP2pPeers", graph_stream_ordering as "graphStreamOrdering",
    });
    layout!(facts, SimInfo as "ncclSimInfo_t" {
        size as "size", magic as "magic", version as "version", estimated_time as "estimatedTime",
    });
    layout!(facts, WaitSignalDesc as "ncclWaitSignalDesc_t" {
        op_count as "opCnt", peer as "peer", signal as "sigIdx", context as "ctx",
    });
    // Enums that functions take are plain ints here.
    for name in ["ncclResult_t", "ncclDataType_t", "ncclRedOp_t", "ncclScalarResidence_t", "ncclCommMemStat_t"] {
        facts.push((format!("sizeof({name})"), size_of::<std::ffi::c_int>() as i64));
    }
    for name in ["ncclComm_t", "ncclWindow_t", "ncclParamHandle_t"] {
        facts.push((format!("sizeof({name})"), size_of::<usize>() as i64));
    }
    let names = [
        "ncclSuccess",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclInternalError",
        "ncclInvalidArgument",
        "ncclInvalidUsage",
        "ncclRemoteError",
        "ncclInProgress",
        "ncclTimeout",
    ];
    assert_eq!(names.len(), Status::ALL.len());
    let mut value = |name: &str, value: i64| facts.push((name.to_owned(), value));
    for (name, status) in names.into_iter().zip(Status::ALL) {
        value(name, status as i64);
    }
    value("ncclNumResults", Status::ALL.len() as i64);
    for (name, dtype) in [
        ("ncclInt8", "i8"),
        ("ncclUint8", "u8"),
        ("ncclInt32", "i32"),
        ("ncclUint32", "u32"),
        ("ncclInt64", "i64"),
        ("ncclUint64", "u64"),
        ("ncclFloat16", "f16"),
        ("ncclFloat32", "f32"),
        ("ncclFloat64", "f64"),
        ("ncclBfloat16", "bf16"),
        ("ncclFloat8e4m3", "f8e4m3"),
        ("ncclFloat8e5m2", "f8e5m2"),
        ("ncclChar", "i8"),
        ("ncclInt", "i32"),
        ("ncclHalf", "f16"),
        ("ncclFloat", "f32"),
        ("ncclDouble", "f64"),
    ] {
        value(name, TYPES.iter().position(|known| known.name() == dtype).unwrap() as i64);
    }
    value("ncclNumTypes", TYPES.len() as i64);
    for (name, op) in
        [("ncclSum", "sum"), ("ncclProd", "prod"), ("ncclMax", "max"), ("ncclMin", "min"), ("ncclAvg", "avg")]
    {
        value(name, OPERATORS.iter().position(|known| known.name() == op).unwrap() as i64);
    }
    for (name, is) in [
        ("ncclNumOps", i64::from(NUM_OPS)),
        ("ncclMaxRedOp", i64::from(i32::MAX)),
        ("ncclScalarDevice", i64::from(SCALAR_DEVICE)),
        ("ncclScalarHostImmediate", i64::from(SCALAR_HOST)),
        ("ncclStatGpuMemSuspend", i64::from(STAT_SUSPEND)),
        ("ncclStatGpuMemSuspended", i64::from(STAT_SUSPENDED)),
        ("ncclStatGpuMemPersist", i64::from(STAT_PERSIST)),
        ("ncclStatGpuMemTotal", i64::from(STAT_TOTAL)),
        ("NCCL_UNIQUE_ID_BYTES", UNIQUE_ID_BYTES as i64),
        ("NCCL_API_MAGIC", i64::from(CONFIG_MAGIC)),
        ("NCCL_CONFIG_UNDEF_INT", i64::from(UNDEFINED)),
        ("NCCL_SPLIT_NOCOLOR", i64::from(NO_COLOR)),
        ("NCCL_SHRINK_DEFAULT", i64::from(SHRINK_DEFAULT)),
        ("NCCL_SHRINK_ABORT", i64::from(SHRINK_ABORT)),
        ("NCCL_REVOKE_DEFAULT", i64::from(REVOKE_DEFAULT)),
        ("NCCL_SUSPEND_MEM", i64::from(SUSPEND_MEM)),
        ("NCCL_WIN_DEFAULT", i64::from(WIN_DEFAULT)),
        ("NCCL_WIN_COLL_SYMMETRIC", i64::from(WIN_COLL_SYMMETRIC)),
        ("NCCL_WIN_STRICT_ORDERING", i64::from(WIN_STRICT_ORDERING)),
        ("NCCL_WIN_REQUIRED_ALIGNMENT", WIN_ALIGNMENT as i64),
        // Of the header alone.
        ("NCCL_CTA_POLICY_DEFAULT", 0),
        ("NCCL_CTA_POLICY_EFFICIENCY", 1),
        ("NCCL_CTA_POLICY_ZERO", 2),
        ("NCCL_VERSION_CODE", 23_007),
        ("NCCL_VERSION(2, 8, 4)", 2_804),
        ("NCCL_VERSION(2, 28, 9)", 22_809),
        // What the initializers put in.
        ("config.size", size_of::<Config>() as i64),
        ("config.magic", i64::from(CONFIG_MAGIC)),
        ("config.blocking", i64::from(UNDEFINED)),
        ("config.graphStreamOrdering", i64::from(UNDEFINED)),
        ("config.commName == NULL", 1),
        ("sim.size", size_of::<SimInfo>() as i64),
        ("sim.magic", i64::from(SIM_INFO_MAGIC)),
        ("sim.estimatedTime == -1.0f", 1),
    ] {
        value(name, is);
    }
    facts
}

/// Facts of the device API's headers, which only NVIDIA's NCCL has.
fn device_facts() -> Facts {
    let mut facts = Facts::new();
    layout!(facts, Team as "ncclTeam" { ranks as "nRanks", rank as "rank", stride as "stride" });
    layout!(facts, Multimem as "ncclMultimemHandle" { base as "mcBasePtr" });
    layout!(facts, Properties as "ncclCommProperties" {
        size as "size", magic as "magic", version as "version", rank as "rank", ranks as "nRanks",
        cuda_device as "cudaDev", nvml_device as "nvmlDev", device_api as "deviceApiSupport",
        multimem as "multimemSupport", gin as "ginType", lsa_teams as "nLsaTeams", host_rma as "hostRmaSupport",
        railed_gin as "railedGinType",
    });
    facts
}

fn program(facts: &Facts) -> String {
    let mut text = "#include <stddef.h>\n#include <stdio.h>\n#include <nccl.h>\n#ifdef FUNCTIONS\n#include \"functions.h\"\n#endif\n\
                    int main(void) {\n\
                    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;\nncclSimInfo_t sim = NCCL_SIM_INFO_INITIALIZER;\n\
                    (void)config; (void)sim;\n"
        .to_owned();
    for (name, _) in facts {
        text.push_str(&format!("printf(\"%s=%lld\\n\", \"{name}\", (long long)({name}));\n"));
    }
    text + "return 0;\n}\n"
}

/// The values that a compiler gives; `None` where there is no compiler.
fn compile_and_run(
    language: &str,
    folders: &[PathBuf],
    options: &[&str],
    facts: &Facts,
) -> Option<BTreeMap<String, i64>> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    if Command::new(&compiler).arg("--version").output().is_err() {
        eprintln!("SKIPPED: there is no C compiler ({compiler}; CC names another)");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("facts"), folder.path().join("run"));
    std::fs::write(&source, program(facts)).unwrap();
    let include = |folder: &Path| format!("-I{}", folder.display());
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi");
    let built = |options: &[&str], output: &[&str]| {
        let made = Command::new(&compiler)
            .args(["-x", language, "-Wall", "-Werror", "-Wno-unused-const-variable", "-Wno-unused-variable"])
            .args(["-Wno-deprecated-declarations"])
            .args(options)
            .args(folders.iter().map(|folder| include(folder)))
            .arg(include(&here))
            .arg(&source)
            .args(output)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&made.stderr);
        if made.status.success() { Ok(()) } else { Err(text.into_owned()) }
    };
    let run = binary.to_str().unwrap();
    if let Err(error) = built(options, &["-o", run]) {
        // Another language than C needs its own compiler behind `cc`.
        if language != "c" && (error.contains("cc1plus") || error.contains("cannot execute")) {
            eprintln!("SKIPPED {language}: {compiler} has none");
            return None;
        }
        panic!("{error}");
    }
    // With the functions there is nothing to link to: compiled alone.
    let object = folder.path().join("functions.o");
    let with_functions = [options, &["-DFUNCTIONS"]].concat();
    built(&with_functions, &["-c", "-o", object.to_str().unwrap()]).unwrap();
    let output = Command::new(&binary).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let pairs = text.lines().map(|line| line.rsplit_once('=').unwrap());
    Some(pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect())
}

fn compare(header: &str, facts: &Facts, values: &BTreeMap<String, i64>, leave_out: &[&str]) {
    assert_eq!(values.len(), facts.len());
    let wrong: Vec<String> = facts
        .iter()
        .filter(|(name, value)| values[name] != *value && !leave_out.contains(&name.as_str()))
        .map(|(name, value)| format!("{name} is {value} here and {} in {header}", values[name]))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn our_header_is_what_the_library_takes() {
    let ours = [Path::new(env!("CARGO_MANIFEST_DIR")).join("include")];
    for (language, standard) in [("c", "-std=c99"), ("c", "-std=c11"), ("c++", "-std=c++11"), ("c++", "-std=c++17")] {
        let options = [standard, "-Wextra", "-Wpedantic", "-DNCCL_WITHOUT_CUDA"];
        if let Some(values) = compile_and_run(language, &ours, &options, &facts()) {
            compare("include/nccl.h", &facts(), &values, &[]);
        }
    }
}

/// `NCCL_HEADER_DIR`: a folder with NVIDIA's nccl.h of 2.30; `CUDA_INCLUDE_DIR`: one with cuda_runtime.h, unless the
/// compiler finds it.
#[test]
fn nvidias_header_is_the_same() {
    let Some(theirs) = std::env::var_os("NCCL_HEADER_DIR").map(PathBuf::from) else {
        eprintln!("SKIPPED nvidias_header_is_the_same: NCCL_HEADER_DIR names no folder with NVIDIA's nccl.h");
        return;
    };
    let cuda = std::env::var_os("CUDA_INCLUDE_DIR").map(PathBuf::from);
    let folders: Vec<PathBuf> = std::iter::once(theirs.clone()).chain(cuda).collect();
    for language in ["c", "c++"] {
        if let Some(values) = compile_and_run(language, &folders, &["-DNCCL_OS_LINUX"], &facts()) {
            // The patch may be another.
            compare(&theirs.join("nccl.h").display().to_string(), &facts(), &values, &["NCCL_VERSION_CODE"]);
        }
    }
    let device = theirs.join("nccl_device/core.h");
    if !device.exists() {
        eprintln!("SKIPPED the device API: there is no {}", device.display());
        return;
    }
    // Kernels' parts are inline functions that a host's compiler does not use.
    let options =
        ["-std=c++17", "-DNCCL_OS_LINUX", "-include", "nccl_device/impl/core__types.h", "-Wno-unused-function"];
    if let Some(values) = compile_and_run("c++", &folders, &options, &device_facts()) {
        compare(&device.display().to_string(), &device_facts(), &values, &[]);
    }
}
