//! Writes the targets of links that mdBook does not generate: source files as pages with numbered lines, copies of
//! other files, animations and pictures of schedules, plots of simulations, replays of runs.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::diagram::escape;
use crate::directive::{Drawn, Played, Plot};
use crate::links::{pages, resolve};
use crate::paths::{repository, to_top};
use crate::programs;

const STYLE: &str = "body{margin:0;font-family:sans-serif}header{padding:.6rem 1rem;border-bottom:1px solid #8888}\
    pre{margin:0;padding:.5rem 0;overflow-x:auto;font-size:.85rem;line-height:1.45}\
    pre span{display:block;padding-right:1rem}pre span:target{background:#ffd54f66}\
    pre a{display:inline-block;width:3.5rem;margin-right:1rem;text-align:right;color:#757575;text-decoration:none;user-select:none}\
    li{margin:.3rem 0}@media(prefers-color-scheme:dark){body{background:#161923;color:#bcbdd0}a{color:#6da8ff}\
    pre a{color:#8a8d9e}}";

/// The records of measurements, each a page. Its README, which lists them, stands in the sidebar for all.
const RECORDS: &str = "repository/docs/benchmarks/";

pub(crate) fn run(book: &Path) -> Result<()> {
    shorten_sidebar(book)?;
    let mut wanted = BTreeSet::new();
    for (from, page) in pages(book)? {
        wanted.extend(page.links.iter().filter_map(|l| resolve(&from, l)).filter_map(|(path, _)| path));
    }
    let (mut done, mut count) = (BTreeSet::new(), 0);
    while let Some(path) = wanted.pop_first() {
        if !done.insert(path.clone()) {
            continue;
        }
        let at = book.join(&path);
        let Some(first) = path.components().next() else { continue };
        let rest = path.strip_prefix(first).unwrap_or(&path).to_owned();
        let folder = first.as_os_str().to_str().unwrap_or("");
        if !["code", "raw", "animations", "pictures", "plots", "replays"].contains(&folder) {
            continue;
        }
        if let Some(parent) = at.parent() {
            fs::create_dir_all(parent)?;
        }
        match folder {
            "raw" => drop(fs::copy(repository().join(&rest), &at).with_context(|| rest.display().to_string())?),
            "code" => fs::write(&at, source(&path, &rest, &mut wanted)?)?,
            "replays" => replay(&rest, &at)?,
            _ => draw(&rest, &at)?,
        }
        count += 1;
    }
    println!("{count} pages of source, pictures and animations");
    Ok(())
}

/// Takes the records out of the sidebar, which mdBook writes as a page and as a script.
fn shorten_sidebar(book: &Path) -> Result<()> {
    for entry in fs::read_dir(book).with_context(|| format!("reading {}", book.display()))? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("toc") && (name.ends_with(".html") || name.ends_with(".js")) {
            let short = without(&fs::read_to_string(&path)?, RECORDS);
            if short.contains(RECORDS) {
                bail!("{} lists records in a way that is not known here: another version of mdBook?", path.display());
            }
            fs::write(&path, short)?;
        }
    }
    Ok(())
}

/// The list `toc` without the entries that lead into `folder`.
fn without(toc: &str, folder: &str) -> String {
    let mut out = String::with_capacity(toc.len());
    for (i, item) in toc.split("<li ").enumerate() {
        if item.contains(folder) {
            // What follows the entry stays: the next one, or the end of the list.
            out.push_str(item.split_once("</li>").map_or(item, |(_, rest)| rest));
        } else {
            out.push_str(if i == 0 { "" } else { "<li " });
            out.push_str(item);
        }
    }
    out
}

