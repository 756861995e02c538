//! A program that calls the library, over a stand-in for CUDA's driver (`tools/cuda-standin`): two GPUs or more that do
//! not reach each other, so calls go through the hosts' memory, and data is real.
//!
//! | file | idea |
//! | --- | --- |
//! | `apart` | each test in a separate process, with a limit; ranks as processes |
//! | `functions` | the library's functions, by name |
//! | `rank`, `types` | a rank with its stream; elements of NCCL's types |
//! | `collectives`, `messages` | every call against what it must give |
//! | `groups`, `random` | groups, and a thousand of them against a model |
//! | `driver` | right and wrong calls of all kinds in random order, beside threads, signals and forks |
//! | `split`, `background` | communicators from communicators; non-blocking ones |
//! | `buffers`, `environment` | memory and windows; NCCL's variables |
//! | `finalize`, `failures` | finalize, destroy, abort; ranks that die or disagree |
//! | `ras` | the server for `ncclras` |
//! | `c_program`, `python` | a program in C, linked to the library; one in Python, by ctypes |

#[macro_use]
mod apart;
mod background;
mod buffers;
mod c_program;
mod collectives;
mod driver;
mod environment;
mod failures;
mod finalize;
mod functions;
mod groups;
mod messages;
mod python;
mod random;
mod rank;
mod ras;
mod split;
mod types;
