//! A client of NCCL's RAS protocol: libnccl.so's, and NVIDIA's own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Look, What};

/// Longest report that is read.
const LONGEST: u64 = 64 << 20;

/// The report of the process at `address`.
///
/// # Errors
/// It cannot be reached, or does not speak the protocol.
pub(super) fn look(address: &str, what: &What, json: bool) -> Result<Look> {
    let at = address.to_socket_addrs().with_context(|| format!("resolving {address}"))?;
    let mut last = None;
    let found = at.into_iter().find_map(|at| {
        TcpStream::connect_timeout(&at, what.timeout).inspect_err(|e| last = Some(format!("{at}: {e}"))).ok()
    });
    let Some(stream) = found else {
        bail!("connecting to {}; is there a job with NCCL_RAS_ENABLE?", last.unwrap_or_else(|| address.to_owned()))
    };
    // A server collects for as long as it may, and then a little.
    stream.set_read_timeout(Some(what.timeout + Duration::from_secs(10)))?;
    stream.set_write_timeout(Some(what.timeout))?;
    let mut reader = BufReader::new(&stream);
    let mut ask = |command: &str| -> Result<String> {
        (&stream).write_all(format!("{command}\n").as_bytes())?;
        let mut line = String::new();
        (&mut reader).take(4096).read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    };
    let hello = ask("CLIENT PROTOCOL 2")?;
    if !hello.starts_with("SERVER PROTOCOL") {
        bail!("{address} does not speak NCCL's RAS protocol: {hello:?}");
    }
    let seconds = what.timeout.as_secs().max(1);
    for command in [format!("TIMEOUT {seconds}"), format!("SET FORMAT {}", if json { "json" } else { "text" })] {
        let answer = ask(&command)?;
        if answer != "OK" {
            bail!("{address} refuses {command:?}: {answer}");
        }
    }
    (&stream).write_all(if what.verbose { b"VERBOSE STATUS\n" } else { b"STATUS\n" })?;
    let mut text = String::new();
    reader.take(LONGEST).read_to_string(&mut text).context("reading the report")?;
    let code = i32::from(is_odd(&text, json)) * super::ODD;
    Ok(Look { page: text, code })
}

/// Returns true if a report shows something odd, as far as NCCL's own format says so.
fn is_odd(text: &str, json: bool) -> bool {
    if json {
        let report: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
        let Some(comms) = report["communicators"].as_array() else { return false };
        return comms.iter().any(|comm| {
            let ranks = comm["ranks"].as_array().map(Vec::as_slice).unwrap_or_default();
            let counts = |rank: &serde_json::Value| rank["collective_counts"].clone();
            comm["missing_ranks_count"].as_u64().unwrap_or(0) > 0
                || ranks.iter().any(|rank| counts(rank) != counts(&ranks[0]) || rank["status"]["async_error"] != 0)
        });
    }
    ["MISMATCH", "INCOMPLETE", "ERROR", "TIMEOUT", "DEAD"].iter().any(|word| text.contains(word))
}
