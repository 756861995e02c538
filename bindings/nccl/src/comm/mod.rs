//! State of a communicator. Nothing here waits for another rank.
//!
//! | file | idea |
//! | --- | --- |
//! | `handle` | `ncclComm_t`, and the communicator that it names |
//! | `communicator` | one rank's state of a communicator |
//! | `operators` | its custom operators |
//! | `registered` | its registered buffers |
//! | `gpu` | the GPU of a thread |

pub(crate) mod communicator;
pub(crate) mod gpu;
pub(crate) mod handle;
pub(crate) mod operators;
pub(crate) mod registered;
