//! Algorithms: pure functions from a call to each rank's [`Program`](crate::schedule::Program).

use crate::schedule::Program;
use crate::wire::{Algorithm, Collective};

/// What a schedule depends on: not the data, not the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Which pattern.
    pub collective: Collective,
    /// World size.
    pub ranks: usize,
    /// Root rank; 0 where there is none.
    pub root: usize,
    /// Number of channels the algorithm may spread over.
    pub channels: usize,
}

/// The program of `rank`, or `None` when `algorithm` cannot do this collective on this many ranks.
pub fn program(algorithm: Algorithm, shape: &Shape, rank: usize) -> Option<Program> {
    let _ = (algorithm, shape, rank);
    None
}
