//! Calls of a communicator, from arguments to what a data path launches.
//!
//! | file | idea |
//! | --- | --- |
//! | `collectives` | collectives over buffers of cudarc |
//! | `enqueue` | collectives by address: checked, and given to the data path |
//! | `group` | several calls together: collectives, fused ones, and messages |
//! | `fused` | short calls of a group as one launch |
//! | `registered` | buffers that calls use without copies |
//! | `one_sided` | writes into other ranks' buffers, and signals |

pub(crate) mod collectives;
pub(crate) mod enqueue;
pub(crate) mod fused;
pub(crate) mod group;
pub(crate) mod one_sided;
pub(crate) mod registered;
