//! Wrappers of a pair of any transport's halves.
//!
//! | file | idea |
//! | --- | --- |
//! | `checksum` | a checksum of each message |
//! | `faulty` | faults, for tests |
//! | `paced` | the rate of a slower wire, for tests |

pub mod checksum;
pub mod faulty;
pub mod paced;
