//! Words and rows of the tables.

use clap::ValueEnum;

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

/// Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md).
pub(crate) fn bus_factor(op: &str, ranks: usize) -> f64 {
    let n = ranks.max(1) as f64;
    match op {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "all_gather" | "reduce_scatter" | "all_to_all" | "gather" | "scatter" => (n - 1.0) / n,
        // The size there and the size back.
        "pingpong" => 2.0,
        "barrier" => 0.0,
        _ => 1.0,
    }
}
