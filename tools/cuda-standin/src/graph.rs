//! Graphs: the work of a capture, to be done again and again.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream};

use crate::calls::{ensure, lock, put};
use crate::capture;
use crate::context::current;
use crate::handles::{self, Table};
use crate::stream::{Point, stream};
use crate::work::Work;

static GRAPHS: Table<Arc<Vec<Work>>> = Table::new();
static EXECUTABLES: Table<Executable> = Table::new();

/// An instance of a graph.
struct Executable {
    work: Arc<Vec<Work>>,
    /// The last launch: the next one waits for it.
    last: Mutex<Option<Point>>,
}

pub(crate) fn make(work: Vec<Work>) -> CUgraph {
    let handle = handles::fresh();
    GRAPHS.insert(handle, Arc::new(Arc::new(work)));
    handles::pointer(handle)
}

calls! {
    fn cuGraphCreate(to: *mut CUgraph, flags: c_uint) {
        ensure(flags == 0, CUresult::CUDA_ERROR_INVALID_VALUE)?;
        put(to, make(Vec::new()))
    }

    fn cuGraphDestroy(graph: CUgraph) { GRAPHS.remove(graph).map(|_| ()) }

    // The number of its operations; none of them can be named.
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        ensure(nodes.is_null(), CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        put(count, GRAPHS.get(graph)?.len())
    }

    fn cuGraphInstantiateWithFlags(to: *mut CUgraphExec, graph: CUgraph, _: c_ulonglong) {
        current()?;
        let work = Arc::clone(&*GRAPHS.get(graph)?);
        let handle = handles::fresh();
        EXECUTABLES.insert(handle, Arc::new(Executable { work, last: Mutex::default() }));
        put(to, handles::pointer(handle))
    }

    fn cuGraphExecDestroy(graph: CUgraphExec) { EXECUTABLES.remove(graph).map(|_| ()) }

    fn cuGraphUpload(graph: CUgraphExec, handle: CUstream) {
        EXECUTABLES.get(graph)?;
        stream(handle).map(|_| ())
    }

    fn cuGraphLaunch(graph: CUgraphExec, handle: CUstream) {
        current()?;
        let (graph, stream) = (EXECUTABLES.get(graph)?, stream(handle)?);
        let work = Work::Graph(graph.work.clone());
        let Some(work) = capture::add(&stream, work)? else { return Ok(()) };
        let mut last = lock(&graph.last);
        if let Some(point) = last.take().filter(|point| !point.is_reached()) {
            stream.enqueue_live(Work::Reach(point))?;
        }
        *last = Some(stream.enqueue_live(work)?);
        Ok(())
    }
}
