//! Queue pairs of two contexts of a process, and of two processes, over the loopback interface.

mod churn;
mod end;
mod exit;
mod faults;
mod forks;
mod gpu;
mod marks;
mod ports;
mod processes;
mod services;
mod stopped;
mod threads;
mod unmapped;
