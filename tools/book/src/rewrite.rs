//! Rewrites the links of a page: a file of the repository outside the book becomes a page of it, so every link works
//! offline.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::paths::{SOURCE, normal, repository, to_top};

/// One page: where it lies in the book, and which folder of the repository its links count from.
#[derive(Debug, Clone)]
pub(crate) struct Page {
    pub(crate) path: PathBuf,
    pub(crate) base: PathBuf,
}

/// Returns the chapter that has this document, the README of a milestone.
pub(crate) fn chapter(document: &Path) -> Option<PathBuf> {
    let folder = document.parent().filter(|f| document.ends_with("README.md") && f.starts_with("milestones"))?;
    let page = PathBuf::from(format!("{}.md", folder.display()));
    repository().join(SOURCE).join(&page).is_file().then_some(page)
}

/// Returns the path in the book of a document of the repository.
pub(crate) fn place(document: &Path) -> PathBuf {
    if let Some(chapter) = chapter(document) {
        return chapter;
    }
    let path = Path::new("repository").join(document);
    match document.file_name().and_then(|n| n.to_str()) {
        Some("README.md") => match document.parent() {
            Some(folder) if folder != Path::new("") => PathBuf::from(format!("repository/{}.md", folder.display())),
            _ => Path::new("repository").join("about.md"),
        },
        _ => path,
    }
}

/// Rewrites the links of one line; documents that it links to are added to `documents`.
pub(crate) fn line(line: &str, page: &Page, documents: &mut BTreeSet<PathBuf>) -> Result<String> {
    let mut out = String::new();
    let mut rest = line;
    let mut code = false;
    // Within backquotes nothing is a link.
    while let Some(at) = rest.find(['`', ']']) {
        let (before, after) = rest.split_at(at);
        out.push_str(before);
        if let Some(behind) = after.strip_prefix('`') {
            code = !code;
            out.push('`');
            rest = behind;
        } else if !code
            && after.starts_with("](")
            && let Some(close) = after[2..].find(')')
        {
            out.push_str("](");
            out.push_str(&target(&after[2..2 + close], page, documents)?);
            rest = &after[2 + close..];
        } else {
            out.push(']');
            rest = &after[1..];
        }
    }
    out.push_str(rest);
    Ok(out)
}

fn target(link: &str, page: &Page, documents: &mut BTreeSet<PathBuf>) -> Result<String> {
    let (file, fragment) = link.split_once('#').map_or((link, String::new()), |(f, x)| (f, format!("#{x}")));
    if file.is_empty() || file.contains("://") || file.starts_with("mailto:") {
        return Ok(link.to_owned());
    }
    let Some(path) = normal(&page.base.join(file)) else {
        bail!("the link {link} leads out of the repository");
    };
    let top = to_top(&page.path);
    let root = repository();
    if let Ok(inside) = path.strip_prefix(SOURCE) {
        if !root.join(&path).exists() {
            bail!("the link {link} leads to {}, which is not there", path.display());
        }
        // mdBook makes a folder's README its index.
        let page = if inside.ends_with("README.md") { inside.with_file_name("index.md") } else { inside.to_owned() };
        return Ok(format!("{top}{}{fragment}", page.display()));
    }
    let full = root.join(&path);
    let document = if full.join("README.md").is_file() { path.join("README.md") } else { path.clone() };
    if document.extension().is_some_and(|e| e == "md") && root.join(&document).is_file() {
        let at = place(&document);
        documents.insert(document);
        return Ok(format!("{top}{}{fragment}", at.display()));
    }
    if !full.exists() {
        bail!("the link {link} leads to {}, which is not there", path.display());
    }
    let as_is = path.extension().is_some_and(|e| ["svg", "png", "csv", "json"].iter().any(|x| e == *x));
    if as_is {
        return Ok(format!("{top}raw/{}{fragment}", path.display()));
    }
    let name = if full.is_dir() { path.join("index") } else { path };
    Ok(format!("{top}code/{}.html{fragment}", name.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(text: &str) -> Result<String> {
        let page = Page { path: "a/b.md".into(), base: "docs/book/src/a".into() };
        line(text, &page, &mut BTreeSet::new())
    }

    #[test]
    fn links_into_the_repository_become_pages() {
        let source = "see [x](../../../../lib/src/lib.rs#L3) and [y](../../../../README.md).";
        assert_eq!(
            rewritten(source).unwrap(),
            "see [x](../code/lib/src/lib.rs.html#L3) and [y](../repository/about.md)."
        );
        assert_eq!(
            rewritten("[d](../../../../lib/plan/src/algorithm)").unwrap(),
            "[d](../code/lib/plan/src/algorithm/index.html)"
        );
        assert_eq!(place(Path::new("tools/x/README.md")), Path::new("repository/tools/x.md"));
        let chapter = place(Path::new("milestones/07-allreduce-tcp/README.md"));
        assert_eq!(chapter, Path::new("milestones/07-allreduce-tcp.md"));
    }

    #[test]
    fn what_is_not_there_is_named() {
        assert!(rewritten("[x](../../../../lib/none.rs)").unwrap_err().to_string().contains("lib/none.rs"));
        assert!(rewritten("[x](../../../../../etc/passwd)").is_err());
    }

    #[test]
    fn code_and_addresses_stay() {
        for text in ["`a[0](b)`", "[x](https://a.b/c)", "[x](#here)", "a] (b)"] {
            assert_eq!(rewritten(text).unwrap(), text);
        }
    }
}
