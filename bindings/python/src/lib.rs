//! The extension module `tinynccl._core`: communicators for Python, over whatever memory can say where it lies.
//!
//! `python/tinynccl` wraps it: its documentation is there, in `_core.pyi`.

mod calls;
mod comm;
mod device;
mod errors;
mod group;
mod memory;
mod torch;
mod work;

use pyo3::prelude::*;

#[pymodule(name = "_core")]
fn core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<comm::Comm>()?;
    module.add_class::<comm::Server>()?;
    module.add_class::<group::Group>()?;
    module.add_class::<work::Work>()?;
    module.add_function(wrap_pyfunction!(comm::cuda_device_count, module)?)?;
    module.add_function(wrap_pyfunction!(comm::_leave_all, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
