//! `chart`: the pictures of docs/speed, drawn from the raw values of records.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use line_chart::{Axis, BLACK, COLOURS, Chart, Curve, RGBColor};
use program_kit::stats::median;
use serde::Deserialize;

/// Draws the charts that a list names from the raw values of records.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The list; pictures are written beside it.
    #[arg(default_value = "docs/speed/charts.toml")]
    list: PathBuf,
}

const SIZE: (u32, u32) = (1000, 360);
const RED: RGBColor = RGBColor(214, 39, 40);
const GREY: RGBColor = RGBColor(160, 160, 160);

/// The file of a list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    chart: Vec<Drawing>,
}

/// A picture: times over sizes, and how many times as fast ours is as the best other.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Drawing {
    /// Name of the picture.
    file: String,
    title: String,
    /// Record with raw values, beside the list.
    csv: String,
    /// Columns whose value a row must have.
    #[serde(default)]
    rows: BTreeMap<String, String>,
    curve: Vec<Line>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    name: String,
    /// Column of the time in microseconds.
    us: String,
    #[serde(default)]
    rows: BTreeMap<String, String>,
    #[serde(default)]
    ours: bool,
}

/// A record: each row by the names of its columns.
type Rows = Vec<BTreeMap<String, String>>;
/// Time over bytes.
type Points = BTreeMap<u64, f64>;

pub(crate) fn run(options: &Options) -> Result<i32> {
    for (file, svg) in draw(&options.list)? {
        std::fs::write(&file, svg).with_context(|| format!("writing {}", file.display()))?;
        println!("{}", file.display());
    }
    Ok(0)
}

/// The pictures of a list.
fn draw(list: &Path) -> Result<Vec<(PathBuf, String)>> {
    let text = std::fs::read_to_string(list).with_context(|| format!("reading {}", list.display()))?;
    let List { chart } = toml::from_str(&text).with_context(|| format!("in {}", list.display()))?;
    chart
        .iter()
        .map(|drawing| {
            let csv = list.with_file_name(&drawing.csv);
            let text = std::fs::read_to_string(&csv).with_context(|| format!("reading {}", csv.display()))?;
            let svg =
                picture(drawing, &rows(&text)).with_context(|| format!("{} from {}", drawing.file, drawing.csv))?;
            Ok((list.with_file_name(&drawing.file), svg))
        })
        .collect()
}

fn picture(drawing: &Drawing, rows: &Rows) -> Result<String> {
    let mut curves = Vec::new();
    for line in &drawing.curve {
        let points = points(rows, &drawing.rows, line);
        ensure!(!points.is_empty(), "no row has what curve '{}' asks for", line.name);
        curves.push((line, points));
    }
    let mut others = COLOURS.into_iter().filter(|colour| *colour != RED);
    let mut ours = [BLACK, RED].into_iter();
    let times = curves.iter().map(|(line, points)| {
        let colour = if line.ours { ours.next() } else { others.next() }.unwrap_or(GREY);
        let points = points.iter().map(|(&bytes, &us)| (bytes as f64, us)).collect();
        Curve { width: if line.ours { 3 } else { 1 }, ..Curve::measured(&line.name, points, colour) }
    });
    let ratio = ratio(&curves);
    ensure!(!ratio.is_empty(), "no size has a time of ours and of another");
    let even = ratio.iter().map(|point| (point.0, 1.0)).collect();
    let faster = vec![
        Curve { width: 1, ..Curve::line("", even, GREY) },
        Curve { width: 3, ..Curve::measured("", ratio, BLACK) },
    ];
    let chart = |title: &str, y, curves| Chart {
        title: title.to_owned(),
        x: Axis::log("bytes"),
        y,
        curves,
        legend_right: false,
    };
    let row = vec![
        chart("", Axis::log("microseconds"), times.collect()),
        chart("", Axis::log("best other's time / tinynccl's"), faster),
    ];
    line_chart::svg(&drawing.title, SIZE, &[row])
}

/// The best time of the others over the best of ours, at each size that both have.
fn ratio(curves: &[(&Line, Points)]) -> Vec<(f64, f64)> {
    let best = |ours: bool, bytes: u64| {
        let times = curves.iter().filter(|(line, _)| line.ours == ours).filter_map(|(_, points)| points.get(&bytes));
        times.copied().reduce(f64::min)
    };
    let mut sizes: Vec<u64> = curves.iter().flat_map(|(_, points)| points.keys().copied()).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.into_iter().filter_map(|bytes| Some((bytes as f64, best(false, bytes)? / best(true, bytes)?))).collect()
}

/// The median over the rows of each size.
fn points(rows: &Rows, wanted: &BTreeMap<String, String>, line: &Line) -> Points {
    let mut times: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for row in rows {
        let fits = wanted.iter().chain(&line.rows).all(|(column, value)| row.get(column) == Some(value));
        let number = |column: &str| row.get(column).and_then(|text| text.parse::<f64>().ok());
        if let (true, Some(bytes), Some(us)) = (fits, number("bytes"), number(&line.us)) {
            times.entry(bytes as u64).or_default().push(us);
        }
    }
    times.into_iter().filter_map(|(bytes, times)| Some((bytes, median(&times)?))).collect()
}

fn rows(csv: &str) -> Rows {
    let mut lines = csv.lines().map(|line| line.split(',').map(str::to_owned));
    let Some(names) = lines.next() else { return Vec::new() };
    lines.map(|values| names.clone().zip(values).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CSV: &str = "who,op,bytes,us\nwe,a,8,2\nwe,a,8,4\nwe,a,8,3\nthey,a,8,6\nthey,a,64,9\nthey,b,8,1\nwe,a,64,\n";

    fn line(who: &str, ours: bool) -> Line {
        let rows = BTreeMap::from([("who".to_owned(), who.to_owned())]);
        Line { name: who.to_owned(), us: "us".to_owned(), rows, ours }
    }

    #[test]
    fn medians_of_the_rows_that_fit_and_their_ratio() {
        let rows = rows(CSV);
        let wanted = BTreeMap::from([("op".to_owned(), "a".to_owned())]);
        let (we, they) = (line("we", true), line("they", false));
        let curves = [(&we, points(&rows, &wanted, &we)), (&they, points(&rows, &wanted, &they))];
        assert_eq!(curves[0].1, Points::from([(8, 3.0)]));
        assert_eq!(curves[1].1, Points::from([(8, 6.0), (64, 9.0)]));
        assert_eq!(ratio(&curves), [(8.0, 2.0)]);
    }

    #[test]
    fn a_curve_without_rows_is_an_error() {
        let drawing = Drawing {
            file: "x.svg".to_owned(),
            title: String::new(),
            csv: String::new(),
            rows: BTreeMap::new(),
            curve: vec![line("we", true), line("none", false)],
        };
        let error = picture(&drawing, &rows(CSV)).unwrap_err().to_string();
        assert_eq!(error, "no row has what curve 'none' asks for");
    }

    /// The page's pictures are those of the records that the list names: `cargo run -p perf -- chart` draws them again.
    #[test]
    fn the_pictures_of_the_page_are_up_to_date() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/speed");
        for (file, svg) in draw(&folder.join("charts.toml")).unwrap() {
            let there = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(there == svg, "{}: `cargo run -p perf -- chart` draws it again", file.display());
        }
    }
}
