//! Records of a job: made by its processes, read as a view, and written for PyTorch's analyser.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use tinynccl::status::ask::{self, Answers};
use tinynccl::status::record::{self, Record};

use super::{Asked, Look, NONE, ODD, torch};

/// Makes the processes write their records into `into`, and writes those for PyTorch beside them.
///
/// # Errors
/// No process can be asked, or a file cannot be read or written.
pub(super) fn dump(asked: &Asked, into: &Path, timeout: Duration) -> Result<Look> {
    let into = std::path::absolute(into)?;
    let mut page = String::new();
    let (mut jobs, mut refused): (Vec<PathBuf>, bool) = (Vec::new(), false);
    for (pid, files) in ask::dump(&asked.folders, &into, asked.pid, timeout)? {
        match files {
            Ok(files) => jobs.extend(files.iter().filter_map(|file| file.parent().map(Path::to_owned))),
            Err(error) => {
                refused = true;
                page += &format!("process {pid} has written no record: {error}\n");
            }
        }
    }
    jobs.sort();
    jobs.dedup();
    for job in &jobs {
        let records = read(job)?;
        write_for_torch(&records)?;
        let ranks: Vec<String> = records.iter().map(|(_, record)| record.rank.to_string()).collect();
        page += &format!(
            "{}: the last calls of rank{} {} (rank_*.json), and for torchfrtrace (fr_rank_*)\n",
            job.display(),
            if ranks.len() == 1 { "" } else { "s" },
            ranks.join(", ")
        );
    }
    if jobs.is_empty() && !refused {
        page += "no job: no process of this user has a communicator\n";
    }
    let code = match (refused, jobs.is_empty()) {
        (true, _) => ODD,
        (false, true) => NONE,
        (false, false) => 0,
    };
    Ok(Look { page, code })
}

/// Reads the records in a folder as answers of the processes.
///
/// # Errors
/// There are none, or a file is no record.
pub(super) fn answers(folder: &Path) -> Result<Answers> {
    let records = read(folder)?;
    Ok(Answers { reports: records.into_iter().map(|(_, record)| record.report).collect(), ..Answers::default() })
}

/// Writes the records in a folder for PyTorch's analyser, too.
///
/// # Errors
/// As [`answers`], and a file cannot be written.
pub(super) fn for_torch(folder: &Path) -> Result<()> {
    write_for_torch(&read(folder)?)
}

fn read(folder: &Path) -> Result<Vec<(PathBuf, Record)>> {
    let records = record::read(folder).with_context(|| format!("reading the records in {}", folder.display()))?;
    if records.is_empty() {
        bail!("{}: there are no records (rank_*.json) in it or below it", folder.display());
    }
    Ok(records)
}

/// Writes each job's records for PyTorch's analyser, beside them: `fr_rank_RANK`.
fn write_for_torch(records: &[(PathBuf, Record)]) -> Result<()> {
    let mut jobs: BTreeMap<&str, Vec<&(PathBuf, Record)>> = BTreeMap::new();
    for one in records {
        jobs.entry(&one.1.report.jobs[0].job).or_default().push(one);
    }
    for job in jobs.into_values() {
        let all: Vec<&Record> = job.iter().map(|(_, record)| record).collect();
        for ((path, record), pickle) in job.iter().zip(torch::pickles(&all)) {
            let file = path.with_file_name(format!("fr_rank_{}", record.rank));
            std::fs::write(&file, pickle).with_context(|| format!("writing {}", file.display()))?;
        }
    }
    Ok(())
}
