//! The lines that a client sends, and the answers that need no look at the job.

use std::time::Duration;

/// Version of the protocol: that of NCCL 2.28 to 2.32.
const PROTOCOL: u32 = 2;
/// Time for the answers of other processes, as NCCL has it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Limit where a client turns it off.
const LONGEST: Duration = Duration::from_secs(60);

/// Settings of one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Client {
    pub(super) json: bool,
    /// Time for the answers of other processes.
    pub(super) timeout: Duration,
}

impl Default for Client {
    fn default() -> Client {
        Client { json: false, timeout: TIMEOUT }
    }
}

/// Groups of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Groups {
    pub(super) lifecycle: bool,
    pub(super) trace: bool,
}

/// Next step after a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Send this answer.
    Answer(String),
    /// Send a report, and close.
    Status { verbose: bool },
    /// Send events until the client closes.
    Monitor(Groups),
}

/// The words of `line` behind those of `command`, in any case.
fn after<'a>(line: &'a str, command: &str) -> Option<&'a str> {
    let (head, rest) = line.split_at_checked(command.len())?;
    head.eq_ignore_ascii_case(command).then_some(rest)
}

impl Client {
    /// Takes a line, without its end.
    pub(super) fn take(&mut self, line: &str) -> Next {
        let ok = || Next::Answer("OK\n".to_owned());
        let error = |text: String| Next::Answer(format!("ERROR: {text}\n"));
        if after(line, "client protocol ").is_some() {
            return Next::Answer(format!("SERVER PROTOCOL {PROTOCOL}\n"));
        }
        if let Some(value) = after(line, "timeout ") {
            return match value.trim().parse::<u32>() {
                Ok(seconds) => {
                    let asked = Duration::from_secs(u64::from(seconds));
                    self.timeout = if seconds == 0 { LONGEST } else { asked.min(LONGEST) };
                    ok()
                }
                Err(_) => error(format!("Invalid timeout value {value}")),
            };
        }
        if let Some(format) = after(line, "set format ") {
            self.json = match format.to_ascii_lowercase().as_str() {
                "json" => true,
                "text" => false,
                _ => return error(format!("Invalid format {format}")),
            };
            return ok();
        }
        if line.eq_ignore_ascii_case("status") {
            return Next::Status { verbose: false };
        }
        if line.eq_ignore_ascii_case("verbose status") {
            return Next::Status { verbose: true };
        }
        match after(line, "monitor") {
            Some(rest) if rest.is_empty() || rest.starts_with(' ') => match groups(rest.trim_start()) {
                Ok(groups) => Next::Monitor(groups),
                Err(word) => error(format!("Invalid event group '{word}'")),
            },
            _ => error(format!("Unknown command {line}")),
        }
    }
}

/// The groups of a list; those of a peer's life if it is empty. Gives the word that is none.
fn groups(list: &str) -> Result<Groups, &str> {
    let mut groups = Groups::default();
    for word in list.split(',').filter(|word| !word.is_empty()) {
        match word.to_ascii_lowercase().as_str() {
            "lifecycle" => groups.lifecycle = true,
            "trace" => groups.trace = true,
            "all" => groups = Groups { lifecycle: true, trace: true },
            _ => return Err(word),
        }
    }
    Ok(if groups == Groups::default() { Groups { lifecycle: true, trace: false } } else { groups })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(client: &mut Client, line: &str) -> String {
        match client.take(line) {
            Next::Answer(text) => text,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn the_six_commands() {
        let mut client = Client::default();
        assert_eq!(answer(&mut client, "CLIENT PROTOCOL 2"), "SERVER PROTOCOL 2\n");
        assert_eq!(answer(&mut client, "client protocol 99"), "SERVER PROTOCOL 2\n");
        assert_eq!((answer(&mut client, "TIMEOUT 3"), client.timeout), ("OK\n".into(), Duration::from_secs(3)));
        assert_eq!((answer(&mut client, "TIMEOUT 0"), client.timeout), ("OK\n".into(), LONGEST));
        assert_eq!((answer(&mut client, "Set Format JSON"), client.json), ("OK\n".into(), true));
        assert_eq!((answer(&mut client, "SET FORMAT text"), client.json), ("OK\n".into(), false));
        assert_eq!(client.take("STATUS"), Next::Status { verbose: false });
        assert_eq!(client.take("verbose status"), Next::Status { verbose: true });
        let monitor = |lifecycle, trace| Next::Monitor(Groups { lifecycle, trace });
        assert_eq!(client.take("MONITOR"), monitor(true, false));
        assert_eq!(client.take("monitor trace"), monitor(false, true));
        assert_eq!(client.take("MONITOR lifecycle,TRACE"), monitor(true, true));
        assert_eq!(client.take("MONITOR all"), monitor(true, true));
    }

    #[test]
    fn what_is_no_command_is_an_error_and_changes_nothing() {
        let mut client = Client::default();
        for line in [
            "",
            "TIMEOUT -1",
            "TIMEOUT x",
            "TIMEOUT ",
            "SET FORMAT xml",
            "MONITOR some",
            "MONITORS",
            "STATUS x",
            "ä",
            "\u{fffd}",
        ] {
            assert!(answer(&mut client, line).starts_with("ERROR: "), "{line}");
        }
        assert_eq!(client, Client::default());
    }
}
