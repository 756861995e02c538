//! The objects of libibverbs, and what the programs over them share: milestones 02, 04, 05 and 08, and two labs.
//!
//! ```text
//! verbs        the objects, one per file: Context, Pd, Mr, Cq, Qp
//! gid          addresses, and the choice among a port's
//! endpoint     what a queue pair must know of its peer, as a line of text
//! connect      a queue pair from RESET to RTS, in one call; milestone 02 takes the steps one by one
//! pair         both ends of a connection in one process
//! completion   a finished request, decoded; words has the names of its numbers
//! side         the side channel over TCP
//! choice       the options that choose a device; alone, say, unavailable: how such a program starts, prints and ends
//! ```

pub mod alone;
pub mod choice;
pub mod completion;
pub mod connect;
pub mod endpoint;
pub mod gid;
pub mod pair;
pub mod say;
pub mod side;
pub mod unavailable;
pub mod verbs;
pub mod words;
