//! Values of environment variables, from text and back.

use std::time::Duration;

use super::PortRange;
use crate::secret::Secret;
use tinynccl_plan::wire::Algorithm;

/// A value of an environment variable.
pub(super) trait Value: Sized {
    fn parse(text: &str) -> Result<Self, String>;
    fn show(&self) -> String;
}

impl Value for Duration {
    fn parse(text: &str) -> Result<Self, String> {
        let seconds: f64 = text.parse().map_err(|_| "expected seconds, like 2.5".to_owned())?;
        Duration::try_from_secs_f64(seconds)
            .ok()
            .filter(|d| !d.is_zero())
            .ok_or_else(|| "expected a positive, finite number of seconds".to_owned())
    }
    fn show(&self) -> String {
        self.as_secs_f64().to_string()
    }
}

impl Value for usize {
    fn parse(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.char_indices().last() {
            Some((i, 'k' | 'K')) => (&text[..i], 1 << 10),
            Some((i, 'm' | 'M')) => (&text[..i], 1 << 20),
            Some((i, 'g' | 'G')) => (&text[..i], 1 << 30),
            _ => (text, 1),
        };
        digits
            .parse::<usize>()
            .ok()
            .and_then(|n| n.checked_mul(unit))
            .ok_or_else(|| "expected a whole number, K, M or G may follow".to_owned())
    }
    fn show(&self) -> String {
        match *self {
            n if n > 0 && n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
            n if n > 0 && n.is_multiple_of(1 << 10) => format!("{}K", n >> 10),
            n => n.to_string(),
        }
    }
}

impl Value for bool {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "1" | "true" | "on" => Ok(true),
            "0" | "false" | "off" => Ok(false),
            _ => Err("expected 0 or 1".to_owned()),
        }
    }
    fn show(&self) -> String {
        u8::from(*self).to_string()
    }
}

impl Value for Option<Algorithm> {
    fn parse(text: &str) -> Result<Self, String> {
        if text == "auto" { Ok(None) } else { text.parse().map(Some) }
    }
    fn show(&self) -> String {
        self.map_or("auto".to_owned(), |a| a.to_string())
    }
}

impl Value for Option<String> {
    fn parse(text: &str) -> Result<Self, String> {
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }
    fn show(&self) -> String {
        self.clone().unwrap_or_default()
    }
}

impl Value for Option<PortRange> {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { PortRange::parse(text).map(Some) }
    }
    fn show(&self) -> String {
        self.map_or(String::new(), |range| range.to_string())
    }
}

/// Text shown in place of a secret.
pub(super) const HIDDEN: &str = "(not shown)";
/// Fewer characters are guessed too soon.
const SHORTEST_SECRET: usize = 16;

/// The secret that a text stands for.
pub fn secret(text: &str) -> Result<Secret, String> {
    if text.chars().count() >= SHORTEST_SECRET {
        Ok(Secret::of_text(text))
    } else {
        Err(format!("expected {SHORTEST_SECRET} characters or more, like those of `openssl rand -hex 32`"))
    }
}

impl Value for Option<Secret> {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { secret(text).map(Some) }
    }
    fn show(&self) -> String {
        self.map_or(String::new(), |_| HIDDEN.to_owned())
    }
}
