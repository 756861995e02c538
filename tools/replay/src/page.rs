//! The page: data, a style and a script, and nothing from elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use program_kit::stats::median;
use serde_json::{Value, json};

use crate::look;
use crate::recording::{Cause, Kind, Recording};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// One page of a run, or of two side by side.
pub fn page(runs: &[Recording]) -> String {
    let titles: Vec<&str> = runs.iter().map(|run| run.title.as_str()).collect();
    let mut out = look::head(&format!("Replay of {}", titles.join(" and ")), STYLE);
    out.push_str(
        "<p>The upper picture has the ranks and the messages between them, the lower one a line for each track of a rank: its \
         calls, its lanes with their steps, its threads. A message leaves at the earliest possible time, and arrives \
         when it was read. Click or drag in the lower picture to go to a time.</p>\
         <div class=\"controls\"><button id=\"last\">Call back</button><button id=\"play\">Play</button>\
         <button id=\"call\">Next call</button><button id=\"message\">Next message</button>\
         <label>speed <select id=\"speed\"><option>0.1<option>0.25<option>0.5<option selected>1<option>2<option>5<option>20\
         </select></label><label>window <button id=\"in\">closer</button><button id=\"out\">wider</button></label></div>\
         <input type=\"range\" id=\"scrub\" min=\"0\" max=\"10000\" value=\"0\" step=\"1\" aria-label=\"time\">\
         <p id=\"at\" aria-live=\"off\"></p>",
    );
    legend(&mut out, runs);
    out.push_str("<div id=\"runs\">");
    for (index, run) in runs.iter().enumerate() {
        let _ = write!(
            out,
            "<section data-run=\"{index}\"><h2>{}</h2>{}{}\
             <canvas class=\"stage\" role=\"img\" aria-label=\"ranks and messages\"></canvas>\
             <canvas class=\"lines\" role=\"img\" aria-label=\"what each rank does\"></canvas>\
             <ul class=\"states\"></ul></section>",
            look::escaped(&run.title),
            list("failures", run.failures.iter().map(|f| format!("rank {}: {}", run.ranks[f.rank].rank, f.error))),
            list("notes", run.notes.iter().cloned()),
        );
    }
    out.push_str("</div>");
    calls(&mut out, runs);
    runs.iter().for_each(|run| waits(&mut out, run, runs.len() > 1));
    let data = Value::Array(runs.iter().map(data).collect());
    // A script's text ends at its tag, whatever stands around it.
    let data = data.to_string().replace('<', "\\u003c");
    let _ = writeln!(
        out,
        "<script type=\"application/json\" id=\"data\">{data}</script><script>{}{SCRIPT}</script></body></html>",
        look::SCRIPT
    );
    out
}

fn list(class: &str, lines: impl Iterator<Item = String>) -> String {
    let lines: String = lines.map(|line| format!("<li>{}</li>", look::escaped(&line))).collect();
    if lines.is_empty() { lines } else { format!("<ul class=\"{class}\">{lines}</ul>") }
}

/// Kinds in the order of their numbers in the data: the words of the legend, and the classes of the colours.
fn kinds() -> Vec<(Kind, &'static str)> {
    let mut kinds = vec![
        (Kind::Call, "call"),
        (Kind::Carried, "call of kernels, NCCL or MPI"),
        (Kind::Step, "step"),
        (Kind::Setup, "setup"),
        (Kind::Ddp, "data parallelism"),
        (Kind::Other, "other"),
    ];
    kinds.extend(Cause::ALL.map(|cause| (Kind::Wait(cause), cause.name())));
    kinds
}

fn number(kind: Kind) -> usize {
    kinds().iter().position(|(known, _)| *known == kind).unwrap_or_default()
}

/// The kinds that there are.
fn legend(out: &mut String, runs: &[Recording]) {
    let present: BTreeSet<Kind> = runs.iter().flat_map(|run| &run.slices).map(|slice| slice.kind).collect();
    out.push_str("<p class=\"legend\">");
    for (at, (_, words)) in kinds().iter().enumerate().filter(|(_, (kind, _))| present.contains(kind)) {
        let _ = write!(out, "<span><i style=\"background:var(--k{at})\"></i>{words}</span> ");
    }
    out.push_str("</p>");
}

