//! The extension module `tinynccl._core`: communicators for Python, over the memory of its objects.
//!
//! `python/tinynccl` wraps it: its documentation is there, in `_core.pyi`.

#[cfg(feature = "bench")]
mod bench;
mod calls;
mod comm;
mod device;
mod errors;
mod exporters;
mod group;
mod join;
mod live;
mod memory;
mod numbers;
mod run;
mod server;
mod stream;
mod work;

use pyo3::prelude::*;

#[pymodule(name = "_core")]
fn core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<comm::Comm>()?;
    module.add_class::<server::Server>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<work::Work>()?;
    module.add_class::<stream::End>()?;
    module.add_function(wrap_pyfunction!(device::cuda_device_count, module)?)?;
    module.add_function(wrap_pyfunction!(live::_leave_all, module)?)?;
    #[cfg(feature = "bench")]
    module.add_function(wrap_pyfunction!(bench::_seconds_of_all_reduce, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
