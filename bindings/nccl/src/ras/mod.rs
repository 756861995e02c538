//! NCCL's RAS protocol: what the client `ncclras`, and programs that speak its protocol, learn of a running job.
//!
//! A thread listens at `NCCL_RAS_ADDR`, as in every process of NCCL's: processes of a user share the port, and the
//! kernel hands a client to one of them. It answers with the reports of all processes of the user on this host
//! ([`tinynccl::status`]), in NCCL's layout.
//!
//! | file | idea |
//! | --- | --- |
//! | `server` | the thread, and its clients |
//! | `monitor` | events, from the difference of two looks |
//! | `text`, `json` | a look in NCCL's two formats |
//! | `look` | the reports of this host |
//! | `commands` | the lines of a client |

mod commands;
mod json;
mod look;
mod monitor;
mod server;
mod text;

pub(crate) use server::start;
