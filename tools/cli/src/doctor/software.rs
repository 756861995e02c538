//! Software beside the library: Python, MPI, the emulator, build dependencies of RDMA.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use course_kit::python::{Interpreter, Needs};
use serde::Serialize;

/// Each part, or why it is not there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Software {
    /// A Python with numpy or torch.
    pub(crate) python: Result<Interpreter, String>,
    /// A Python with `torch.distributed`.
    pub(crate) torch: Result<Interpreter, String>,
    /// First line of `mpirun --version`, and the path of the program.
    pub(crate) mpirun: Option<Program>,
    /// Needed to build the feature `mpi`.
    pub(crate) mpicc: Option<PathBuf>,
    /// QEMU, which runs the virtual machine with soft-RoCE.
    pub(crate) qemu: Option<PathBuf>,
    /// Builds the book.
    pub(crate) mdbook: Option<PathBuf>,
    /// Missing build dependencies of the feature `verbs`.
    pub(crate) verbs_lacks: Vec<&'static str>,
}

/// A program and its version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) version: String,
}

impl Software {
    pub(crate) fn find() -> Software {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let program = |name: &str| which(&path, name);
        let header =
            |file: &str| ["/usr/include", "/usr/local/include"].iter().any(|at| Path::new(at).join(file).exists());
        let lacks = [
            ("libibverbs-dev", header("infiniband/verbs.h")),
            ("libnl-route-3-dev", header("libnl3/netlink/route/link.h")),
            ("cmake", program("cmake").is_some()),
            ("pkg-config", program("pkg-config").is_some()),
        ];
        Software {
            python: python(Needs::Arrays),
            torch: python(Needs::Torch),
            mpirun: program("mpirun").map(|path| Program { version: version(&path), path }),
            mpicc: program("mpicc"),
            qemu: program("qemu-system-x86_64"),
            mdbook: program("mdbook"),
            verbs_lacks: lacks.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect(),
        }
    }
}

fn python(needs: Needs) -> Result<Interpreter, String> {
    let found = Interpreter::find(None, needs).map_err(|e| e.to_string())?;
    // As the shell would find it.
    let program = match found.program.parent().is_some_and(|folder| folder.as_os_str().is_empty()) {
        true => which(&std::env::var_os("PATH").unwrap_or_default(), &found.program.to_string_lossy()),
        false => None,
    };
    Ok(Interpreter { program: program.unwrap_or(found.program), ..found })
}

/// The first file of that name on a PATH.
fn which(path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// First line of what `--version` prints.
fn version(program: &Path) -> String {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("it does not tell its version").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_a_path_is_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        std::fs::write(folder.path().join("b/tool"), "").unwrap();
        let path = std::env::join_paths(["a", "b"].map(|name| folder.path().join(name))).unwrap();
        assert_eq!(which(&path, "tool"), Some(folder.path().join("b/tool")));
        assert_eq!(which(&path, "b"), None, "a folder is no program");
        assert_eq!(which(OsStr::new(""), "tool"), None);
    }
}
