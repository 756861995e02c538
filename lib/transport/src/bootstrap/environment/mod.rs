//! This host and this process's place in the job, before there is a connection.
//!
//! | file | idea |
//! | --- | --- |
//! | `detect` | variables of launchers: MPI, Slurm, torchrun |
//! | `interface` | addresses of the network interfaces, and their choice |
//! | `host` | the identity of this host |
//! | `local_rendezvous` | the unique id, handed from rank 0 to the other ranks of the host |

pub(in crate::bootstrap) mod detect;
pub mod host;
pub mod interface;
pub(in crate::bootstrap) mod local_rendezvous;
