//! Plays a run: reads what `TINYNCCL_TRACE` recorded and makes one page of it, which needs no server.
//!
//! ```text
//! events     the lines of a trace, one by one, so that a long one needs no more memory than a short one
//! cut        the end of a trace that a page has room for
//! recording  ranks, tracks, slices, messages and calls of that part
//! page       the page, for one run or two side by side
//! look       the style and the script that all pages of the tools share
//! option     --replay of the programs
//! ```

mod cut;
mod events;
pub mod look;
mod option;
mod page;
mod recording;
#[cfg(test)]
mod tests;

pub use cut::EVENTS;
pub use option::Replay;
pub use page::page;
pub use recording::{CallSpan, Cause, Failure, Kind, Message, Recording, Slice};
