//! Starts the ranks of a program on this machine.
