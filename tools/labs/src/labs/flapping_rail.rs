//! Two rails carry half of each message; one of them goes away for a moment, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use softroce::{SendOp, Status};

use crate::card::end::{End, Terms};
use crate::card::wire::{Rules, Side, Wire};
use crate::labs::Fixed;
use crate::ranks::Announced;

/// Few packets, so that the boxes on the path can hold all of them.
const MESSAGE: usize = 32 << 10;
/// Messages of a run without a failure.
const MESSAGES: usize = 1000;
/// A rail that flaps is down for `DOWN` at the end of each `PERIOD`.
const PERIOD: Duration = Duration::from_millis(200);
const DOWN: Duration = Duration::from_millis(20);
/// Messages that the flaps must delay before a run over both rails ends; after `LIMIT` it ends without them.
const HITS: usize = 4;
const LIMIT: Duration = Duration::from_secs(30);
/// A message that takes longer has waited for a timeout.
const LONG: Duration = Duration::from_millis(60);
/// Code 14 of the wait for an acknowledgement: 67 ms, which the device may double; tries forever.
const TERMS: Terms = Terms { mtu: 4096, timeout: 14, retry_cnt: 7, min_rnr_timer: 12 };

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    fixed: Fixed,
    /// Print the traffic of each rail.
    #[arg(long)]
    rails: bool,
}

/// Port counters of a rail: packets carried, and packets lost.
#[derive(Debug, Default)]
struct Counters {
    carried: AtomicU64,
    lost: AtomicU64,
}

/// A connection of A with B over a separate network.
struct Rail {
    a: End,
    b: End,
    counters: Arc<Counters>,
    _wire: Wire,
}

impl Rail {
    fn new(flaps: bool) -> Result<Rail> {
        let (a, b) = (End::new(MESSAGE)?, End::new(MESSAGE)?);
        let mut wire = Wire::lay()?;
        a.connect(wire.peer_of(Side::A), TERMS)?;
        b.connect(wire.peer_of(Side::B), TERMS)?;
        let (counters, begin) = (Arc::new(Counters::default()), Instant::now());
        let counts = counters.clone();
        let loses = move |_, _: &softroce::wire::Packet<'_>| {
            let phase = begin.elapsed().as_nanos() % PERIOD.as_nanos();
            let down = flaps && phase >= (PERIOD - DOWN).as_nanos();
            let counter = if down { &counts.lost } else { &counts.carried };
            counter.fetch_add(1, Ordering::Relaxed);
            down
        };
        wire.carry(a.number(), b.number(), Rules { renews_icrc: true, loses: Box::new(loses) })?;
        Ok(Rail { a, b, counters, _wire: wire })
    }

    /// Posts a stripe of a message.
    fn post(&self, len: usize) -> Result<()> {
        self.a.send(SendOp::Write(self.b.remote(0)), 0, len)
    }

    /// Returns true once the stripe has arrived.
    fn done(&self) -> Result<bool> {
        let Some(wc) = self.a.poll() else { return Ok(false) };
        ensure!(wc.status == Status::Success, "a WRITE ended with {:?}", wc.status);
        Ok(true)
    }
}

/// A message that took long: its number, and when each stripe was there.
struct Long {
    number: usize,
    stripes: Vec<Duration>,
}

pub(crate) fn run(options: &Options) -> Result<u8> {
    let rails = [Rail::new(false)?, Rail::new(true)?];
    // Mended: the rail that flaps is taken out.
    let used = if options.fixed.fixed { &rails[..1] } else { &rails[..] };
    let begin = Instant::now();
    let (mut messages, mut long) = (0, Vec::new());
    while begin.elapsed() < LIMIT && (messages < MESSAGES || (used.len() > 1 && long.len() < HITS)) {
        let stripes = send(used)?;
        if stripes.iter().any(|&stripe| stripe > LONG) {
            long.push(Long { number: messages, stripes });
        }
        messages += 1;
    }
    println!("A wrote {messages} messages of 32 KiB to B over {} in {}", plural(used.len()), ms(begin.elapsed()));
    println!("within {}: {}; longer: {}", ms(LONG), messages - long.len(), long.len());
    for Long { number, stripes } in long.iter().filter(|_| options.rails) {
        let times: Vec<String> =
            stripes.iter().enumerate().map(|(rail, t)| format!("rail {rail} {}", ms(*t))).collect();
        println!("  message {number}: {}", times.join(", "));
    }
    for (rail, counters) in rails.iter().map(|rail| &rail.counters).enumerate().filter(|_| options.rails) {
        let [carried, lost] = [&counters.carried, &counters.lost].map(|counter| counter.load(Ordering::Relaxed));
        println!("rail {rail}: {carried} packets carried, {lost} lost");
    }
    let lost = rails.iter().any(|rail| rail.counters.lost.load(Ordering::Relaxed) > 0);
    match long.iter().filter(|_| lost).flat_map(|long| long.stripes.iter().max()).max() {
        None => Ok(0),
        Some(longest) => {
            Err(Announced(format!("every WRITE succeeded, and the longest message took {}", ms(*longest))).into())
        }
    }
}

/// Sends a message, a stripe over each rail; returns the time until each has arrived.
fn send(rails: &[Rail]) -> Result<Vec<Duration>> {
    let begin = Instant::now();
    rails.iter().try_for_each(|rail| rail.post(MESSAGE / rails.len()))?;
    let mut stripes = vec![None; rails.len()];
    while stripes.contains(&None) {
        ensure!(begin.elapsed() < LIMIT, "a message did not arrive within {} s", LIMIT.as_secs());
        for (rail, stripe) in rails.iter().zip(&mut stripes).filter(|(_, stripe)| stripe.is_none()) {
            if rail.done()? {
                *stripe = Some(begin.elapsed());
            }
        }
        std::thread::yield_now();
    }
    Ok(stripes.into_iter().flatten().collect())
}

fn plural(rails: usize) -> String {
    format!("{rails} rail{}", if rails == 1 { "" } else { "s" })
}

fn ms(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}
