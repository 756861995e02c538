//! WRITEs over a link that loses packets: a reliable connection repeats them, and those behind them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use line_chart::{Axis, COLOURS, Chart, Curve};
use program_kit::stats::median;
use softroce::wire::{Nak, Operation, Packet, Syndrome};
use softroce::{LOSS_VARIABLE, SendOp, Status, TRACE_VARIABLE};

use crate::CANNOT_RUN_HERE;
use crate::card::end::{End, Terms};
use crate::card::shown;
use crate::labs::Fixed;
use crate::ranks::{Announced, CannotRunHere};

const MESSAGE: usize = 64 << 10;
const MESSAGES: usize = 512;
/// Runs whose median speed is shown.
const RUNS: usize = 3;
/// WRITEs under way.
const DEPTH: usize = 8;
const MTU: u32 = 4096;
const NEEDED: usize = MESSAGES * MESSAGE / MTU as usize;
/// Timeout of 4.2 ms, and tries forever.
const TERMS: Terms = Terms { mtu: MTU, timeout: 10, retry_cnt: 7, min_rnr_timer: 12 };

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    fixed: Fixed,
    /// Packets that the link loses, in percent; several numbers are several runs.
    #[arg(long, value_delimiter = ',', default_value = "2")]
    loss: Vec<f64>,
    /// Draws speeds and repetitions over the loss.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[arg(long, hide = true)]
    measure: bool,
}

/// Runs, in some of which the speed was measured, and in another one the packets were counted.
struct Row {
    loss: f64,
    mb_per_s: f64,
    arrived: usize,
    naks: usize,
}

impl Row {
    /// Times that a packet arrived, on average.
    fn times(&self) -> f64 {
        self.arrived as f64 / NEEDED as f64
    }
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    if options.measure {
        return measure();
    }
    let losses = if options.fixed.fixed { &[0.0][..] } else { &options.loss };
    println!("{} MiB, WRITEs of 64 KiB, {DEPTH} under way; packets of {MTU} bytes", (MESSAGES * MESSAGE) >> 20);
    println!("loss %      MB/s    needed   arrived   times    NAKs   repeated per NAK");
    let mut rows = Vec::new();
    for loss in losses {
        let row = row(*loss)?;
        let repeated = row.arrived.saturating_sub(NEEDED);
        println!(
            "{loss:>6} {:>9.0} {NEEDED:>9} {:>9} {:>7.2} {:>7} {:>18}",
            row.mb_per_s,
            row.arrived,
            row.times(),
            row.naks,
            repeated / row.naks.max(1)
        );
        rows.push(row);
    }
    if let Some(file) = &options.plot {
        plot(&rows, file)?;
    }
    // A processor that is busy elsewhere lets timeouts pass on a good link, too.
    if rows.iter().all(|row| row.loss == 0.0 || row.arrived <= NEEDED) {
        return Ok(0);
    }
    Err(Announced("every WRITE succeeded, and the link carried packets that had arrived before".to_owned()).into())
}

fn row(loss: f64) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let trace = folder.path().join("card.pcap");
    let speeds = (0..RUNS).map(|_| child(loss, None)).collect::<Result<Vec<f64>>>()?;
    child(loss, Some(&trace))?;
    let (mut requests, mut naks) = (0, 0);
    for record in shown::read(&std::fs::read(&trace)?)? {
        let Ok(packet) = Packet::parse(&record.bytes) else { continue };
        match (packet.opcode.operation, packet.headers.aeth.map(|aeth| aeth.syndrome)) {
            (Operation::Write, _) => requests += 1,
            (Operation::Ack, Some(Syndrome::Nak(Nak::Sequence))) => naks += 1,
            _ => {}
        }
    }
    // Both ends are in one process: its trace has a packet where it was sent and where it arrived.
    let mb_per_s = median(&speeds).context("no runs")?;
    Ok(Row { loss, mb_per_s, arrived: requests / 2, naks: naks / 2 })
}

/// Runs this program again, as `softroce` reads the environment once; returns its speed in MB/s.
fn child(loss: f64, trace: Option<&Path>) -> Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--bare", "lossy-link", "--measure"]).env(LOSS_VARIABLE, loss.to_string()).stderr(Stdio::inherit());
    match trace {
        Some(trace) => command.env(TRACE_VARIABLE, trace),
        None => command.env_remove(TRACE_VARIABLE),
    };
    let output = command.output()?;
    if output.status.code() == Some(CANNOT_RUN_HERE.into()) {
        return Err(CannotRunHere("see above".to_owned()).into());
    }
    ensure!(output.status.success(), "the run with {loss} % loss ended with {}", output.status);
    String::from_utf8_lossy(&output.stdout).trim().parse().context("a speed")
}

fn measure() -> Result<u8> {
    let (a, b) = (End::new(MESSAGE)?, End::new(MESSAGE)?);
    a.connect(b.number(), TERMS)?;
    b.connect(a.number(), TERMS)?;
    let start = Instant::now();
    let mut posted = 0;
    for done in 0..MESSAGES {
        while posted < MESSAGES.min(done + DEPTH) {
            a.send(SendOp::Write(b.remote(0)), 0, MESSAGE)?;
            posted += 1;
        }
        let wc = a.wait()?;
        ensure!(wc.status == Status::Success, "a WRITE ended with {:?}", wc.status);
    }
    println!("{}", (MESSAGES * MESSAGE) as f64 / start.elapsed().as_secs_f64() / 1e6);
    Ok(0)
}

fn plot(rows: &[Row], file: &Path) -> Result<()> {
    let best = rows.iter().map(|row| row.mb_per_s).fold(f64::MIN_POSITIVE, f64::max);
    let speed = rows.iter().map(|row| (row.loss, 100.0 * row.mb_per_s / best)).collect();
    let useful = rows.iter().map(|row| (row.loss, 100.0 / row.times())).collect();
    let [blue, red, ..] = COLOURS;
    let chart = Chart {
        title: "A reliable connection over a lossy link".to_owned(),
        x: Axis::linear("packets lost, percent"),
        y: Axis::linear("percent").between(0.0, 130.0),
        curves: vec![
            Curve::measured("new among the packets that arrived", useful, blue),
            Curve::measured("speed, of the best", speed, red),
        ],
        legend_right: true,
    };
    let svg = line_chart::svg("", (800, 420), &[vec![chart]])?;
    std::fs::write(file, svg).with_context(|| format!("writing {}", file.display()))
}
