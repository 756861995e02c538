//! The course: its shape, its commands, and all of it from begin to end.

mod agreement;
mod cli;
mod course;
mod whole;
