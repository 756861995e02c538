//! The cost model, and the choice of the algorithm.
//!
//! | file | idea |
//! | --- | --- |
//! | [`cost`] | the model: prices of messages, copies, additions; the time of a call |
//! | [`mod@terms`] | what each algorithm needs: hops, bytes, additions, copies |
//! | [`placement`] | which ranks share memory, and how much of an algorithm's traffic leaves the host |
//! | [`routes`] | which ranks reach each other, and the relays between the others |
//! | [`relays`] | the cost of relayed messages |
//! | [`rates`] | time per byte in the caches and beyond them |
//! | [`select`] | the choice: the smallest estimate |
//! | [`fit`] | prices from measured times |

pub mod cost;
pub mod fit;
pub mod placement;
pub mod rates;
pub mod relays;
pub mod routes;
pub mod select;
pub mod terms;

pub use cost::{Bound, Breakdown, CostModel, LinkCost, estimate};
pub use placement::Placement;
pub use rates::{Caches, Rates};
pub use relays::Relays;
pub use routes::{Path, Routes};
pub use select::{Choice, Estimate, Limit, choose};
pub use terms::{Terms, terms};
