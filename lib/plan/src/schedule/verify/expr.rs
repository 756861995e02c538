//! Symbolic values: the inputs of a value, and the order in which they were combined.
//!
//! Values are numbered so that equal expressions have equal numbers. `a op b` and `b op a` are one expression, since
//! every operator gives the same bits either way; `(a op b) op c` and `a op (b op c)` are two.

use std::collections::HashMap;

/// Number of an expression.
pub(super) type Value = u32;
/// The content of memory before anything is written.
pub(super) const NOTHING: Value = Value::MAX;

/// Extent of the inputs: ranks × segments × windows × parts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) ranks: usize,
    pub(super) segments: usize,
    pub(super) windows: usize,
    pub(super) parts: usize,
}

impl Extent {
    /// Number of input cells, if they can be numbered.
    pub(super) fn leaves(&self) -> Option<Value> {
        let cells = self.ranks.checked_mul(self.places()?)?;
        Value::try_from(cells).ok().filter(|&n| n < NOTHING / 2)
    }

    fn places(&self) -> Option<usize> {
        self.segments.checked_mul(self.windows)?.checked_mul(self.parts)
    }

    /// A position in every rank's input.
    pub(super) fn place(&self, segment: usize, window: usize, part: usize) -> usize {
        (segment * self.windows + window) * self.parts + part
    }
}

enum Node {
    Op(Value, Value),
    /// A finished reduction (`last`).
    Done(Value),
}

struct Inner {
    node: Node,
    /// The position of all its leaves.
    place: usize,
}

/// All expressions of a run.
pub(super) struct Exprs {
    extent: Extent,
    /// Positions per rank.
    places: usize,
    leaves: Value,
    inner: Vec<Inner>,
    /// Bit sets of the ranks in each inner node, `words` long.
    ranks: Vec<u64>,
    words: usize,
    ops: HashMap<(Value, Value), Value>,
}

impl Exprs {
    pub(super) fn new(extent: Extent, leaves: Value) -> Exprs {
        let words = extent.ranks.div_ceil(64);
        let places = leaves as usize / extent.ranks.max(1);
        Exprs { extent, places: places.max(1), leaves, inner: vec![], ranks: vec![], words, ops: HashMap::new() }
    }

    /// A rank's input at a position.
    pub(super) fn leaf(&self, rank: usize, place: usize) -> Value {
        (rank * self.places + place) as Value
    }

    /// `a op b`, or the reason why it is invalid.
    pub(super) fn reduce(&mut self, a: Value, b: Value) -> Result<Value, String> {
        let key = (a.min(b), a.max(b));
        if let Some(&known) = self.ops.get(&key) {
            return Ok(known);
        }
        for v in [a, b] {
            if self.is_done(v) {
                return Err(format!("adds to {}, which is finished", self.describe(v)));
            }
        }
        if self.place(a) != self.place(b) {
            return Err(format!("adds different parts: {} and {}", self.describe(a), self.describe(b)));
        }
        let (set_a, set_b) = (self.set(a), self.set(b));
        if let Some(w) = (0..self.words).find(|&w| set_a[w] & set_b[w] != 0) {
            let rank = w * 64 + (set_a[w] & set_b[w]).trailing_zeros() as usize;
            return Err(format!("adds rank {rank} twice: {} and {}", self.describe(a), self.describe(b)));
        }
        let both: Vec<u64> = set_a.iter().zip(&set_b).map(|(a, b)| a | b).collect();
        let value = self.push(Node::Op(key.0, key.1), self.place(a), &both);
        self.ops.insert(key, value);
        Ok(value)
    }

    /// The finished reduction of the first `of` ranks, or why it is not finished.
    pub(super) fn finish(&mut self, v: Value, of: usize) -> Result<Value, String> {
        if self.is_done(v) {
            return Err("finishes a reduction twice".to_owned());
        }
        if !self.is_complete(v, of) {
            return Err(format!("is marked last, but the result is {}", self.describe(v)));
        }
        let key = (v, v);
        if let Some(&known) = self.ops.get(&key) {
            return Ok(known);
        }
        let set = self.set(v);
        let value = self.push(Node::Done(v), self.place(v), &set);
        self.ops.insert(key, value);
        Ok(value)
    }

