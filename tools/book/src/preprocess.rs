//! The preprocessor: mdBook gives the book as JSON and takes it back, expanded.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::paths::{SOURCE, repository};
use crate::rewrite::{self, Page};
use crate::{diagram, directive, fence};

pub(crate) fn run(question: &[String]) -> Result<()> {
    if question.first().is_some_and(|q| q == "supports") {
        return Ok(());
    }
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let both: Value = serde_json::from_str(&text).context("expected [context, book] as mdBook writes it")?;
    let mut book = both.get(1).context("no book")?.clone();
    let exempt = strings(&both[0]["config"]["preprocessor"]["tinynccl"]["unchecked"]);
    expand_book(&mut book, &exempt)?;
    std::io::stdout().write_all(serde_json::to_string(&book)?.as_bytes())?;
    Ok(())
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

fn expand_book(book: &mut Value, exempt: &[String]) -> Result<()> {
    let mut expanded = Expanded { documents: BTreeSet::new(), wrong: vec![], exempt: exempt.to_vec() };
    let items = book["items"].as_array_mut().context("a book without items: mdBook 0.5 is expected")?;
    for item in items.iter_mut() {
        expanded.item(item);
    }
    expanded.repository(items);
    crate::none_wrong(&expanded.wrong, |wrong| format!("{wrong} things are wrong in the chapters"))
}

struct Expanded {
    /// Documents of the repository that pages link to.
    documents: BTreeSet<PathBuf>,
    wrong: Vec<String>,
    exempt: Vec<String>,
}

impl Expanded {
    fn item(&mut self, item: &mut Value) {
        let Some(chapter) = item.get_mut("Chapter") else { return };
        if let Some(path) = chapter["path"].as_str().map(PathBuf::from) {
            let base = Path::new(SOURCE).join(path.parent().unwrap_or(Path::new("")));
            let checked = !self.exempt.iter().any(|e| path.starts_with(e));
            let content = chapter["content"].as_str().unwrap_or("").to_owned();
            chapter["content"] = self.page(&content, &Page { path: path.clone(), base }, checked).into();
        }
        for below in chapter["sub_items"].as_array_mut().into_iter().flatten() {
            self.item(below);
        }
    }

    /// Adds, after the chapters, the documents that pages link to, and those that these link to in turn.
    fn repository(&mut self, items: &mut Vec<Value>) {
        let mut done: BTreeSet<PathBuf> = BTreeSet::new();
        let mut pages = vec![];
        while let Some(path) = self.documents.iter().find(|d| !done.contains(*d)).cloned() {
            done.insert(path.clone());
            // The chapter has a milestone's README.
            if rewrite::chapter(&path).is_none() {
                pages.push((path.clone(), self.document(&path)));
            }
        }
        pages.sort_by(|a, b| a.0.cmp(&b.0));
        items.push(json!({ "PartTitle": "Documents of the repository" }));
        items.extend(pages.into_iter().map(|(_, page)| page));
    }

    fn document(&mut self, path: &Path) -> Value {
        let content = fs::read_to_string(repository().join(path)).unwrap_or_default();
        let title = match path.to_str() {
            Some("docs/benchmarks/README.md") => "Measurements",
            _ => content.lines().find_map(|l| l.strip_prefix("# ")).unwrap_or("Document"),
        }
        .to_owned();
        let base = path.parent().unwrap_or(Path::new("")).to_owned();
        let page = Page { path: rewrite::place(path), base };
        let content = self.page(&content, &page, false);
        let note = format!("<div class=\"origin\">This is the file <code>{}</code>.</div>\n\n", path.display());
        json!({ "Chapter": {
            "name": title, "content": note + &content, "number": null, "sub_items": [], "path": page.path, "source_path": null,
            "parent_names": [],
        }})
    }

    fn page(&mut self, content: &str, page: &Page, checked: bool) -> String {
        let mut out = String::with_capacity(content.len() * 2);
        let mut lines = content.lines();
        while let Some(line) = lines.next() {
            let result = match line.trim_start().strip_prefix("```") {
                Some(info) => {
                    let mut body = String::new();
                    for line in lines.by_ref().take_while(|l| l.trim() != "```") {
                        body.push_str(line);
                        body.push('\n');
                    }
                    self.block(info.trim(), line, &body, checked)
                }
                None => match line.strip_prefix("{{#readme ").and_then(|rest| rest.strip_suffix("}}")) {
                    Some(sections) => self.readme(sections, page).with_context(|| line.to_owned()),
                    None => directive::expand(line, &page.path)
                        .unwrap_or_else(|| rewrite::line(line, page, &mut self.documents)),
                },
            };
            match result {
                Ok(text) => out.push_str(&text),
                Err(error) => self.wrong.push(format!("{}: {error:#}", page.path.display())),
            }
            out.push('\n');
        }
        out
    }

    /// Sections of the README of the chapter's milestone: `FROM..TO`, without TO; all before TO, or all from FROM on.
    fn readme(&mut self, sections: &str, page: &Page) -> Result<String> {
        let base = page.path.with_extension("");
        let path = base.join("README.md");
        let readme =
            fs::read_to_string(repository().join(&path)).with_context(|| format!("reading {}", path.display()))?;
        let (from, to) = sections.split_once("..").context("expected FROM..TO")?;
        let at = |title: &str| {
            let found = readme.find(&format!("\n## {title}\n"));
            found.with_context(|| format!("{} has no section '{title}'", path.display()))
        };
        // Without the title: the chapter has its own.
        let begin = if from.is_empty() { readme.find('\n').unwrap_or(0) } else { at(from)? };
        let end = if to.is_empty() { readme.len() } else { at(to)? };
        let text = readme.get(begin..end).context("the sections stand in another order")?.to_owned();
        Ok(self.page(&text, &Page { path: page.path.clone(), base }, false))
    }

    fn block(&mut self, info: &str, opening: &str, body: &str, checked: bool) -> Result<String> {
        if let Some(drawn) = diagram::draw(info, body) {
            return drawn;
        }
        if checked {
            fence::check(info, body)?;
        }
        // A block of plain text is not to be coloured by guess.
        let closing: String = opening.chars().take_while(|c| matches!(c, ' ' | '`')).collect();
        let opening = if info.is_empty() { format!("{opening}text") } else { opening.to_owned() };
        Ok(format!("{opening}\n{body}{closing}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(content: &str) -> Result<Value> {
        let mut book = json!({ "items": [{ "Chapter": {
            "name": "x", "content": content, "number": null, "sub_items": [], "path": "x.md", "source_path": "x.md",
            "parent_names": [],
        }}]});
        expand_book(&mut book, &[])?;
        Ok(book)
    }

    #[test]
    fn blocks_are_checked_and_pictures_drawn() {
        assert!(expanded("```rust\nfn x() {}\n```\n").is_err());
        let book = expanded("```boxes\na -> b\n```\n`[0](x)`").unwrap();
        let content = book["items"][0]["Chapter"]["content"].as_str().unwrap();
        assert!(content.contains("<svg") && content.contains("`[0](x)`"));
    }

    #[test]
    fn a_block_in_a_list_ends_where_it_did() {
        let book = expanded("1. x\n   ```text\n   y\n   ```\n\n2. z\n").unwrap();
        let content = book["items"][0]["Chapter"]["content"].as_str().unwrap();
        assert_eq!(content.trim_end(), "1. x\n   ```text\n   y\n   ```\n\n2. z");
    }

    #[test]
    fn a_chapter_has_its_readme() {
        let shown = |line: &str| {
            let mut expanded = Expanded { documents: BTreeSet::new(), wrong: vec![], exempt: vec![] };
            let page = Page { path: "milestones/07-allreduce-tcp.md".into(), base: "docs/book/src/milestones".into() };
            let text = expanded.page(line, &page, true);
            (text, expanded.wrong)
        };
        let (text, wrong) = shown("{{#readme What you will learn..Run}}");
        assert!(wrong.is_empty() && text.contains("## Predict first") && !text.contains("## Run"), "{wrong:?}");
        assert!(text.contains("](../milestones/06-lib-hello.md)"), "{text}");
        assert!(shown("{{#readme Next..}}").0.contains("](../milestones/08-allreduce-verbs.md)"));
        assert!(shown("{{#readme Nowhere..}}").1[0].contains("has no section 'Nowhere'"));
        assert!(!shown("{{#readme Run..Predict first}}").1.is_empty());
    }

    #[test]
    fn documents_that_are_linked_come_along() {
        let book = expanded("[spec](../../../SPEC.md)").unwrap();
        let items = book["items"].as_array().unwrap();
        let has = |path: &str| items.iter().any(|i| i["Chapter"]["path"] == path);
        assert!(has("repository/SPEC.md") && has("repository/docs/pytorch.md"), "also what SPEC.md links to");
    }
}
