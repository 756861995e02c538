//! `TINYROCE_LOSS`, `TINYROCE_FLIP`, `TINYROCE_DELAY`, `TINYROCE_TRACE`: a wire for learners to look at, and to break.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::control::Marks;
use super::trace::Trace;
use crate::error::{Error, Result};
use crate::sync::lock;

/// Packets that are lost, in percent: a number from 0 to 100, also 0.5.
pub const LOSS_VARIABLE: &str = "TINYROCE_LOSS";
/// Packets of which a bit of the payload flips before their ICRC is made, in percent: as in a card or a switch that
/// repairs the sum. Only payloads of 256 bytes and more, behind their first 64.
pub const FLIP_VARIABLE: &str = "TINYROCE_FLIP";
/// Microseconds that each packet is held back before it is sent.
pub const DELAY_VARIABLE: &str = "TINYROCE_DELAY";
/// File that all packets are written to, sent and received.
pub const TRACE_VARIABLE: &str = "TINYROCE_TRACE";

/// Destination of a packet that was held back.
#[derive(Debug, Clone, Copy)]
pub(super) enum To {
    Udp(RawFd, SocketAddr, Marks),
    Slot(u32),
}

#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Packets lost out of 2^32, on average; 0 for none.
    loss: u64,
    /// Packets in which a bit flips, as `loss`.
    flips: u64,
    pub(super) delay: u64,
    pub(super) trace: Option<Trace>,
    dice: AtomicU64,
    held: Mutex<VecDeque<(u64, To, Vec<u8>)>>,
}

fn variable<T: FromStr>(name: &str, expected: &str, fits: impl Fn(&T) -> bool) -> Result<Option<T>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    match text.parse().ok().filter(fits) {
        Some(value) => Ok(Some(value)),
        None => Err(Error::invalid(format!("{name}={text:?}: expected {expected}"))),
    }
}

impl Faults {
    pub(super) fn from_environment() -> Result<Faults> {
        let loss = variable::<f64>(LOSS_VARIABLE, "percent, 0 to 100", |p| (0.0..=100.0).contains(p))?.unwrap_or(0.0);
        let flips = variable::<f64>(FLIP_VARIABLE, "percent, 0 to 100", |p| (0.0..=100.0).contains(p))?.unwrap_or(0.0);
        let delay = variable::<f64>(DELAY_VARIABLE, "microseconds", |d| (0.0..=1e9).contains(d))?.unwrap_or(0.0);
        let trace = match std::env::var(TRACE_VARIABLE) {
            Ok(name) if !name.is_empty() => Some(Trace::create(&name)?),
            _ => None,
        };
        Ok(Faults {
            loss: (loss / 100.0 * f64::from(u32::MAX)) as u64,
            flips: (flips / 100.0 * f64::from(u32::MAX)) as u64,
            delay: (delay * 1e3) as u64,
            trace,
            dice: AtomicU64::new(super::now() | 1),
            held: Mutex::default(),
        })
    }

    /// Returns true if the next packet is lost.
    pub(super) fn loses(&self) -> bool {
        self.loss > 0 && self.roll() >> 32 < self.loss
    }

    /// The bit that flips in the next packet's payload of `bytes` bytes, if one does.
    pub(super) fn flips(&self, bytes: usize) -> Option<usize> {
        if self.flips == 0 || bytes < 256 || self.roll() >> 32 >= self.flips {
            return None;
        }
        Some(8 * 64 + (self.roll() >> 16) as usize % (8 * (bytes - 64)))
    }

    fn roll(&self) -> u64 {
        // A linear congruential generator: no two threads get the same number, which is all it is for.
        const FACTOR: u64 = 6_364_136_223_846_793_005;
        let step = |n: u64| Some(n.wrapping_mul(FACTOR).wrapping_add(1_442_695_040_888_963_407));
        let n = self.dice.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).unwrap_or_default();
        // The first numbers are a time, whose upper bits are alike.
        (n ^ n >> 32).wrapping_mul(FACTOR)
    }

    /// Holds a packet back; returns until when, in nanoseconds of the monotonic clock.
    pub(super) fn hold(&self, now: u64, to: To, bytes: Vec<u8>) -> u64 {
        let until = now + self.delay;
        lock(&self.held).push_back((until, to, bytes));
        until
    }

    /// Returns the packets whose time has come, and the time of the next one, if any is held.
    pub(super) fn release(&self, now: u64) -> (Vec<(To, Vec<u8>)>, Option<u64>) {
        let mut held = lock(&self.held);
        let mut due = Vec::new();
        while held.front().is_some_and(|(until, ..)| *until <= now) {
            due.extend(held.pop_front().map(|(_, to, bytes)| (to, bytes)));
        }
        (due, held.front().map(|(until, ..)| *until))
    }
}
