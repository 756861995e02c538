//! The network in plain loops over slices, row-major, and its training.
//!
//! Reading order: one file per operation, each with its forward and its backward pass ([`embedding`], [`layernorm`],
//! [`matmul`], [`attention`], [`residual`], [`gelu`], [`loss`]); [`model`] (the passes, built from these);
//! [`gradients`] (where gradients live, and how ranks average them); [`adamw`]; [`step`]; [`local`] and [`outer`] (many
//! steps between averages). [`parallel`] and [`simd`] make the loops fast; [`profile`] and [`mod@bench`] say how fast.
//!
//! A batch of B sequences of T characters is B·T rows. No operation allocates; outputs and scratch come from the
//! caller.

pub mod adamw;
pub mod attention;
pub mod bench;
pub mod embedding;
pub mod gelu;
pub mod gradients;
pub mod layernorm;
pub mod local;
pub mod loss;
pub mod matmul;
pub mod model;
pub mod outer;
pub mod parallel;
pub mod profile;
pub mod residual;
pub mod simd;
pub mod step;
