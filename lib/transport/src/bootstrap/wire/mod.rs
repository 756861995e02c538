//! Messages between ranks and the store: who is admitted, frames, and their contents.
//!
//! | file | idea |
//! | --- | --- |
//! | `admission` | the challenge and the proof that a client knows the secret of the job |
//! | `frame` | frames of a length and their limits; the hello |
//! | `message` | contents of frames |
//! | `connection` | a non-blocking connection that reads and writes frames |
//! | `event` | the loss, the leaving or the abort of a rank |
//! | `unique_id` | the text by which ranks find the store |

pub(in crate::bootstrap) mod admission;
pub(in crate::bootstrap) mod connection;
pub(in crate::bootstrap) mod event;
pub(in crate::bootstrap) mod frame;
pub(in crate::bootstrap) mod message;
pub mod unique_id;
