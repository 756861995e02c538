//! GPUs, their driver, and the libraries of CUDA, as the library itself finds them.

use serde::Serialize;
use tinynccl::Error;
use tinynccl::cuda::{inventory, nvrtc};

/// CUDA on this machine; each part, or why it is not there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Cuda {
    /// Version and file of libcuda.
    pub(crate) driver: Result<String, String>,
    pub(crate) gpus: Vec<Gpu>,
    /// Version and file of the run-time compiler.
    pub(crate) nvrtc: Result<String, String>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Gpu {
    pub(crate) name: String,
    pub(crate) capability: (i32, i32),
    /// Bytes.
    pub(crate) memory: usize,
    /// The GPUs whose memory it reaches.
    pub(crate) peers: Vec<usize>,
}

impl Cuda {
    pub(crate) fn ask() -> Cuda {
        let (driver, gpus) = match inventory() {
            Ok(found) => {
                let gpu = |gpu: tinynccl::cuda::Gpu| Gpu {
                    name: gpu.name,
                    capability: gpu.capability,
                    memory: gpu.memory,
                    peers: gpu.peers,
                };
                let driver = format!("CUDA {}.{}{}", found.driver.0, found.driver.1, place("libcuda.so"));
                (Ok(driver), found.gpus.into_iter().map(gpu).collect())
            }
            Err(error) => (Err(why(error)), Vec::new()),
        };
        let nvrtc = nvrtc().map(|(major, minor)| format!("{major}.{minor}{}", place("libnvrtc.so")));
        Cuda { driver, gpus, nvrtc: nvrtc.map_err(why) }
    }

    /// Kernels can be compiled and run.
    pub(crate) fn runs_kernels(&self) -> bool {
        !self.gpus.is_empty() && self.nvrtc.is_ok()
    }

    /// GPUs that reach each other's memory.
    pub(crate) fn pairs(&self) -> usize {
        let both = |(a, gpu): (usize, &Gpu)| gpu.peers.iter().filter(|&&b| b > a && self.reaches(b, a)).count();
        self.gpus.iter().enumerate().map(both).sum()
    }

    fn reaches(&self, from: usize, to: usize) -> bool {
        self.gpus.get(from).is_some_and(|gpu| gpu.peers.contains(&to))
    }
}

/// The missing part, without the rest of the error.
fn why(error: Error) -> String {
    match error {
        Error::Unsupported { detail, .. } => detail,
        other => other.to_string(),
    }
}

/// The path of a loaded library: ` (/usr/lib/…)`.
fn place(name: &str) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    file(&maps, name).map_or(String::new(), |path| format!(" ({path})"))
}

/// The file of a mapping whose name begins with `name`.
fn file<'a>(maps: &'a str, name: &str) -> Option<&'a str> {
    maps.lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)))
        .find(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_library() {
        let maps = "7f00-7f01 r--p 00000000 08:01 12   /usr/lib/libc.so.6\n\
                    7f02-7f03 r-xp 00000000 08:01 13   /opt/my libs/libcuda.so.550.54\n7f04-7f05 rw-p 0 00:00 0 [heap]\n";
        assert_eq!(file(maps, "libcuda.so"), Some("/opt/my libs/libcuda.so.550.54"));
        assert_eq!(file(maps, "libnvrtc.so"), None);
    }

    #[test]
    fn a_pair_reaches_both_ways() {
        let gpu = |peers: &[usize]| Gpu { name: "x".into(), capability: (9, 0), memory: 1, peers: peers.to_vec() };
        let of = |gpus: Vec<Gpu>| Cuda { driver: Ok("x".into()), gpus, nvrtc: Ok("x".into()) };
        assert_eq!(of(vec![gpu(&[1, 2]), gpu(&[0]), gpu(&[])]).pairs(), 1, "GPU 2 does not reach GPU 0");
        assert_eq!(of(vec![gpu(&[1]), gpu(&[0])]).pairs(), 1);
        assert_eq!(of(Vec::new()).pairs(), 0);
    }
}
