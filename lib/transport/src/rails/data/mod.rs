//! Data path of a connection: messages to fragments, and fragments to posted buffers, over any of its streams.
//!
//! | file | idea |
//! |---|---|
//! | `request` | posted sends and receives, and the failure of a connection |
//! | `sender`, `receiver` | messages to fragments, fragments to posted buffers, each with flow control per tag |
//! | `writer`, `reader` | fragments and control frames to a stream, and from it |
//! | `frame`, `control` | header of a fragment, and control frames that any stream may carry |
//! | `session` | state of a connection that its streams, requests and owner share |
//! | `upcalls`, `side` | the traits through which these files see the connection above |

pub(super) mod control;
pub(super) mod frame;
pub(super) mod reader;
pub(super) mod receiver;
pub(super) mod request;
pub(super) mod sender;
pub(super) mod session;
pub(super) mod side;
pub(super) mod upcalls;
pub(super) mod writer;
