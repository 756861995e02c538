//! Finds a suitable Python. Several may be installed, and Debian's torch belongs to `/usr/bin/python3`, whichever comes
//! first on the PATH.

use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Everything that is missing, and the remedy, in one line.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unavailable(pub String);

/// The modules that a program imports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    /// numpy or torch.
    Arrays,
    /// torch with `torch.distributed`.
    Torch,
}

/// An interpreter that can run our ranks.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Interpreter {
    /// Its executable.
    pub program: PathBuf,
    /// `3.11.2`.
    pub version: String,
    /// Version of torch, if it can be imported and has `torch.distributed`.
    pub torch: Option<String>,
    /// Version of numpy, if it can be imported.
    pub numpy: Option<String>,
}

/// The script that each interpreter runs. It prints one word per line.
const QUESTION: &str = "
import sys
def version(name):
    try:
        module = __import__(name)
        if name == 'torch':
            import torch.distributed as dist
            if not dist.is_available():
                return '-'
        return str(module.__version__)
    except Exception:
        return '-'
print('.'.join(map(str, sys.version_info[:3])))
print(version('torch'))
print(version('numpy'))
";

/// Oldest interpreter that the extension is built for.
const OLDEST: (u32, u32) = (3, 11);

impl Interpreter {
    /// The first interpreter that meets `needs`: `asked` if given, else one of those on the PATH and of the system.
    ///
    /// # Errors
    /// If there is none: what each interpreter lacks, and how to install it.
    pub fn find(asked: Option<PathBuf>, needs: Needs) -> Result<Interpreter, Unavailable> {
        let candidates = match asked {
            Some(program) => vec![program],
            None => ["python3", "/usr/bin/python3", "python3.13", "python3.12", "python3.11", "python"]
                .iter()
                .map(PathBuf::from)
                .collect(),
        };
        let mut lacking = Vec::new();
        for program in candidates {
            match Interpreter::ask(&program) {
                Ok(found) => match found.lacks(needs) {
                    None => return Ok(found),
                    Some(lack) => lacking.push(format!("{} ({}) {lack}", program.display(), found.version)),
                },
                Err(reason) => lacking.push(format!("{}: {reason}", program.display())),
            }
        }
        let (what, how) = match needs {
            Needs::Arrays => ("numpy or torch", "apt-get install python3-numpy, or pip install numpy"),
            Needs::Torch => ("torch", "apt-get install python3-torch (1.13), or pip install torch (2.x)"),
        };
        Err(Unavailable(format!(
            "no Python {}.{} or later with {what} here; tried {}. To install: {how}. Another interpreter: --python PATH",
            OLDEST.0,
            OLDEST.1,
            lacking.join("; ")
        )))
    }

    fn ask(program: &PathBuf) -> Result<Interpreter, String> {
        let output = Command::new(program)
            .args(["-c", QUESTION])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut lines = text.lines().map(str::to_owned);
        let (Some(version), Some(torch), Some(numpy)) = (lines.next(), lines.next(), lines.next()) else {
            return Err(format!("it did not answer ({})", output.status));
        };
        let there = |version: String| Some(version).filter(|v| v != "-");
        Ok(Interpreter { program: program.clone(), version, torch: there(torch), numpy: there(numpy) })
    }

    fn lacks(&self, needs: Needs) -> Option<&'static str> {
        let mut numbers = self.version.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        match needs {
            _ if version < OLDEST => Some("is too old"),
            Needs::Arrays if self.torch.is_none() && self.numpy.is_none() => Some("has neither numpy nor torch"),
            Needs::Torch if self.torch.is_none() => Some("has no torch.distributed"),
            _ => None,
        }
    }
}

impl fmt::Display for Interpreter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Python {} ({})", self.version, self.program.display())?;
        for (name, version) in [("torch", &self.torch), ("numpy", &self.numpy)] {
            match version {
                Some(version) => write!(f, ", {name} {version}")?,
                None => write!(f, ", no {name}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpreter(version: &str, torch: bool, numpy: bool) -> Interpreter {
        let some = |there: bool| there.then(|| "1".to_owned());
        Interpreter { program: "python3".into(), version: version.to_owned(), torch: some(torch), numpy: some(numpy) }
    }

    #[test]
    fn says_what_is_lacking() {
        assert_eq!(interpreter("3.11.2", false, true).lacks(Needs::Arrays), None);
        assert_eq!(interpreter("3.11.2", false, true).lacks(Needs::Torch), Some("has no torch.distributed"));
        assert_eq!(interpreter("3.9.18", true, true).lacks(Needs::Torch), Some("is too old"));
        assert_eq!(interpreter("3.13.0", false, false).lacks(Needs::Arrays), Some("has neither numpy nor torch"));
    }

    #[test]
    fn a_missing_program_is_named() {
        let error = Interpreter::find(Some("/nonexistent/python".into()), Needs::Torch).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/python: No such file") && error.contains("python3-torch"), "{error}");
    }
}
