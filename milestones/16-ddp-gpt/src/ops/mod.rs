//! The pieces of the network: each with its forward and its backward pass over plain slices, row-major.
//!
//! A batch of B sequences of T characters is B·T rows. Nothing here allocates; outputs and scratch come from the caller.

pub mod attention;
pub mod dropout;
pub mod embedding;
pub mod gelu;
pub mod layernorm;
pub mod loss;
pub mod matmul;
pub mod parallel;
pub mod simd;
