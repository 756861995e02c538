//! The terms of the hypercube.

use super::{Load, Work};
use crate::algorithm::{Shape, halving_doubling::MAX_SPAN};
use crate::topology::placement::{Crossing, Placement, Share};
use crate::wire::Collective;

/// log₂n exchanges each way, of half the bytes each time.
pub(super) fn work(shape: &Shape) -> Work {
    if !shape.is_all_reduce() {
        return segments(shape);
    }
    let n = shape.ranks as f64;
    let cube = Cube::of(shape);
    let size = cube.size as f64;
    // Messages of one phase, each way: 1 per exchange, more where a block is longer than a message may be.
    let phase: f64 = cube.exchanges().map(|(_, messages)| messages).sum();
    let share = (size - 1.0) / size;
    let inside = Load::hops(2.0 * phase, 2.0 * share).reducing(share);
    let hops = 2.0 * phase;
    if cube.size == shape.ranks {
        return Work::symmetric(hops, inside);
    }
    // The folded ranks' data arrives, and the result is sent: of the messages of each, the last two travel together.
    let extra = n - size;
    let fold = 2.0 * cube.size.div_ceil(cube.span) as f64;
    let joined = fold - 2.0;
    Work {
        path: Load::ends(2.0 * (hops + 2.0), inside.bytes + 4.0).reducing(inside.reduced + 1.0),
        busiest: Load::ends(inside.messages + fold, inside.bytes + 2.0).joining(joined).reducing(inside.reduced + 1.0),
        mean: Load::ends((size * inside.messages + 2.0 * extra * fold) / n, (size * inside.bytes + 4.0 * extra) / n)
            .joining(2.0 * extra * joined / n)
            .reducing((n - 1.0) / n),
    }
}

/// all_gather and reduce_scatter: a message per segment.
fn segments(shape: &Shape) -> Work {
    let copied = f64::from(u8::from(shape.collective == Collective::AllGather));
    let (n, others) = (shape.ranks as f64, shape.ranks as f64 - 1.0);
    let all = Load::hops(others, others).reducing(others).copying(copied);
    let cube = Cube::of(shape);
    if cube.extra == 0 {
        // Of an exchange of k messages two are in flight at a time, and the last two are received together.
        return Work::symmetric(n / 2.0, all.joining(2.0 * (f64::from(shape.ranks.ilog2()) - 1.0)));
    }
    // Rank 0 is in a pair, and its blocks have the most pairs. It exchanges n - 1 segments with its partner, and sends
    // or receives as many as its blocks have. Forwarded segments arrive one by one, so none is assumed to travel with
    // another.
    let blocks: usize = cube.exchanges().map(|(d, _)| d + cube.extra.min(d)).sum();
    let ends = 2.0 * others + blocks as f64;
    let busiest = Load::ends(ends, ends).reducing(ends - others).copying(copied);
    // The waits of exchanges of unequal blocks are approximated.
    let hops = (n - copied) / 2.0 + f64::from(cube.size.ilog2());
    Work { path: Load { messages: 2.0 * hops, copied: 0.0, ..busiest }, busiest, mean: all }
}

/// An exchange at distance d stays on the host if blocks are aligned to 2d.
pub(super) fn crossing(shape: &Shape, placement: Placement) -> Crossing {
    let cube = Cube::of(shape);
    // Folding puts two ranks under one id, for the ids that it concerns: their distances double.
    let stretch = if cube.size == shape.ranks { 1 } else { 2 };
    let block = placement.block();
    // Of the pairs at distance d: the slowest of them (path), and how many of them there are (mean).
    let slowest = |d: usize| f64::from(u8::from(!block.is_multiple_of(2 * d * stretch)));
    let pairs = |d: usize| slowest(d) * ((d * stretch) as f64 / block as f64).min(1.0);
    let share = |of: &dyn Fn(usize) -> f64| {
        let (mut all, mut out) = (Share::default(), Share::default());
        for (d, messages) in cube.exchanges() {
            // Blocks of d parts in all_reduce, d segments one by one otherwise.
            let (messages, bytes) = if shape.is_all_reduce() { (messages, d as f64) } else { (d as f64, d as f64) };
            all = Share { messages: all.messages + messages, bytes: all.bytes + bytes };
            out = Share { messages: out.messages + of(d) * messages, bytes: out.bytes + of(d) * bytes };
        }
        Share { messages: out.messages / all.messages, bytes: out.bytes / all.bytes }
    };
    let (path, mean) = (share(&slowest), share(&pairs));
    if cube.extra == 0 || shape.is_all_reduce() {
        return Crossing { path, busiest: path, mean };
    }
    // Of n - 1 messages per rank those within a pair stay on the host, unless a host border splits the pair.
    let folded = cube.extra as f64 / (shape.ranks as f64 - 1.0);
    let split = if block.is_multiple_of(2) { 0.0 } else { 1.0 / block as f64 };
    let mean = Share::of((1.0 - folded) * mean.messages + folded * split);
    Crossing { path, busiest: path, mean }
}

/// The largest power of two.
struct Cube {
    size: usize,
    /// Ranks outside: the first `extra` ids stand for two ranks each.
    extra: usize,
    /// Most parts per message.
    span: usize,
}

impl Cube {
    fn of(shape: &Shape) -> Cube {
        let size = 1usize << shape.ranks.ilog2();
        Cube { size, extra: shape.ranks - size, span: (size / 2).clamp(1, MAX_SPAN) }
    }

    /// Distance and messages of each exchange.
    fn exchanges(&self) -> impl Iterator<Item = (usize, f64)> {
        let span = self.span;
        (0..self.size.ilog2()).map(move |bit| (1 << bit, (1usize << bit).div_ceil(span) as f64))
    }
}