    fn push(&mut self, node: Node, place: usize, set: &[u64]) -> Value {
        let value = self.leaves + self.inner.len() as Value;
        self.inner.push(Inner { node, place });
        self.ranks.extend_from_slice(set);
        value
    }

    fn inner(&self, v: Value) -> Option<&Inner> {
        v.checked_sub(self.leaves).and_then(|i| self.inner.get(i as usize))
    }

    fn set(&self, v: Value) -> Vec<u64> {
        match v.checked_sub(self.leaves) {
            Some(i) => self.ranks[i as usize * self.words..][..self.words].to_vec(),
            None => {
                let rank = v as usize / self.places;
                let mut set = vec![0; self.words];
                set[rank / 64] |= 1 << (rank % 64);
                set
            }
        }
    }

    fn place(&self, v: Value) -> usize {
        self.inner(v).map_or(v as usize % self.places, |inner| inner.place)
    }

    /// True when the first `of` ranks are in it, and no other.
    fn is_complete(&self, v: Value, of: usize) -> bool {
        let ones = |words: &[u64]| words.iter().map(|w| w.count_ones() as usize).sum::<usize>();
        let is_first = |set: &[u64]| ones(set) == of && (0..of).all(|rank| set[rank / 64] >> (rank % 64) & 1 == 1);
        v != NOTHING && is_first(&self.set(v))
    }

    fn is_done(&self, v: Value) -> bool {
        matches!(self.inner(v), Some(Inner { node: Node::Done(_), .. }))
    }

    /// True when `v` is the finished reduction over the first `of` ranks of the input at `place`.
    pub(super) fn is_reduction_of(&self, v: Value, place: usize, of: usize) -> bool {
        self.is_complete(v, of) && self.place(v) == place && (self.is_done(v) || of == 1)
    }

    /// True when the complete reduction `v` of `of` ranks is `((x0 op x1) op x2) op ...`.
    pub(super) fn is_in_rank_order(&self, v: Value, of: usize) -> bool {
        let place = self.place(v);
        let mut sum = match self.inner(v).map(|inner| &inner.node) {
            Some(&Node::Done(sum)) => sum,
            _ => v,
        };
        for rank in (1..of).rev() {
            let (next, Some(&Node::Op(a, b))) = (self.leaf(rank, place), self.inner(sum).map(|inner| &inner.node))
            else {
                return false;
            };
            sum = match next {
                _ if next == a => b,
                _ if next == b => a,
                _ => return false,
            };
        }
        sum == self.leaf(0, place)
    }

    /// In words.
    pub(super) fn describe(&self, v: Value) -> String {
        if v == NOTHING {
            return "nothing".to_owned();
        }
        let place = self.place(v);
        let part = place % self.extent.parts;
        let window = place / self.extent.parts % self.extent.windows;
        let segment = place / self.extent.parts / self.extent.windows;
        let done = if self.is_done(v) { "finished " } else { "" };
        format!("{done}in[{segment}.{part}] of window {window} of {}", self.expression(v))
    }

    /// The order of the operands: `((0+1)+2)`; shortened when very long.
    pub(super) fn expression(&self, v: Value) -> String {
        let mut text = String::new();
        self.write(v, &mut text);
        text
    }

    fn write(&self, v: Value, text: &mut String) {
        match self.inner(v).map(|inner| &inner.node) {
            _ if text.len() > 300 => text.push('…'),
            None => text.push_str(&format!("rank {}", v as usize / self.places)),
            Some(Node::Done(a)) => self.write(*a, text),
            Some(Node::Op(a, b)) => {
                text.push('(');
                self.write(*a, text);
                text.push_str(" + ");
                self.write(*b, text);
                text.push(')');
            }
        }
    }
}
