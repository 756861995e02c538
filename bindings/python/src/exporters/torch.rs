//! The memory of torch tensors, by torch's own methods. torch is never imported here: a tensor implies that it is.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{intern, types::PyString};
use tinynccl::DType;

use super::type_name;
use crate::memory::{Device, Keep, Kind, Memory};

struct Torch {
    tensor: Py<PyAny>,
    strided: Py<PyAny>,
    dtypes: Vec<(Py<PyAny>, Kind)>,
    /// `torch.cuda.current_stream`.
    current_stream: Py<PyAny>,
}

/// torch's names, and what they are here. Others can be moved but not reduced.
const REDUCIBLE: [(&str, DType); 14] = [
    ("float32", DType::F32),
    ("float64", DType::F64),
    ("float16", DType::F16),
    ("bfloat16", DType::Bf16),
    ("int8", DType::I8),
    ("uint8", DType::U8),
    ("int32", DType::I32),
    ("int64", DType::I64),
    ("uint32", DType::U32),
    ("uint64", DType::U64),
    ("int16", DType::I16),
    ("uint16", DType::U16),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
];

fn torch<'py>(py: Python<'py>) -> PyResult<Option<&'py Torch>> {
    static TORCH: PyOnceLock<Torch> = PyOnceLock::new();
    if let Some(torch) = TORCH.get(py) {
        return Ok(Some(torch));
    }
    let modules = py.import("sys")?.getattr("modules")?;
    let Ok(module) = modules.get_item("torch") else { return Ok(None) };
    // torch is only half imported, so this object cannot be a tensor yet.
    let Ok(tensor) = module.getattr("Tensor") else { return Ok(None) };
    let mut dtypes = vec![(module.getattr("bool")?.unbind(), Kind::Bool)];
    for (name, dtype) in REDUCIBLE {
        // Newer versions have more.
        if let Ok(object) = module.getattr(PyString::new(py, name)) {
            dtypes.push((object.unbind(), Kind::Number(dtype)));
        }
    }
    let found = Torch {
        tensor: tensor.unbind(),
        strided: module.getattr("strided")?.unbind(),
        dtypes,
        current_stream: module.getattr("cuda")?.getattr("current_stream")?.unbind(),
    };
    Ok(Some(TORCH.get_or_init(py, || found)))
}

/// The memory of a tensor; `None` for anything else.
pub(super) fn memory(object: &Bound<'_, PyAny>) -> PyResult<Option<Memory>> {
    let py = object.py();
    let Some(torch) = torch(py)? else { return Ok(None) };
    if !object.is_instance(torch.tensor.bind(py))? {
        return Ok(None);
    }
    let layout = object.getattr(intern!(py, "layout"))?;
    if !layout.is(&torch.strided) {
        return Err(PyTypeError::new_err(format!(
            "a tensor of layout {layout}, expected torch.strided: pass tensor.to_dense(), or its indices() and values()"
        )));
    }
    let dtype = object.getattr(intern!(py, "dtype"))?;
    let known = torch.dtypes.iter().find(|(known, _)| dtype.is(known)).map(|&(_, kind)| kind);
    let kind = match known {
        Some(kind) => kind,
        None => Kind::Opaque(object.call_method0(intern!(py, "element_size"))?.extract()?),
    };
    let is = |method| object.call_method0(method)?.is_truthy();
    // Bits by which torch reads the memory as other values than those that lie there, and tensors that are more than
    // their memory.
    if is(intern!(py, "is_neg"))? {
        return Err(PyTypeError::new_err("a tensor with torch's negative bit set: pass tensor.resolve_neg()"));
    }
    if matches!(kind, Kind::Opaque(_)) {
        if is(intern!(py, "is_conj"))? {
            return Err(PyTypeError::new_err("a tensor with torch's conjugate bit set: pass tensor.resolve_conj()"));
        }
        if object.getattr(intern!(py, "is_quantized"))?.is_truthy()? {
            return Err(PyTypeError::new_err(format!(
                "a quantized tensor of {dtype}, whose scale would stay behind: pass tensor.int_repr(), or tensor.dequantize()"
            )));
        }
    }
    if object.getattr(intern!(py, "is_nested"))?.is_truthy()? {
        return Err(PyTypeError::new_err(
            "a nested tensor, whose shapes would stay behind: pass its tensors one by one",
        ));
    }
    if !object.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        return Err(PyTypeError::new_err(format!(
            "a tensor of shape {} with strides {} is not contiguous: pass tensor.contiguous() and copy the result back",
            tuple(&object.getattr("shape")?)?,
            object.call_method0("stride")?
        )));
    }
    let device = if object.getattr(intern!(py, "is_cpu"))?.is_truthy()? {
        Device::Host
    } else {
        let device = object.getattr(intern!(py, "device"))?;
        if !object.getattr(intern!(py, "is_cuda"))?.is_truthy()? {
            return Err(PyTypeError::new_err(format!(
                "a tensor on device {device}, expected one of the CPU or of a CUDA device"
            )));
        }
        Device::Cuda(device.getattr(intern!(py, "index"))?.extract()?)
    };
    let at: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let count: usize = object.call_method0(intern!(py, "numel"))?.extract()?;
    if at == 0 && count > 0 {
        return Err(PyTypeError::new_err(format!(
            "a tensor ({}) of {count} elements without memory: a fake one, one that wraps others, or one whose storage was freed",
            type_name(object)
        )));
    }
    Ok(Some(Memory {
        at,
        count,
        kind,
        device,
        writable: true,
        stream: None,
        _keep: Keep::Object(object.clone().unbind()),
    }))
}

fn tuple(shape: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(shape.extract::<Vec<usize>>().map_or_else(|_| shape.to_string(), |dims| format!("{dims:?}")))
}

/// The handle of torch's current stream on a device; 0 (the device's default stream) without torch.
pub(crate) fn current_stream(py: Python<'_>, device: usize) -> PyResult<u64> {
    let Some(torch) = torch(py)? else { return Ok(0) };
    torch.current_stream.bind(py).call1((device,))?.getattr(intern!(py, "cuda_stream"))?.extract()
}