/// A run as the script reads it. Times are nanoseconds since its first call.
fn data(run: &Recording) -> Value {
    let (begin, end) = run.span();
    let zero = run.calls.first().map_or(begin, |call| call.begin);
    let kinds: BTreeMap<Kind, usize> = kinds().into_iter().enumerate().map(|(at, (kind, _))| (kind, at)).collect();
    let slices: Vec<i64> = run
        .slices
        .iter()
        .flat_map(|s| {
            let (kind, round) = (kinds.get(&s.kind).copied().unwrap_or_default(), s.round);
            [s.track, kind, s.name, round].map(|n| n as i64).into_iter().chain([
                s.begin - zero,
                s.end - s.begin,
                s.bytes as i64,
            ])
        })
        .collect();
    let messages: Vec<i64> =
        run.messages.iter().flat_map(|m| [m.from as i64, m.to as i64, m.left - zero, m.there - m.left]).collect();
    let calls: Vec<i64> =
        run.calls.iter().flat_map(|c| [c.begin - zero, c.end - c.begin, c.name as i64, c.ranks as i64]).collect();
    json!({
        "ranks": run.ranks.iter().map(|r| json!([r.rank, r.name])).collect::<Vec<_>>(),
        "tracks": run.tracks.iter().map(|t| json!([t.rank, t.name])).collect::<Vec<_>>(),
        "names": run.names,
        "begin": begin - zero,
        "end": end - zero,
        "slices": slices,
        "messages": messages,
        "calls": calls,
        "failures": run.failures.iter().map(|f| json!([f.rank, f.at - zero, f.error])).collect::<Vec<_>>(),
    })
}

/// A call's name without its number, as calls of one name are one row, and its algorithm.
fn parted(name: &str) -> (String, &str) {
    let (call, algorithm) = name.split_once(" (").map_or((name, ""), |(call, rest)| (call, rest.trim_end_matches(')')));
    let words: Vec<&str> = call.split(' ').filter(|word| !word.starts_with('#')).collect();
    (words.join(" "), algorithm)
}

/// Times of the calls of one name, in microseconds, and their algorithms.
#[derive(Debug, Clone, Default)]
struct Times<'a> {
    us: Vec<f64>,
    by: BTreeSet<&'a str>,
}

/// Median times of the calls, by name, of each run.
fn calls(out: &mut String, runs: &[Recording]) {
    let mut rows: BTreeMap<String, Vec<Times<'_>>> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        for call in &run.calls {
            let (name, algorithm) = parted(&run.names[call.name]);
            let times = &mut rows.entry(name).or_insert_with(|| vec![Times::default(); runs.len()])[index];
            times.us.push((call.end - call.begin) as f64 / 1e3);
            times.by.insert(algorithm);
        }
    }
    if rows.is_empty() {
        return;
    }
    out.push_str(
        "<p>Each call, from its begin on the first rank to its end on the last one:</p><div class=\"scroll\"><table>\
         <tr><th>call</th>",
    );
    for run in runs {
        let _ = write!(out, "<th>calls</th><th>by</th><th>{}: median us</th>", look::escaped(&run.title));
    }
    out.push_str(if runs.len() == 2 { "<th>second / first</th></tr>" } else { "</tr>" });
    for (name, times) in &rows {
        let _ = write!(out, "<tr><th>{}</th>", look::escaped(name));
        let medians: Vec<Option<f64>> = times.iter().map(|times| median(&times.us)).collect();
        for (Times { us, by }, median) in times.iter().zip(&medians) {
            let by = look::escaped(&by.iter().copied().filter(|by| !by.is_empty()).collect::<Vec<_>>().join(", "));
            let median = median.map_or(String::new(), |us| format!("{us:.1}"));
            let _ = write!(out, "<td>{}</td><td>{by}</td><td>{median}</td>", us.len());
        }
        if let [first, second] = medians[..] {
            let ratio = first.zip(second).map(|(first, second)| format!("{:.2}", second / first)).unwrap_or_default();
            let _ = write!(out, "<td>{ratio}</td>");
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}

/// The time that each rank waited, by cause.
fn waits(out: &mut String, run: &Recording, titled: bool) {
    let mut waited: BTreeMap<Cause, Vec<i64>> = BTreeMap::new();
    for slice in &run.slices {
        if let Kind::Wait(cause) = slice.kind {
            let ranks = waited.entry(cause).or_insert_with(|| vec![0; run.ranks.len()]);
            ranks[run.tracks[slice.track].rank] += slice.end - slice.begin;
        }
    }
    if waited.is_empty() {
        return;
    }
    let of = if titled { format!(" in {}", look::escaped(&run.title)) } else { String::new() };
    let _ = write!(
        out,
        "<p>Time waited{of}, in us, by cause. A lane's waits for a rank and its thread's spinning, yielding and sleeping \
         are the same time seen twice.</p><div class=\"scroll\"><table><tr><th>rank</th>"
    );
    for cause in waited.keys() {
        let _ =
            write!(out, "<th><i style=\"background:var(--k{})\"></i>{}</th>", number(Kind::Wait(*cause)), cause.name());
    }
    out.push_str("</tr>");
    for (index, rank) in run.ranks.iter().enumerate() {
        let _ = write!(out, "<tr><th>{}</th>", rank.rank);
        for times in waited.values() {
            let _ = write!(out, "<td>{:.1}</td>", times[index] as f64 / 1e3);
        }
        out.push_str("</tr>");
    }
    out.push_str("</table></div>\n");
}
