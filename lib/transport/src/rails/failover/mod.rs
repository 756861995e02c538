//! Agreement of a connection's two ends on the streams that they lose, without I/O: no sockets, clocks or locks.
//!
//! | file | idea |
//! |---|---|
//! | `slot` | a stream as the agreement sees it: its number, its state, and whether it stalls |
//! | `agreement` | events in, what is to be done out: failures, ends, stalls, and notices of the peer's |
//! | `unacked` | fragments of a stream that the peer has not acknowledged, and what the receiver acknowledges |
//!
//! The connection tells the machine of what its sockets and its peer do, and carries out what it returns; the tests
//! join two machines by streams in memory.

pub(super) mod agreement;
pub(super) mod slot;
pub(super) mod unacked;

#[cfg(test)]
mod tests;
