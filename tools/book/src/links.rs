//! Every link of the built book leads to a file, and to an anchor where it names one. Other sites are not asked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::html::tags;
use crate::paths::normal;

/// Links of a page as it writes them, and the anchors that it has.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) links: BTreeSet<String>,
    anchors: BTreeSet<String>,
}

/// The pages of a built book by their paths, without mdBook's 404 page, whose links are relative to a site's root.
pub(crate) fn pages(book: &Path) -> Result<BTreeMap<PathBuf, Page>> {
    let mut pages = BTreeMap::new();
    let mut folders = vec![book.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "html") && !path.ends_with("404.html") {
                pages.insert(path.strip_prefix(book)?.to_owned(), read(&path)?);
            }
        }
    }
    Ok(pages)
}

fn read(path: &Path) -> Result<Page> {
    let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    let mut page = Page::default();
    for tag in tags(&text) {
        for (name, value) in tag.attributes {
            match name.as_str() {
                "id" => drop(page.anchors.insert(value)),
                "name" if tag.name == "a" => drop(page.anchors.insert(value)),
                "href" | "src" => drop(page.links.insert(value)),
                _ => {}
            }
        }
    }
    Ok(page)
}

/// Resolves a link of the page at `from`: path within the book (`None` if it leads out of the book), and anchor.
/// Returns `None` for other sites.
pub(crate) fn resolve(from: &Path, link: &str) -> Option<(Option<PathBuf>, String)> {
    let scheme = link.split_once(':').is_some_and(|(s, _)| s.chars().all(|c| c.is_ascii_alphanumeric()));
    if scheme || link.starts_with("//") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let file = file.split('?').next().unwrap_or("");
    if file.is_empty() {
        return Some((Some(from.to_owned()), anchor.to_owned()));
    }
    Some((normal(&from.parent().unwrap_or(Path::new("")).join(file)), anchor.to_owned()))
}

pub(crate) fn run(book: &Path) -> Result<()> {
    let pages = pages(book)?;
    let mut wrong = vec![];
    let mut count = 0;
    for (from, page) in &pages {
        for link in &page.links {
            let Some((target, anchor)) = resolve(from, link) else { continue };
            count += 1;
            let mut say = |what: String| wrong.push(format!("{}: {link}: {what}", from.display()));
            let Some(mut target) = target else {
                say("leads out of the book".into());
                continue;
            };
            if book.join(&target).is_dir() {
                target.push("index.html");
            }
            match pages.get(&target) {
                None if !book.join(&target).is_file() => say(format!("{} is not there", target.display())),
                Some(page) if !anchor.is_empty() && !page.anchors.contains(&anchor) => {
                    say(format!("{} has no anchor '{anchor}'", target.display()));
                }
                _ => {}
            }
        }
    }
    crate::none_wrong(&wrong, |wrong| format!("{wrong} of {count} links lead nowhere"))?;
    println!("{count} links on {} pages lead somewhere", pages.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_links_and_anchors_are_found() {
        let book = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(book.path().join(name), text).unwrap();
        write(
            "a.html",
            "<h1 id=\"top\"></h1><a href=\"b.html#x\"></a><a href=\"https://x.y/z\"></a><a href=\"#top\"></a>",
        );
        write("b.html", "<p id=\"x\"></p><a href=\"a.html\"></a>");
        run(book.path()).unwrap();
        write("b.html", "<p id=\"y\"></p>");
        assert!(run(book.path()).is_err(), "the anchor is gone");
        write("b.html", "<p id=\"x\"></p><a href=\"c.html\"></a>");
        assert!(run(book.path()).is_err(), "no such page");
        write("b.html", "<p id=\"x\"></p><a href=\"../c.html\"></a>");
        assert!(run(book.path()).is_err(), "out of the book");
    }
}
