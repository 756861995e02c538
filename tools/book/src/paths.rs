//! Paths in the repository, and paths without `..`.

use std::path::{Component, Path, PathBuf};

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_owned()
}

/// Chapters, relative to the repository.
pub(crate) const SOURCE: &str = "docs/book/src";

/// `path` without `.` and `..`; `None` when it leads out of its base.
pub(crate) fn normal(path: &Path) -> Option<PathBuf> {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !out.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(out)
}

/// `../` as often as it takes from a page to the top of the book.
pub(crate) fn to_top(page: &Path) -> String {
    "../".repeat(page.components().count().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_are_resolved_and_may_not_leave() {
        assert_eq!(normal(Path::new("a/./b/../c")), Some(PathBuf::from("a/c")));
        assert_eq!(normal(Path::new("a/../../c")), None);
        assert_eq!(normal(Path::new("/etc")), None);
    }

    #[test]
    fn the_way_to_the_top_has_a_step_per_folder() {
        assert_eq!(to_top(Path::new("index.md")), "");
        assert_eq!(to_top(Path::new("a/b/c.md")), "../../");
    }
}
