//! Code that the programs in `milestones/` and `tools/` share.
//!
//! ```text
//! size       4M on a command line is 4194304 bytes
//! end        an error is one line; status 77 says that the machine lacks what the program needs, 2 that usage was wrong
//! machine    the processor's name, the cores, and a thread on one of them
//! memory     what the machine and the control groups leave
//! stats      medians
//! output     a file that appears when it is complete
//! source     where an item of a source file ends
//! process    a command with its output caught and a deadline
//! testing    a program as its user starts it, in a test
//! again      a test's own program, once more for each of its processes
//! nodes      network namespaces as nodes of a test
//! port       a port that a program of a test will have
//! ```

pub mod again;
pub mod end;
pub mod machine;
pub mod memory;
pub mod nodes;
pub mod output;
pub mod port;
pub mod process;
pub mod size;
pub mod source;
pub mod stats;
pub mod testing;

pub use end::{UNAVAILABLE, Usage, exit_code};
