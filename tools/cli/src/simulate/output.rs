//! Simulations as text and JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::Case;

/// A line for each; a single one in full.
pub(super) fn text(cases: &[Case], left_out: &[String], links: usize) -> String {
    let mut out = String::new();
    if let [case] = cases {
        full(&mut out, case, links);
    } else {
        table(&mut out, cases);
    }
    for line in left_out {
        let _ = writeln!(out, "# left out: {line}");
    }
    out
}

fn table(out: &mut String, cases: &[Case]) {
    let Some(first) = cases.first() else { return };
    let _ = writeln!(out, "# {}; times in us, bandwidths in GB/s as nccl-tests counts them", first.shape.collective);
    let _ = writeln!(
        out,
        "{:>8} {:>12} {:<18} {:>14} {:>9} {:>9}  {:>5} {:<22} machine; how",
        "ranks", "bytes", "algorithm", "time", "algbw", "busbw", "share", "of the critical path"
    );
    for case in cases {
        let (algbw, busbw) = case.bandwidths();
        let (name, time) = case.report.critical.first().map_or(("nothing", 0.0), |c| (c.0.as_str(), c.1));
        let _ = writeln!(
            out,
            "{:>8} {:>12} {:<18} {:>14} {:>9.2} {:>9.2}  {:>4.0}% {name:<22} {}; {}",
            case.shape.ranks,
            case.size,
            case.by.to_string(),
            us(case.report.time),
            algbw * 1e-9,
            busbw * 1e-9,
            percent(time, case),
            case.machine,
            case.report.method
        );
    }
}

fn full(out: &mut String, case: &Case, links: usize) {
    let report = &case.report;
    let (algbw, busbw) = case.bandwidths();
    let _ = writeln!(
        out,
        "{}, {}, {} ranks, {} bytes, messages of up to {}",
        case.shape.collective, case.by, case.shape.ranks, case.size, case.message
    );
    let _ = writeln!(out, "on      {}", case.machine);
    let _ = writeln!(out, "how     {}; {} messages simulated", report.method, report.messages);
    let _ = write!(out, "time    {} us", us(report.time));
    if report.uncertainty() > 0.0 {
        let _ = write!(out, " (extrapolated; +- {} if the speed goes on changing)", us(report.uncertainty()));
    }
    let _ = writeln!(out, "\nrates   algbw {:.2}, busbw {:.2} GB/s", algbw * 1e-9, busbw * 1e-9);
    let bound = report.bandwidth_bound();
    let _ = writeln!(out, "bound   {} us, the fullest link alone: {:.0}%", us(bound), percent(bound, case));
    if let Some((time, names)) = &case.limit {
        let (time, share) = (us(*time), percent(*time, case));
        let _ = writeln!(out, "limit   {time} us, whatever the schedule: {share:.0}%; set by {}", names.join(", "));
    }
    let plural = if report.hops.round() == 1.0 { "" } else { "s" };
    let _ = writeln!(out, "\nthe critical path, {:.0} message{plural}, is made of", report.hops);
    for (name, time) in &report.critical {
        let _ = writeln!(out, "  {:>5.1}%  {:>14} us  {name}", percent(*time, case), us(*time));
    }
    out.push_str("and ends in steps\n");
    for (name, time) in &report.steps {
        let _ = writeln!(out, "  {:>5.1}%  {:>14} us  {name}", percent(*time, case), us(*time));
    }
    let _ = writeln!(out, "\nlinks: busy for, bytes, of the {} fullest", links.min(report.links.len()));
    for link in report.links.iter().take(links) {
        let busy = 100.0 * report.utilisation(link);
        let _ = writeln!(out, "  {busy:>5.1}%  {:>14.0}  {}, {:.1} GB/s", link.bytes, link.name, link.bandwidth * 1e-9);
    }
    for (kind, name) in report.kinds.iter().enumerate() {
        let of_kind: Vec<f64> = report.links.iter().filter(|l| l.kind == kind).map(|l| l.bytes).collect();
        if of_kind.is_empty() {
            continue;
        }
        let (least, most) = of_kind.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
        let _ = writeln!(out, "  {name}: {} different ones, {least:.0} to {most:.0} bytes", of_kind.len());
    }
}

/// Everything, one object per simulation.
pub(super) fn json(cases: &[Case], links: usize) -> String {
    let cases: Vec<Value> = cases.iter().map(|case| object(case, links)).collect();
    let mut text = serde_json::to_string_pretty(&cases).unwrap_or_default();
    text.push('\n');
    text
}

fn object(case: &Case, links: usize) -> Value {
    let report = &case.report;
    let (algbw, busbw) = case.bandwidths();
    let parts =
        |parts: Vec<(&str, f64)>| -> Value { parts.into_iter().map(|(n, t)| (n.to_owned(), json!(t * 1e6))).collect() };
    let link = |l: &tinynccl_plan::simulate::LinkLoad| {
        json!({"name": l.name, "kind": report.kinds.get(l.kind), "bytes": l.bytes, "bandwidth_gb_s": l.bandwidth * 1e-9,
               "busy": report.utilisation(l)})
    };
    json!({
        "collective": case.shape.collective.name(),
        "algorithm": case.by.to_string(),
        "ranks": case.shape.ranks,
        "bytes": case.size,
        "message": case.message,
        "machine": case.machine,
        "method": report.method.to_string(),
        "messages_simulated": report.messages,
        "time_us": report.time * 1e6,
        "uncertainty_us": report.uncertainty() * 1e6,
        "bound_us": report.bandwidth_bound() * 1e6,
        "limit_us": case.limit.as_ref().map(|(time, _)| time * 1e6),
        "limited_by": case.limit.as_ref().map(|(_, names)| names),
        "algbw_gb_s": algbw * 1e-9,
        "busbw_gb_s": busbw * 1e-9,
        "hops": report.hops,
        "critical_us": parts(report.critical.iter().map(|c| (c.0.as_str(), c.1)).collect()),
        "steps_us": parts(report.steps.clone()),
        "links": report.links.iter().take(links).map(link).collect::<Vec<_>>(),
    })
}

fn percent(part: f64, case: &Case) -> f64 {
    if case.report.time > 0.0 { 100.0 * part / case.report.time } else { 0.0 }
}

/// Seconds in microseconds, with as many digits as they deserve.
fn us(seconds: f64) -> String {
    let us = seconds * 1e6;
    if us >= 1000.0 { format!("{us:.0}") } else { format!("{us:.2}") }
}
