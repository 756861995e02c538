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

pub(in crate::cuda) mod collectives;
pub(in crate::cuda) mod enqueue;
pub(in crate::cuda) mod fused;
pub(in crate::cuda) mod group;
pub(in crate::cuda) mod one_sided;
pub(in crate::cuda) mod registered;
