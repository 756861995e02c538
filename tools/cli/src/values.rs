//! Collectives and numbers of ranks on the command line.

use clap::builder::RangedU64ValueParser;
use tinynccl_plan::wire::Collective;

/// A number of ranks: the program of one of them is built before anything is known of its length.
pub(crate) fn ranks() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=1 << 22)
}

/// Names with hyphens, as on a command line, or with underscores.
pub(crate) fn collective(name: &str) -> Result<Collective, String> {
    let wanted = name.replace('-', "_");
    let mut known = Collective::ALL.into_iter().filter(|&c| c != Collective::SendRecv);
    known.clone().find(|c| c.name() == wanted).ok_or_else(|| {
        let names: Vec<String> = known.by_ref().map(|c| c.name().replace('_', "-")).collect();
        format!("expected one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!(collective("all-reduce"), Ok(Collective::AllReduce));
        assert_eq!(collective("all_to_all"), Ok(Collective::AllToAll));
        assert!(collective("allreduce").unwrap_err().contains("all-reduce, "));
    }
}
