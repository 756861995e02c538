//! The folder of the built library.

use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// A folder that holds the stand-in under the names by which programs open CUDA's driver, for a process's
/// `LD_LIBRARY_PATH`. The library lies where cargo put it: beside a test program, or one folder above.
///
/// # Errors
/// [`ErrorKind::NotFound`] where the library was not built: add this package to the dependencies of the tests.
pub fn folder() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let near: Vec<&Path> = program.ancestors().skip(1).take(2).collect();
    let places =
        near.iter().flat_map(|folder| [folder.join("libcuda_standin.so"), folder.join("deps/libcuda_standin.so")]);
    let Some(library) = places.into_iter().find(|place| place.is_file()) else {
        let text = format!("no libcuda_standin.so near {}: is cuda-standin among the dependencies?", program.display());
        return Err(Error::new(ErrorKind::NotFound, text));
    };
    let folder = library.with_file_name("cuda-standin");
    std::fs::create_dir_all(&folder)?;
    for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
        // Other processes may be at the same. Relative, as build folders are moved.
        match std::os::unix::fs::symlink("../libcuda_standin.so", folder.join(name)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(folder)
}
