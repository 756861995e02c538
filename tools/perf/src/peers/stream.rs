//! One TCP stream of 128 MiB messages, one direction at a time, beside iperf3's.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use program_kit::process;

use super::args::Args;
use super::{last_words, rows};

const BYTES: usize = 128 << 20;
/// Bytes of iperf3's writes; which is fastest depends on the machine.
pub(crate) const WRITES: [&str; 3] = ["128K", "512K", "1M"];
/// Seconds of each measurement: the socket buffers grow during the first part of one.
const SECONDS: &str = "2";
const LIMIT: Duration = Duration::from_secs(30);

/// Rates of one round, GB/s.
#[derive(Debug, Clone)]
pub(crate) struct Rates {
    /// Send and receive of 128 MiB, there and back: twice the bytes over the time.
    pub(crate) ours: f64,
    /// iperf3's, for each of [`WRITES`].
    pub(crate) theirs: Vec<f64>,
}

/// Measures both once.
pub(crate) fn round(args: &Args) -> Result<Rates> {
    let theirs = WRITES.iter().map(|write| iperf(write)).collect::<Result<_>>()?;
    let size = BYTES.to_string();
    let mut command = Command::new(&args.stress);
    command.args("--csv --place mpi -w 0 --ranks 2 --transport tcp --collective pingpong".split(' '));
    command.args(["-b", &size, "-e", &size, "--budget", SECONDS]);
    let outcome = process::run_group(&mut command, LIMIT)?;
    let output = rows::parse(&outcome.stdout)?;
    let Some(row) = output.rows.first().filter(|row| row.wrong == 0) else {
        bail!("our ping-pong gave no result: {}", last_words(&outcome));
    };
    Ok(Rates { ours: 2.0 * BYTES as f64 / row.us / 1000.0, theirs })
}

/// iperf3's receiver, GB/s; its server on core 1, its client on core 0.
fn iperf(write: &str) -> Result<f64> {
    // Free now; another process may take it before the server does: then the client fails, and the error is reported.
    let port =
        TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("no free port")?.port().to_string();
    let server = Command::new("iperf3")
        .args(["-s", "-1", "-B", "127.0.0.1", "-p", &port])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start iperf3")?;
    let _server = Ended(server);
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let mut client = Command::new("iperf3");
        client.args(["-c", "127.0.0.1", "-p", &port, "-t", SECONDS, "-l", write, "-A", "0,1", "-J"]);
        let outcome = process::run_group(&mut client, LIMIT)?;
        match rate(&outcome.stdout) {
            Ok(rate) => return Ok(rate),
            // The server may not listen yet.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => return Err(error),
        }
    }
}

/// The rate in iperf3's JSON, GB/s.
fn rate(json: &str) -> Result<f64> {
    let value: serde_json::Value = serde_json::from_str(json).context("iperf3 printed no JSON")?;
    if let Some(error) = value["error"].as_str() {
        bail!("iperf3: {error}");
    }
    let bits = value["end"]["sum_received"]["bits_per_second"].as_f64().filter(|bits| *bits > 0.0);
    Ok(bits.context("iperf3's JSON has no rate")? / 8e9)
}

/// A process that ends with this value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Ended already after its one test.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_receivers_rate() {
        let json = r#"{"end": {"sum_sent": {"bits_per_second": 1}, "sum_received": {"bits_per_second": 48e9}}}"#;
        assert_eq!(rate(json).unwrap(), 6.0);
        assert!(rate(r#"{"error": "unable to connect"}"#).unwrap_err().to_string().contains("unable to connect"));
        assert!(rate("").is_err() && rate("{}").is_err());
    }
}
