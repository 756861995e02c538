//! The options that every program which starts Python ranks has, and the launcher of those ranks.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use tinynccl::launch::Launcher;

use crate::{Interpreter, Needs, extension};

/// How many ranks, of which Python, with which package.
#[derive(Debug, clap::Args)]
pub struct Ranks {
    /// Ranks to start on this machine.
    #[arg(long, default_value_t = 2, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub ranks: usize,
    /// The interpreter (default: the first of python3, /usr/bin/python3 and others that has what is needed).
    #[arg(long)]
    pub python: Option<PathBuf>,
    /// Folder of a built package `tinynccl` (default: build it).
    #[arg(long)]
    pub module: Option<PathBuf>,
}

impl Ranks {
    /// A launcher of ranks that run `script`: finds the interpreter, builds the package, and says which Python it is.
    ///
    /// # Errors
    /// [`crate::Unavailable`] when no interpreter has what is needed; else what the build said.
    pub fn launcher(
        self,
        needs: Needs,
        script: &Path,
        args: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Result<Launcher> {
        let python = Interpreter::find(self.python, needs)?;
        let module = self.module.map_or_else(extension::build, Ok)?;
        println!("{python}");
        Ok(Launcher::new(self.ranks)
            .program(&python.program)
            .args([script.as_os_str().to_owned()].into_iter().chain(args.into_iter().map(Into::into)))
            .env("PYTHONPATH", module)
            .env("PYTHONUNBUFFERED", "1"))
    }
}
