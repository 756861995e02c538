//! `Server`: the rendezvous of the ranks.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::errors::raise_plainly;
use crate::join::config;

/// The rendezvous of a job.
#[pyclass(frozen, module = "tinynccl._core")]
pub(crate) struct Server {
    server: Mutex<Option<tinynccl::bootstrap::Server>>,
    id: String,
}

impl Server {
    pub(crate) fn take(&self) -> Option<tinynccl::bootstrap::Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[pymethods]
impl Server {
    #[new]
    #[pyo3(signature = (world_size, port=0))]
    fn py_new(py: Python<'_>, world_size: usize, port: u16) -> PyResult<Server> {
        let config = config(py, None, None, None)?;
        let bind = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
        let server =
            tinynccl::bootstrap::Server::start(bind, world_size, &config).map_err(|e| raise_plainly(py, &e))?;
        Ok(Server { id: server.unique_id().to_string(), server: Mutex::new(Some(server)) })
    }

    #[getter]
    pub(crate) fn unique_id(&self) -> &str {
        &self.id
    }

    fn close(&self, py: Python<'_>) {
        let server = self.take();
        py.detach(|| drop(server));
    }
}
