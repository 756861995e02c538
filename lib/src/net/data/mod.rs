//! Data path of a connection: messages to fragments, and fragments to posted buffers, over any of its streams.
//!
//! | file | idea |
//! |---|---|
//! | `request` | posted sends and receives, and the failure of a connection |
//! | `sender`, `receiver` | messages to fragments, fragments to posted buffers, each with flow control per tag |
//! | `writer`, `reader` | fragments and control frames to a stream, and from it |
//! | `stream` | a TCP connection: its socket, its state, what the kernel holds of it |
//! | `rate` | bytes in flight on a rail and its measured rate: the scheduler's input |
//! | `frame`, `control` | header of a fragment, and control frames that any stream may carry |
//! | `core` | streams of a connection, and what is posted on it |
//! | `upcalls` | the trait through which these files call the connection above |

pub(super) mod control;
pub(super) mod core;
pub(super) mod frame;
pub(super) mod rate;
pub(super) mod reader;
pub(super) mod receiver;
pub(super) mod request;
pub(super) mod sender;
pub(super) mod stream;
pub(super) mod upcalls;
pub(super) mod writer;
