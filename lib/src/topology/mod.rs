//! What things cost, and which algorithm to take: an alpha-beta-gamma [`cost`] model and the [`select`]ion on top.

pub mod cost;
pub mod fit;
pub mod select;
mod work;

pub use cost::{CostModel, LinkCost, estimate};
pub use fit::fit;
pub use select::{Choice, Estimate, choose};
