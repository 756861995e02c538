//! A schedule, played round by round, as input of the pictures.

use tinynccl_plan::algorithm::Shape;
use tinynccl_plan::schedule::Partition;
use tinynccl_plan::schedule::rounds::{Message, Round};
use tinynccl_plan::wire::Algorithm;

use crate::program::By;

/// A schedule that was played.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) by: By,
    pub(crate) shape: Shape,
    pub(crate) parts: usize,
    /// Bytes of a segment.
    pub(crate) size: usize,
    pub(crate) rounds: Vec<Round>,
}

impl Played {
    /// Bytes of a message: segments are cut as for a call of bytes that fits in one window.
    pub(crate) fn bytes(&self, message: &Message) -> u64 {
        Partition::new(self.size, 1, self.parts, usize::MAX).total_bytes(message.parts.clone())
    }

    /// Drawn as a tree, and not as a circle.
    pub(crate) fn is_tree(&self) -> bool {
        self.by.algorithm() == Some(Algorithm::Tree)
    }

    pub(crate) fn title(&self) -> String {
        let Shape { collective, ranks, .. } = self.shape;
        let root = if collective.has_root() { format!(", root {}", self.shape.root) } else { String::new() };
        format!("{collective}, {}, {ranks} ranks{root}", self.by)
    }
}
