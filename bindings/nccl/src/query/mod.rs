//! Functions that answer from what is known already: they wait for no other rank.
//!
//! | file | idea |
//! | --- | --- |
//! | `info` | version, ranks, status, last error |
//! | `params` | `ncclParam*`: settings by name |

pub(crate) mod info;
pub(crate) mod params;
