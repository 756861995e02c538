//! `{{#code PATH HEAD}}`, `{{#output NAME}}`, `{{#animation COLLECTIVE ALGORITHM RANKS}}`, `{{#picture ...}}`,
//! `{{#plot COLLECTIVE ALGORITHMS RANKS SIZES}}` (simulated), `{{#replay COLLECTIVE ALGORITHMS RANKS SIZE}}` (of one
//! run or of two), `{{#figure NAME CAPTION}}` (of docs/book/pictures). `{{#readme FROM..TO}}` is the preprocessor's.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::code;
use crate::diagram;
use crate::outputs::Recorded;
use crate::paths::{repository, to_top};

/// The replacement of a line, or `None` if it is no directive of ours.
pub(crate) fn expand(line: &str, page: &Path) -> Option<Result<String>> {
    let inner = line.trim().strip_prefix("{{#")?.strip_suffix("}}")?;
    let (name, rest) = inner.split_once(' ')?;
    let rest = rest.trim();
    Some(match name {
        "code" => show_code(rest, page),
        "output" => Recorded::read(rest).map(|r| r.shown()),
        "figure" => figure(rest),
        "animation" => Drawn::parse(rest).map(|d| d.animation(page)),
        "picture" => Drawn::parse(rest).map(|d| d.picture(page)),
        "plot" => Plot::parse(rest).map(|p| p.shown(page)),
        "replay" => Played::parse(rest).map(|p| p.shown(page)),
        _ => return None,
    })
    .map(|result| result.with_context(|| line.trim().to_owned()))
}

fn show_code(rest: &str, page: &Path) -> Result<String> {
    let (path, head) = rest.split_once(' ').context("expected a path and how the item begins")?;
    let source = fs::read_to_string(repository().join(path)).with_context(|| format!("reading {path}"))?;
    let (language, python) = match Path::new(path).extension().and_then(|e| e.to_str()) {
        Some("rs") => ("rust", false),
        Some("py") => ("python", true),
        Some("cu" | "cuh" | "h" | "c" | "cc") => ("cpp", false),
        Some("toml") => ("toml", false),
        other => bail!("no language for the ending {other:?}"),
    };
    let item = code::find(&source, head.trim(), python)?;
    // mdBook would offer to run it.
    let info = if language == "rust" { "rust,ignore" } else { language };
    let top = to_top(page);
    Ok(format!(
        "<div class=\"origin\"><a href=\"{top}code/{path}.html#L{0}\">{path}, line {0}</a></div>\n\n```{info}\n{1}\n```",
        item.line, item.text
    ))
}

/// A drawn picture within the page, so that it has the theme's colours, and its caption.
fn figure(rest: &str) -> Result<String> {
    let (name, caption) = rest.split_once(' ').context("expected the name of a picture and a caption")?;
    let path = format!("docs/book/pictures/{name}.svg");
    let svg = fs::read_to_string(repository().join(&path)).with_context(|| format!("reading {path}"))?;
    let svg = svg.trim_end();
    Ok(format!(
        "<figure class=\"art\"><div class=\"wide\">{svg}</div><figcaption>{}</figcaption></figure>\n",
        diagram::escape(caption)
    ))
}

/// A schedule, as encoded in file names: `all-reduce.ring.4`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Drawn {
    collective: String,
    algorithm: String,
    ranks: usize,
}

impl Drawn {
    fn parse(rest: &str) -> Result<Drawn> {
        let [collective, algorithm, ranks] = rest.split_whitespace().collect::<Vec<_>>()[..] else {
            bail!("expected a collective, an algorithm and a number of ranks");
        };
        let ranks = ranks.parse().with_context(|| format!("'{ranks}' is no number of ranks"))?;
        Ok(Drawn { collective: collective.to_owned(), algorithm: algorithm.to_owned(), ranks })
    }

    /// From a file's name without its ending.
    pub(crate) fn from_stem(stem: &str) -> Result<Drawn> {
        Drawn::parse(&stem.replace('.', " "))
    }

