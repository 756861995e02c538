//! The look that all pages of the tools share, in both themes, at all widths, and inside a page of the book.

/// Style sheet.
pub const STYLE: &str = include_str!("look.css");

/// Script: follows the theme of the system, or of the page around this one, which in turn learns how high this one is.
pub const SCRIPT: &str = include_str!("look.js");

/// The head of a page and the begin of its body, with its title as heading. `style` comes behind ours. The title may be
/// any text.
pub fn head(title: &str, style: &str) -> String {
    let title = escaped(title);
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{title}</title>\
         <style>{STYLE}{style}</style></head><body><h1>{title}</h1>"
    )
}

/// Text as HTML shows it, also in an attribute.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
