//! The library that a process gets: programs that open NCCL's by its path, and programs linked to it with a DT_RPATH.

use std::path::{Path, PathBuf};
use std::process::Command;

use program_kit::testing;
use tempfile::TempDir;

/// Both print the version of the library that they get: of the file named by the argument, and of the linked one.
const OPENS: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int version = 0, (*get)(int *);
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) { fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "no path"); return 1; }
    get = (int (*)(int *))dlsym(library, "ncclGetVersion");
    return get && get(&version) == 0 ? !printf("%d", version) : 1;
}"#;
const LINKED: &str = r#"
#include <stdio.h>
int ncclGetVersion(int *);
int main(void) { int version = 0; ncclGetVersion(&version); return !printf("%d", version); }"#;

const THEIRS: &str = "1";
const OURS: &str = "2";

/// A library as a wheel has it, one of ours, and both programs.
struct Place {
    folder: TempDir,
    theirs: PathBuf,
    ours: PathBuf,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join("site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        let library = |folder: &Path, name: &str, version: &str| {
            let source = format!("int ncclGetVersion(int *v) {{ *v = {version}; return 0; }}");
            testing::compiled(folder, name, &source, &["-shared", "-Wl,-soname,libnccl.so.2"])
        };
        let theirs = library(&wheel, "libnccl.so.2", THEIRS);
        let ours = library(folder.path(), "libnccl.so", OURS);
        Place { folder, theirs, ours }
    }

    /// A program that opens the wheel's file by its path.
    fn opens(&self) -> Command {
        let program = testing::compiled(self.folder.path(), "opens", OPENS, &["-ldl"]);
        let mut command = testing::program(program);
        command.arg(&self.theirs);
        command
    }

    /// A program linked to the wheel's file, whose folder is in its DT_RPATH, as PyTorch's libraries are.
    fn linked(&self) -> Command {
        let wheel = self.theirs.parent().unwrap().display().to_string();
        let rpath = format!("-Wl,--disable-new-dtags,-rpath,{wheel}");
        let options = [self.theirs.to_str().unwrap(), &rpath];
        testing::program(testing::compiled(self.folder.path(), "linked", LINKED, &options))
    }

    fn audited<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("LD_AUDIT", audit()).env("TINYNCCL_NCCL_LIBRARY", &self.ours)
    }
}

/// The audit library that was built for this test, beside it.
fn audit() -> PathBuf {
    let mut folder = std::env::current_exe().unwrap();
    folder.pop();
    let library = folder.join("libnccl_audit.so");
    assert!(library.is_file(), "{} is not there", library.display());
    library
}

#[test]
fn a_program_that_opens_a_path_gets_ours_by_audit_alone() {
    let place = Place::new();
    assert_eq!(testing::output(&mut place.opens()), THEIRS);
    assert_eq!(testing::output(place.opens().env("LD_PRELOAD", &place.ours)), THEIRS, "the reason for this library");
    assert_eq!(testing::output(place.audited(&mut place.opens())), OURS);
    assert_eq!(testing::output(place.audited(&mut place.opens()).env("LD_PRELOAD", &place.ours)), OURS);
}

#[test]
fn a_linked_program_gets_ours_by_preload_and_by_audit() {
    let place = Place::new();
    assert_eq!(testing::output(&mut place.linked()), THEIRS);
    // A DT_RPATH comes before LD_LIBRARY_PATH.
    let alone = place.folder.path().join("alone");
    std::fs::create_dir(&alone).unwrap();
    std::fs::copy(&place.ours, alone.join("libnccl.so.2")).unwrap();
    assert_eq!(testing::output(place.linked().env("LD_LIBRARY_PATH", &alone)), THEIRS);
    assert_eq!(testing::output(place.linked().env("LD_PRELOAD", &place.ours)), OURS);
    assert_eq!(testing::output(place.audited(&mut place.linked())), OURS);
}

#[test]
fn without_its_variable_nothing_changes() {
    let place = Place::new();
    for empty in [None, Some("")] {
        let mut command = place.opens();
        command.env("LD_AUDIT", audit()).env_remove("TINYNCCL_NCCL_LIBRARY");
        if let Some(value) = empty {
            command.env("TINYNCCL_NCCL_LIBRARY", value);
        }
        assert_eq!(testing::output(&mut command), THEIRS);
    }
}

#[test]
fn a_library_that_is_not_there_is_an_error_of_the_loader() {
    let place = Place::new();
    let outcome = testing::run(place.audited(&mut place.opens()).env("TINYNCCL_NCCL_LIBRARY", "/nowhere/libnccl.so"));
    assert!(!outcome.success() && outcome.stderr.contains("/nowhere/libnccl.so"), "{outcome:?}");
}