    /// Returns the arguments for `tinynccl-cli`.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let ranks = self.ranks.to_string();
        ["schedule", &self.collective, &self.algorithm, "--ranks", &ranks].map(str::to_owned).to_vec()
    }

    fn stem(&self) -> String {
        format!("{}.{}.{}", self.collective, self.algorithm, self.ranks)
    }

    fn command(&self, format: &str) -> String {
        format!("cargo run -p tinynccl-cli -- {} --format {format}", self.arguments().join(" "))
    }

    fn animation(&self, page: &Path) -> String {
        let Drawn { collective, algorithm, ranks } = self;
        let href = format!("{}animations/{}.html", to_top(page), self.stem());
        format!(
            "<figure class=\"animation\"><iframe src=\"{href}\" title=\"{collective}, {algorithm}, {ranks} ranks, step by step\" \
             loading=\"lazy\"></iframe><figcaption><a href=\"{href}\">Open alone.</a> Made by <code>{}</code></figcaption></figure>",
            self.command("html")
        )
    }

    fn picture(&self, page: &Path) -> String {
        let Drawn { collective, algorithm, ranks } = self;
        let src = format!("{}pictures/{}.svg", to_top(page), self.stem());
        format!(
            "<figure class=\"schedule\"><div class=\"wide\"><img src=\"{src}\" alt=\"{collective}, {algorithm}, {ranks} ranks, all \
             rounds\"></div><figcaption>Made by <code>{}</code></figcaption></figure>",
            self.command("svg")
        )
    }
}

/// Simulated times over sizes, as encoded in file names: `all-reduce.ring,tree.64.8,1M`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Plot([String; 4]);

impl Plot {
    fn parse(rest: &str) -> Result<Plot> {
        let words: Vec<String> = rest.split_whitespace().map(str::to_owned).collect();
        let words = words.try_into().ok().context("expected a collective, algorithms, ranks and sizes")?;
        Ok(Plot(words))
    }

    /// From a file's name without its ending.
    pub(crate) fn from_stem(stem: &str) -> Result<Plot> {
        Plot::parse(&stem.replace('.', " "))
    }

    /// Returns the arguments for `tinynccl-cli`.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let [collective, algorithms, ranks, sizes] = &self.0;
        ["simulate", collective, "--algo", algorithms, "--ranks", ranks, "--size", sizes].map(str::to_owned).to_vec()
    }

    fn shown(&self, page: &Path) -> String {
        let src = format!("{}plots/{}.svg", to_top(page), self.0.join("."));
        format!(
            "<figure class=\"schedule\"><div class=\"wide\"><img src=\"{src}\" alt=\"{}, simulated times over sizes\"></div>\
             <figcaption>Made by <code>cargo run -p tinynccl-cli -- {} --plot FILE.svg</code></figcaption></figure>",
            self.0[0],
            self.arguments().join(" ")
        )
    }
}

/// Runs of milestone 10, replayed, as encoded in a file's name: `all_reduce.ring,tree.4.32K`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Played([String; 4]);

impl Played {
    fn parse(rest: &str) -> Result<Played> {
        let words: Vec<String> = rest.split_whitespace().map(str::to_owned).collect();
        let words: [String; 4] =
            words.try_into().ok().context("expected a collective, algorithms, ranks and a size")?;
        if words[1].split(',').count() > 2 {
            bail!("'{}': a page replays one run, or two", words[1]);
        }
        Ok(Played(words))
    }

    /// From a file's name without its ending.
    pub(crate) fn from_stem(stem: &str) -> Result<Played> {
        Played::parse(&stem.replace('.', " "))
    }

    /// Each run's algorithm, and what `stress` is called with but for the file.
    pub(crate) fn runs(&self) -> Vec<(String, Vec<String>)> {
        let [collective, algorithms, ranks, size] = &self.0;
        let run = |algorithm: &str| {
            let of = ["--ranks", ranks, "--collective", collective, "-b", size, "-e", size, "-n", "3", "-w", "1"];
            (algorithm.to_owned(), of.into_iter().chain(["--algo", algorithm]).map(str::to_owned).collect())
        };
        algorithms.split(',').map(run).collect()
    }

