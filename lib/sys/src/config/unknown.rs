//! Variables that nothing reads: a misspelt name would pass without a warning, and the default would hold.

use std::sync::Once;

use super::Config;

const PREFIX: &str = "TINYNCCL_";

/// Variables that are no settings of a communicator, and their readers.
const OTHERS: [&str; 5] = [
    "TINYNCCL_CHECKSUM",     // an older name of TINYNCCL_VERIFY=all
    "TINYNCCL_UNIQUE_ID",    // ranks of our launcher
    "TINYNCCL_NCCL_VERSION", // bindings/nccl
    "TINYNCCL_NCCL_LIBRARY", // bindings/nccl/audit
    "TINYNCCL_LEARN",        // tools/xtask
];

/// Beginnings of names that tests and scripts pass on.
const FAMILIES: [&str; 3] = ["TINYNCCL_TEST_", "TINYNCCL_VM_", "TINYNCCL_STANDIN_"];

/// Variables in which launchers put the rank.
const RANKS: [&str; 5] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Warns of each unknown variable: once in a process, and in a job by the launcher or by rank 0 alone.
pub(super) fn warn() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let of_launcher = std::env::var_os("TINYNCCL_UNIQUE_ID").is_some();
        let other_rank = RANKS.iter().any(|name| std::env::var_os(name).is_some_and(|rank| rank != "0"));
        if of_launcher || other_rank {
            return;
        }
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for line in lines(names) {
            log::warn!("{line}");
        }
    });
}

/// One line for each of `names` that is ours by its prefix and that nothing reads.
fn lines(names: impl Iterator<Item = String>) -> Vec<String> {
    let settings: Vec<&str> = Config::describe().into_iter().map(|setting| setting.env).chain(OTHERS).collect();
    let known = |name: &str| settings.contains(&name) || FAMILIES.iter().any(|family| name.starts_with(family));
    let mut unknown: Vec<String> = names.filter(|name| name.starts_with(PREFIX) && !known(name)).collect();
    unknown.sort();
    let line = |name: String| {
        let nearest = nearest(&name, &settings).map_or(String::new(), |setting| format!("did you mean {setting}? "));
        format!("{name} is set, and nothing reads it: {nearest}docs/config.md lists the settings")
    };
    unknown.into_iter().map(line).collect()
}

/// The name with the fewest letters to change, if that is less than half of them.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let own = name.strip_prefix(PREFIX)?;
    let by_distance = known.iter().filter_map(|setting| {
        let other = setting.strip_prefix(PREFIX)?;
        // ALGORITHM stands for ALGO, however long its end is.
        let begins = own.starts_with(other) || (!own.is_empty() && other.starts_with(own));
        Some((if begins { 1 } else { distance(own, other) }, *setting))
    });
    let (letters, setting) = by_distance.min()?;
    (letters < own.len().div_ceil(2)).then_some(setting)
}

/// Levenshtein's: the insertions, removals and replacements of a letter that make `b` of `a`.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(corner + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn said(name: &str) -> Option<String> {
        lines(std::iter::once(name.to_owned())).pop()
    }

    #[test]
    fn a_slip_of_the_pen_names_the_nearest_setting() {
        for (name, meant) in [
            ("TINYNCCL_ALGORITHM", "TINYNCCL_ALGO"),
            ("TINYNCCL_TRANSPRT", "TINYNCCL_TRANSPORT"),
            ("TINYNCCL_TIMEOUTS", "TINYNCCL_TIMEOUT"),
            ("TINYNCCL_TCP_STREAM", "TINYNCCL_TCP_STREAMS"),
        ] {
            let line = said(name).unwrap();
            assert!(line.starts_with(&format!("{name} is set, and nothing reads it: ")), "{line}");
            assert!(line.contains(&format!("did you mean {meant}?")), "{line}");
        }
        let line = said("TINYNCCL_QQQQQQQQ").unwrap();
        assert!(!line.contains("did you mean") && line.contains("docs/config.md"), "{line}");
        for known in ["TINYNCCL_ALGO", "TINYNCCL_UNIQUE_ID", "TINYNCCL_TEST_X", "NCCL_ALGO", "PATH"] {
            assert_eq!(said(known), None);
        }
    }

    /// Adds the names in the files below `folder`.
    fn collect(folder: &Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() && !["target", "out", "data"].contains(&name.as_str()) && !name.starts_with('.') {
                collect(&path, names);
            } else if [".rs", ".sh", ".py", ".cmd"].iter().any(|end| name.ends_with(end)) {
                let text = std::fs::read_to_string(&path).unwrap();
                for rest in text.split(PREFIX).skip(1) {
                    let end = rest.find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
                    names.push(format!("{PREFIX}{}", &rest[..end.unwrap_or(rest.len())]));
                }
            }
        }
    }

    #[test]
    fn every_variable_of_programs_tests_and_scripts_is_known() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut names = Vec::new();
        for folder in ["lib", "bindings", "milestones", "tools", "scripts", "docs/book"] {
            collect(&root.join(folder), &mut names);
        }
        assert!(names.len() > 200, "{} names", names.len());
        // Those of the tests of unknown names, and the bare prefixes.
        let made_up = include_str!("unknown.rs");
        names.retain(|name| name.len() > PREFIX.len() && !name.ends_with('_') && !made_up.contains(name.as_str()));
        names.retain(|name| name != "TINYNCCL_NO_SUCH_VARIABLE");
        assert_eq!(lines(names.into_iter()), Vec::<String>::new());
    }
}