/// A source file, or the list of a folder.
fn source(path: &Path, rest: &Path, wanted: &mut BTreeSet<PathBuf>) -> Result<String> {
    let rest = rest.with_extension(""); // the page's own `.html`
    let top = to_top(path);
    let listing = rest.ends_with("index") && !repository().join(&rest).exists();
    let shown = if listing { rest.parent().unwrap_or(&rest) } else { &rest };
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\"><title>{0}</title><style>{STYLE}</style></head><body><header>\
         <a href=\"{top}index.html\">tinynccl, the book</a> &middot; {0}</header>",
        escape(&shown.display().to_string())
    );
    if listing {
        let mut names = vec![];
        for entry in fs::read_dir(repository().join(shown)).with_context(|| format!("reading {}", shown.display()))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            names.push(if entry.path().is_dir() { format!("{name}/index") } else { name });
        }
        names.sort();
        out.push_str("<ul>");
        for name in names {
            let _ = write!(
                out,
                "<li><a href=\"{0}.html\">{1}</a></li>",
                escape(&name),
                escape(name.trim_end_matches("index"))
            );
            wanted.insert(Path::new("code").join(shown).join(format!("{name}.html")));
        }
        out.push_str("</ul>");
    } else {
        let bytes = fs::read(repository().join(shown)).with_context(|| format!("reading {}", shown.display()))?;
        out.push_str("<pre>");
        for (i, line) in String::from_utf8_lossy(&bytes).lines().enumerate() {
            let _ = write!(out, "<span id=\"L{0}\"><a href=\"#L{0}\">{0}</a>{1}</span>", i + 1, escape(line));
        }
        out.push_str("</pre>");
    }
    out.push_str("</body></html>\n");
    Ok(out)
}

/// Runs what a page replays, and makes the page.
fn replay(file: &Path, at: &Path) -> Result<()> {
    let stem = file.file_stem().and_then(|s| s.to_str()).context("no name")?;
    let at = fs::canonicalize(at.parent().unwrap_or(at))?.join(file);
    // The page calls a run by its trace's name.
    let folder = at.with_extension("runs");
    fs::create_dir_all(&folder)?;
    let mut traces = Vec::new();
    for (algorithm, arguments) in Played::from_stem(stem)?.runs() {
        let trace = folder.join(algorithm);
        let mut command = Command::new(programs::path("stress")?);
        command.args(arguments).stdout(Stdio::null());
        run_it(command.env("TINYNCCL_TRACE", &trace))?;
        traces.push(trace);
    }
    let mut command = Command::new(programs::path("tinynccl-cli")?);
    command.arg("replay").args(&traces).arg("--html").arg(&at);
    run_it(command.stdout(Stdio::null()))?;
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))
}

fn run_it(command: &mut Command) -> Result<()> {
    let status = command.current_dir(repository()).status().with_context(|| format!("starting {command:?}"))?;
    if !status.success() {
        bail!("{status}: {command:?}");
    }
    Ok(())
}

fn draw(file: &Path, at: &Path) -> Result<()> {
    let stem = file.file_stem().and_then(|s| s.to_str()).context("no name")?;
    let format = file.extension().and_then(|e| e.to_str()).context("no ending")?;
    let mut command = Command::new(programs::path("tinynccl-cli")?);
    if at.parent().is_some_and(|folder| folder.ends_with("plots")) {
        command.args(Plot::from_stem(stem)?.arguments()).arg("--plot");
        // The table is printed all the same.
        command.stdout(Stdio::null());
    } else {
        command.args(Drawn::from_stem(stem)?.arguments()).args(["--format", format, "--output"]);
    }
    command.arg(fs::canonicalize(at.parent().unwrap_or(at))?.join(file));
    run_it(&mut command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_leave_the_sidebar_and_their_list_stays() {
        let toc = "<ol><li class=\"a\"><a href=\"docs/benchmarks.html\">M</a></li><li class=\"a\">\
                   <a href=\"docs/benchmarks/x.html\">X</a></li></ol>\n<p>";
        let short = "<ol><li class=\"a\"><a href=\"docs/benchmarks.html\">M</a></li></ol>\n<p>";
        assert_eq!(without(toc, "docs/benchmarks/"), short);
        assert_eq!(without(short, "docs/benchmarks/"), short);
    }
}
