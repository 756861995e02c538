//! The table of labs in the book: titles, symptoms, needs and minutes stand there once.

use std::io::Write as _;

use crate::outputs::typed;

/// Labs whose trace shows the waits that they are about, for `waits`.
const WAITS: [&str; 4] = ["dead-rank", "stopped-rank", "missing-group", "slow-link"];
/// The lab with few enough packets to print them, for `packets`.
const PACKETS: &str = "wrong-icrc";

const TABLE: &str = include_str!("../../../docs/book/src/labs/README.md");

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Page {
    /// `dead-rank`, the command.
    pub(crate) lab: &'static str,
    /// `03 A dead rank`
    title: &'static str,
    /// `03-dead-rank.md`
    file: &'static str,
    symptom: &'static str,
    needs: &'static str,
    minutes: &'static str,
}

impl Page {
    /// All rows, in their order.
    pub(crate) fn all() -> impl Iterator<Item = Page> {
        TABLE.lines().filter_map(|line| {
            let mut cells = line.strip_prefix("| [")?.split(" | ");
            let (title, file) = cells.next()?.strip_suffix(')')?.split_once("](")?;
            let lab = file.strip_suffix(".md")?.split_once('-')?.1;
            let (symptom, needs) = (cells.next()?, cells.next()?);
            Some(Page { lab, title, file, symptom, needs, minutes: cells.next()?.trim_end_matches(" |") })
        })
    }

    /// Number of the page: `03` and `3`, or `12` alone.
    pub(crate) fn numbers(&self) -> Vec<&'static str> {
        let number = self.title.split(' ').next().unwrap_or_default();
        let mut all = vec![number, number.trim_start_matches('0')];
        all.dedup();
        all
    }

    /// One line of `list`.
    fn line(&self) -> String {
        let Page { lab, minutes, needs, symptom, .. } = self;
        format!("{lab:<20} {minutes:>3} min  {needs:<32} {symptom}")
    }

    /// Text before a run: the lab, and its symptom.
    fn opening(&self, fixed: bool) -> String {
        if fixed {
            return format!("Lab {}, mended.\n\n", self.title);
        }
        format!("Lab {}. What you see: {}.\n\n", self.title, self.symptom)
    }

    /// Text after a run: the page, and the commands that come next.
    fn ending(&self, fixed: bool) -> String {
        let page = format!("docs/book/src/labs/{}", self.file);
        if fixed {
            return format!("\nCause, fix, and what NCCL does: {page}\n");
        }
        let traced = |variable: &str, trace: &str, reader: &str| {
            let record = typed(&format!("{variable}={trace} {}", self.lab));
            format!("The trace:  {record}\n            {}\n", typed(&format!("{reader} {trace}")))
        };
        let trace = match self.lab {
            lab if WAITS.contains(&lab) => traced("TINYNCCL_TRACE", &format!("{lab}.json"), "waits"),
            lab if lab == PACKETS => traced("TINYROCE_TRACE", &format!("{lab}.pcap"), "packets"),
            _ => String::new(),
        };
        format!("\nThe hunt:   {page}\n{trace}Mended:     {}\n", typed(&format!("{} --fixed", self.lab)))
    }
}

/// Prints every lab with its minutes and needs.
pub(crate) fn list() -> u8 {
    let mut text: String = Page::all().map(|page| page.line() + "\n").collect();
    text += "\nNext: `cargo run -p labs -- dead-rank`; the pages are in docs/book/src/labs.\n";
    say(&text);
    0
}

/// Runs a lab between its opening and its ending. What could not run, or ended otherwise, gets no ending.
pub(crate) fn around(lab: &str, fixed: bool, run: impl FnOnce() -> u8) -> u8 {
    let page = Page::all().find(|page| page.lab == lab);
    if let Some(page) = page {
        say(&page.opening(fixed));
    }
    let code = run();
    if let Some(page) = page.filter(|_| [0, crate::FAILED_AS_ANNOUNCED].contains(&code)) {
        say(&page.ending(fixed));
    }
    code
}

/// A reader that has gone, as `head`, is no error.
fn say(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_begins_with_the_symptom_and_ends_with_what_comes_next() {
        let page = Page::all().find(|page| page.lab == "dead-rank").unwrap();
        assert_eq!(page.opening(false), "Lab 03 A dead rank. What you see: the others stop at once.\n\n");
        let ending = page.ending(false);
        for words in [
            "docs/book/src/labs/03-dead-rank.md\n",
            "TINYNCCL_TRACE=dead-rank.json cargo run -p labs -- dead-rank\n",
            "cargo run -p labs -- waits dead-rank.json\n",
            "cargo run -p labs -- dead-rank --fixed\n",
        ] {
            assert!(ending.contains(words), "{ending}");
        }
        assert!(!page.ending(true).contains("--fixed"));
    }

    #[test]
    fn each_page_has_its_title_and_folds_what_gives_the_hunt_away() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/labs/");
        for page in Page::all() {
            let text = std::fs::read_to_string(format!("{folder}{}", page.file)).unwrap();
            assert_eq!(text.lines().next(), Some(format!("# {}", page.title).as_str()));
            assert!(page.minutes.parse::<u32>().is_ok_and(|minutes| minutes > 0), "{page:?}");
            for section in ["Cause", "Fix"] {
                let (_, rest) = text.split_once(&format!("\n## {section}\n\n")).unwrap();
                let body = rest.split("\n## ").next().unwrap().trim_end();
                assert!(
                    body.starts_with("<details><summary>") && body.ends_with("</details>"),
                    "{}: {body}",
                    page.file
                );
            }
        }
    }
}
