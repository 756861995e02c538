//! Starts Python ranks; the options that all programs of this kind share.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use replay::Replay;
use tinynccl::launch::{self, Launcher};

use super::{Interpreter, Needs, extension};

/// The number of ranks, the interpreter and the package.
#[derive(Debug, clap::Args)]
pub struct Ranks {
    /// Ranks to start on this machine.
    #[arg(long, default_value_t = 2, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub ranks: usize,
    /// Interpreter (default: the first of python3, /usr/bin/python3 and others that has the needed modules).
    #[arg(long)]
    pub python: Option<PathBuf>,
    /// Folder of a built package `tinynccl` (default: build it).
    #[arg(long)]
    pub module: Option<PathBuf>,
    /// A page of the run.
    #[command(flatten)]
    pub replay: Replay,
}

impl Ranks {
    /// Finds the interpreter, builds the package, prints the interpreter's name, and starts ranks that run `script`,
    /// adapted by `adapt`. Under mpirun, torchrun or srun this process is one rank: it becomes the script and does not
    /// return.
    ///
    /// # Errors
    /// [`super::Unavailable`] when no interpreter has the needed modules; else the build or the start failed.
    pub fn run(
        self,
        needs: Needs,
        script: &Path,
        args: Vec<String>,
        adapt: impl FnOnce(Launcher) -> Launcher,
    ) -> Result<i32> {
        let replay = self.replay.clone();
        replay.around(launch::is_rank(), || self.launch(needs, script, args, adapt))
    }

    fn launch(
        self,
        needs: Needs,
        script: &Path,
        args: Vec<String>,
        adapt: impl FnOnce(Launcher) -> Launcher,
    ) -> Result<i32> {
        let python = Interpreter::find(self.python, needs)?;
        let module = self.module.map_or_else(extension::build, Ok)?;
        let args = [script.as_os_str().to_owned()].into_iter().chain(args.into_iter().map(OsString::from));
        let env: [(&str, &OsStr); 2] = [("PYTHONPATH", module.as_os_str()), ("PYTHONUNBUFFERED", OsStr::new("1"))];
        if launch::is_rank() {
            let error = Command::new(&python.program).args(args).envs(env).exec();
            return Err(error).with_context(|| format!("becoming {}", python.program.display()));
        }
        println!("{python}");
        let launcher = Launcher::new(self.ranks).program(&python.program).args(args);
        let launcher = env.into_iter().fold(launcher, |launcher, (name, value)| launcher.env(name, value));
        adapt(launcher).run().context("starting the ranks")
    }
}
