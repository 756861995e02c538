//! Sentences that are too long to be read once: a test over the book's pages and the milestones' READMEs.

use std::path::Path;

/// Words of the longest sentence.
const LIMIT: usize = 45;

/// The sentences of a page that have more than [`LIMIT`] words. Code, tables and HTML are left out.
fn long(page: &str) -> Vec<String> {
    let (mut paragraphs, mut fenced) = (vec![String::new()], false);
    for line in page.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let text = line.trim();
        let skipped = fenced || text.starts_with(['|', '#', '<', '{']) || text.starts_with("```");
        let item = text.starts_with("- ") || text.split_once(". ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
        if text.is_empty() || skipped || item {
            paragraphs.push(String::new());
        }
        if let Some(last) = paragraphs.last_mut().filter(|_| !skipped) {
            last.push_str(text);
            last.push(' ');
        }
    }
    let sentences = paragraphs.iter().flat_map(|p| {
        let mut all = vec![String::new()];
        for word in p.split_whitespace() {
            if let Some(last) = all.last_mut() {
                last.push_str(word);
                last.push(' ');
            }
            if word.trim_end_matches(['*', '`', ')', '"']).ends_with(['.', '?', '!', ':']) {
                all.push(String::new());
            }
        }
        all
    });
    sentences.filter(|s| s.split_whitespace().count() > LIMIT).collect()
}

fn pages(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|e| e == "md") {
            found.push(path);
        }
    }
}

#[test]
fn sentences_are_short() {
    let root = crate::paths::repository();
    let mut all = Vec::new();
    pages(&root.join("docs/book/src"), &mut all);
    let folders = std::fs::read_dir(root.join("milestones")).unwrap();
    all.extend(folders.map(|entry| entry.unwrap().path().join("README.md")));
    assert!(all.len() > 60, "{}", all.len());
    let mut wrong = String::new();
    for path in all {
        for sentence in long(&std::fs::read_to_string(&path).unwrap()) {
            wrong += &format!("{}: {sentence}\n\n", path.display());
        }
    }
    assert!(wrong.is_empty(), "more than {LIMIT} words:\n{wrong}");
}

#[test]
fn tables_and_code_are_left_out() {
    let many = "word ".repeat(LIMIT + 1);
    assert_eq!(long(&format!("{many}.\n")).len(), 1);
    assert!(long(&format!("| {many} |\n```\n{many}\n```\n<p>{many}\n")).is_empty());
    let half = "word ".repeat(LIMIT / 2 + 2);
    assert!(
        long(&format!("{half}\n\n{half}\n- {half}\n1. {half}")).is_empty()
            && long(&format!("{half}\n{half}")).len() == 1
    );
}
