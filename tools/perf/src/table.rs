//! Words and rows of the tables.

use clap::ValueEnum;
use tinynccl::wire::Collective;

/// A value as the command line has it.
pub(crate) fn word(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A row of a Markdown table.
pub(crate) fn row(cells: &[String]) -> String {
    format!("| {} |", cells.join(" | "))
}

/// The first two lines of a Markdown table.
pub(crate) fn head(cells: &[String]) -> String {
    format!("{}\n|{}", row(cells), "---|".repeat(cells.len()))
}

/// Bus bandwidth over algorithm bandwidth ([`Collective::bus_factor`]) of an operation of `perf peers`.
pub(crate) fn bus_factor(op: &str, ranks: usize) -> f64 {
    match Collective::ALL.into_iter().find(|collective| collective.name() == op) {
        Some(collective) => collective.bus_factor(ranks),
        // The size there and the size back.
        None if op == "pingpong" => 2.0,
        // Messages to the next rank.
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_that_are_no_collective_have_a_bus_factor_too() {
        let factors = ["all_reduce", "all_to_all", "barrier", "sendrecv", "pingpong"].map(|op| bus_factor(op, 4));
        assert_eq!(factors, [1.5, 0.75, 0.0, 1.0, 2.0]);
    }
}
