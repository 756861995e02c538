//! Wrappers of a pair of any transport's halves.
//!
//! | file | idea |
//! | --- | --- |
//! | `faulty` | faults, for tests |
//! | `paced` | the rate of a slower wire, for tests |

pub mod faulty;
pub mod paced;
