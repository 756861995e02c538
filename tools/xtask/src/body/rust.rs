//! Rust: by its tokens, so that braces in strings and comments are none, and functions within macros are found too.

use std::ops::Range;
use std::str::FromStr as _;

use anyhow::{Context as _, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Name and body, braces included, of the first function that begins at or after byte `from`.
pub(super) fn find(text: &str, from: usize) -> Result<(String, Range<usize>)> {
    let tokens = TokenStream::from_str(text).map_err(|e| anyhow!("no valid Rust: {e}"))?;
    function(tokens, from).context("no function with a body follows")
}

fn function(tokens: TokenStream, from: usize) -> Option<(String, Range<usize>)> {
    let mut tokens = tokens.into_iter();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Group(group) if group.span().byte_range().end > from => {
                if let Some(found) = function(group.stream(), from) {
                    return Some(found);
                }
            }
            TokenTree::Ident(word) if word == "fn" && word.span().byte_range().start >= from => {
                let Some(TokenTree::Ident(name)) = tokens.next() else { return None };
                let body = tokens.by_ref().find_map(|t| match t {
                    TokenTree::Punct(p) if p.as_char() == ';' => Some(None),
                    TokenTree::Group(g) if g.delimiter() == Delimiter::Brace => Some(Some(g.span().byte_range())),
                    _ => None,
                })??;
                return Some((name.to_string(), body));
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn braces_in_strings_generics_and_other_functions() {
        let text = r##"
impl<const N: usize> A<N> {
    fn before(&self) { "}" ; }
    // here
    #[inline]
    pub(crate) fn wanted<T: Into<u8>>(self: &Self, f: impl Fn(u8) -> [u8; { 3 }]) -> Result<(), ()>
    where
        T: Copy,
    {
        let s = "{ é"; let c = '}'; /* } */ let r = r#"}"#;
    }
    fn after() {}
}
mac! { fn inside(x: u8) -> u8 { x } }
"##;
        let (name, body) = find(text, text.find("// here").unwrap()).unwrap();
        assert_eq!(name, "wanted");
        assert!(text[body.clone()].starts_with("{\n        let s") && text[body].ends_with("\n    }"));
        let (name, body) = find(text, text.find("mac!").unwrap()).unwrap();
        assert_eq!((name.as_str(), &text[body]), ("inside", "{ x }"));
        assert!(find(text, text.len()).is_err());
        assert!(find("trait T { fn f(); }", 0).is_err(), "no body");
        assert!(find("fn f() {", 0).is_err(), "no Rust");
    }
}
