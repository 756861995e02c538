//! Log of rejected connections: one line for the first, then at most one a minute with a count, and a count at the end.
//! Otherwise any client that can connect could fill the log.

use std::time::{Duration, Instant};

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(60);

/// Connections that one listener has rejected.
#[derive(Debug)]
pub struct Strangers {
    /// Beginning of each line: the listener, and that it rejects the connections.
    prefix: String,
    all: u64,
    /// Connections rejected since the last line, and the text of the last of them.
    untold: u64,
    last: String,
    quiet_until: Option<Instant>,
}

impl Strangers {
    /// For lines that begin with `prefix`.
    pub fn new(prefix: String) -> Strangers {
        Strangers { prefix, all: 0, untold: 0, last: String::new(), quiet_until: None }
    }

    /// Counts a rejected connection, which `text` describes.
    pub fn note(&mut self, text: String) {
        self.say(|s| s.count(text, Instant::now()));
    }

    /// Time at which [`Strangers::tick`] has something to do; `None`: nothing to do.
    pub fn due(&self) -> Option<Instant> {
        self.quiet_until
    }

    /// Logs how many came since the last line, if it is time.
    pub fn tick(&mut self) {
        self.say(|s| s.summary(Instant::now()));
    }

    fn say(&mut self, line: impl FnOnce(&mut Self) -> Option<String>) {
        if let Some(line) = line(self) {
            log::warn!("{line}");
        }
    }

    fn count(&mut self, text: String, now: Instant) -> Option<String> {
        self.all += 1;
        if self.quiet_until.is_none() {
            self.quiet_until = Some(now + PAUSE);
            return Some(format!("{} {text}", self.prefix));
        }
        (self.untold, self.last) = (self.untold + 1, text);
        self.summary(now)
    }

    fn summary(&mut self, now: Instant) -> Option<String> {
        if self.quiet_until.is_none_or(|until| now < until) {
            return None;
        }
        self.quiet_until = (self.untold > 0).then(|| now + PAUSE);
        let untold = std::mem::take(&mut self.untold);
        (untold > 0).then(|| format!("{} {untold} more, {} in all; the last: {}", self.prefix, self.all, self.last))
    }

    /// Returns the last line: the total, if it is more than one.
    fn total(&self) -> Option<String> {
        (self.all > 1).then(|| format!("{} {} in all", self.prefix, self.all))
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.say(|s| s.total());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_told_and_then_one_line_a_minute_counts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut strangers = Strangers::new("turned away".to_owned());
        assert_eq!(strangers.due(), None);
        assert_eq!(strangers.count("a".to_owned(), at(0)).as_deref(), Some("turned away a"));
        for i in 0..900 {
            assert_eq!(strangers.count(format!("b{i}"), at(i / 20)), None);
        }
        assert_eq!(strangers.due(), Some(at(60)));
        assert_eq!(strangers.summary(at(59)), None);
        let line = strangers.summary(at(60)).unwrap();
        assert_eq!(line, "turned away 900 more, 901 in all; the last: b899");
        assert_eq!(strangers.count("c".to_owned(), at(70)), None);
        assert!(strangers.count("d".to_owned(), at(121)).unwrap().contains("2 more, 903 in all; the last: d"));
        // A quiet minute: nothing to log, and the next one has its own line again.
        assert_eq!((strangers.summary(at(182)), strangers.due()), (None, None));
        assert_eq!(strangers.count("e".to_owned(), at(300)).as_deref(), Some("turned away e"));
        assert_eq!(strangers.total().as_deref(), Some("turned away 904 in all"));
    }

    #[test]
    fn one_alone_is_not_counted_again() {
        let mut strangers = Strangers::new(String::new());
        assert_eq!(strangers.total(), None);
        strangers.count(String::new(), Instant::now());
        assert_eq!(strangers.total(), None);
    }
}