    fn shown(&self, page: &Path) -> String {
        let [collective, algorithms, ranks, size] = &self.0;
        // It opens at a call of this size, as the page names it, behind those that prepare the run.
        let call = size.replace('K', "%20KiB").replace('M', "%20MiB");
        let href = format!("{}replays/{}.html?call={call}", to_top(page), self.0.join("."));
        let title = format!("{collective} of {size} on {ranks} ranks, {}", algorithms.replace(',', " and "));
        let commands = self.runs().into_iter().map(|(_, run)| {
            format!("<code>cargo run --release -p stress -- {} --replay FILE.html</code>", run.join(" "))
        });
        format!(
            "<figure class=\"animation\"><iframe src=\"{href}\" title=\"{title}, replayed\" loading=\"lazy\"></iframe>\
             <figcaption><a href=\"{href}\">Open alone.</a> Made by {}</figcaption></figure>",
            commands.collect::<Vec<_>>().join(" and ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_goes_through_its_file_name() {
        let plot = Plot::parse("all-reduce ring,tree 64 8,1M").unwrap();
        assert_eq!(Plot::from_stem("all-reduce.ring,tree.64.8,1M").unwrap(), plot);
        assert!(plot.shown(Path::new("a/b.md")).contains("\"../plots/all-reduce.ring,tree.64.8,1M.svg\""));
        assert!(Plot::parse("all-reduce ring 64").is_err());
    }

    #[test]
    fn a_replay_goes_through_its_file_name() {
        let played = Played::parse("all_reduce ring,tree 4 32K").unwrap();
        assert_eq!(Played::from_stem("all_reduce.ring,tree.4.32K").unwrap(), played);
        let shown = played.shown(Path::new("a/b.md"));
        assert!(shown.contains("\"../replays/all_reduce.ring,tree.4.32K.html?call=32%20KiB\""), "{shown}");
        assert!(shown.contains("--algo ring") && shown.contains("--algo tree"), "{shown}");
        assert!(Played::parse("all_reduce ring 4").is_err() && Played::parse("all_reduce a,b,c 4 32K").is_err());
    }

    #[test]
    fn a_schedule_goes_through_its_file_name() {
        let drawn = Drawn::parse("all-reduce ring 4").unwrap();
        assert_eq!(Drawn::from_stem(&drawn.stem()).unwrap(), drawn);
        assert_eq!(drawn.arguments().join(" "), "schedule all-reduce ring --ranks 4");
        assert!(drawn.animation(Path::new("a/b.md")).contains("\"../animations/all-reduce.ring.4.html\""));
        assert!(Drawn::parse("all-reduce ring").is_err());
    }

    #[test]
    fn a_figure_is_drawn_in_the_page() {
        let shown = expand("{{#figure 07 A <ring>.}}", Path::new("a/b.md")).unwrap().unwrap();
        assert!(shown.contains("<svg viewBox") && shown.contains("<figcaption>A &lt;ring&gt;.<"), "{shown}");
        assert!(!shown.trim_end().contains("\n\n"), "an empty line ends a block of HTML");
        assert!(expand("{{#figure none A caption.}}", Path::new("x.md")).unwrap().is_err());
    }

    #[test]
    fn what_is_no_directive_of_ours_stays() {
        let page = Path::new("x.md");
        assert!(expand("{{#include ../x}}", page).is_none());
        assert!(expand("a {{#code x}} b", page).is_none());
        assert!(expand("{{#code lib/src/nowhere.rs fn x}}", page).unwrap().is_err());
        let shown = expand("{{#code lib/plan/src/algorithm/ring.rs fn bytes_sent}}", page).unwrap().unwrap();
        assert!(shown.contains("code/lib/plan/src/algorithm/ring.rs.html#L") && shown.contains("shape.ranks"));
    }
}
