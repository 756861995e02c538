//! The tags of a page that a program wrote: enough to find links and anchors.

use std::collections::BTreeMap;

/// A start tag.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tag {
    pub(crate) name: String,
    pub(crate) attributes: BTreeMap<String, String>,
}

/// All start tags, without those within scripts, styles and comments.
pub(crate) fn tags(page: &str) -> Vec<Tag> {
    let mut out = vec![];
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        if let Some(comment) = rest.strip_prefix("!--") {
            rest = comment.find("-->").map_or("", |end| &comment[end + 3..]);
            continue;
        }
        let name: String = rest.chars().take_while(char::is_ascii_alphanumeric).collect();
        if name.is_empty() {
            continue;
        }
        let (attributes, after) = attributes(&rest[name.len()..]);
        rest = after;
        if name == "script" || name == "style" {
            let close = format!("</{name}");
            rest = rest.find(&close).map_or("", |end| &rest[end..]);
        }
        out.push(Tag { name, attributes });
    }
    out
}

fn attributes(mut rest: &str) -> (BTreeMap<String, String>, &str) {
    let mut out = BTreeMap::new();
    loop {
        rest = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '/');
        let end = rest.find(|c: char| c.is_whitespace() || matches!(c, '=' | '>' | '/')).unwrap_or(rest.len());
        let name = rest[..end].to_owned();
        rest = &rest[end..];
        if name.is_empty() {
            return (out, rest.strip_prefix('>').unwrap_or(rest));
        }
        let mut value = String::new();
        if let Some(after) = rest.strip_prefix('=') {
            let quote = after.chars().next().filter(|c| matches!(c, '"' | '\''));
            let (inner, skip) = match quote {
                Some(_) => (&after[1..], 1),
                None => (after, 0),
            };
            let ends = |c: char| quote.map_or(c.is_whitespace() || c == '>', |q| c == q);
            let length = inner.find(ends).unwrap_or(inner.len());
            value = inner[..length].replace("&amp;", "&");
            rest = inner.get(length + skip..).unwrap_or("");
        }
        out.insert(name, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_tags_and_their_attributes() {
        let page = "<!-- <a href=\"no\"> --><a class=x href=\"y?a&amp;b\" hidden>t</a><script>if(a<b){}</script><br/>";
        let found = tags(page);
        assert_eq!(found.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "script", "br"]);
        assert_eq!(found[0].attributes["href"], "y?a&b");
        assert_eq!(found[0].attributes["class"], "x");
        assert_eq!(found[0].attributes["hidden"], "");
    }
}
