//! CUDA C to machine code: NVRTC at run time, its result kept in the user's cache.

use std::fs;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts, sys};
use sha2::{Digest, Sha256};

use tinynccl_plan::error::{Error, Result};

/// NVRTC's version, or the error that it is missing.
pub(crate) fn version() -> Result<(i32, i32)> {
    // SAFETY: only tries to load the library.
    if !unsafe { sys::is_culib_present() } {
        return Err(Error::Unsupported {
            what: "NVRTC, the run-time compiler of CUDA C,".to_owned(),
            detail: "neither libnvrtc.so nor libnvrtc.so.12 was found: install it (Debian: libnvrtc12 or nvidia-cuda-toolkit; \
                     pip: nvidia-cuda-nvrtc-cu12) and put its folder into LD_LIBRARY_PATH; a later version is taken under the name \
                     libnvrtc.so"
                .to_owned(),
        });
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes to the two places.
    match unsafe { sys::nvrtcVersion(&mut major, &mut minor) } {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok((major, minor)),
        other => Err(Error::invalid("compiling kernels", format!("NVRTC does not report its version: {other:?}"))),
    }
}

/// PTX of CUDA C for devices of a compute capability, from the user's cache if it was compiled before. `name` stands
/// for a file's in the compiler's messages; `defines` are options such as `-DN=4`. Needs no GPU.
///
/// # Errors [`Error::Unsupported`] where NVRTC is not found; [`Error::InvalidArgument`] with the compiler's message.
pub fn compile(name: &str, source: &str, defines: &[String], capability: (i32, i32)) -> Result<Ptx> {
    let (major, minor) = version()?;
    let mut options = vec![
        format!("--gpu-architecture=compute_{}{}", capability.0, capability.1),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
    ];
    options.extend_from_slice(defines);
    let place = cache(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))
        .map(|folder| folder.join(format!("{}.ptx", key(source, &options, (major, minor)))));
    if let Some(text) = place.as_deref().and_then(read) {
        return Ok(Ptx::from_src(text));
    }
    let begin = std::time::Instant::now();
    let compiled = CompileOptions { options, name: Some(name.to_owned()), ..CompileOptions::default() };
    let ptx = compile_ptx_with_opts(source, compiled).map_err(|error| match error {
        // The compiler's own message: file, line, expected token.
        CompileError::CompileError { log, .. } => {
            Error::invalid("compiling kernels", format!("NVRTC {major}.{minor}: {}", log.to_string_lossy().trim_end()))
        }
        other => Error::invalid("compiling kernels", format!("NVRTC {major}.{minor}: {other:?}")),
    })?;
    let text = ptx.to_src();
    log::debug!("{name}: compiled in {:.0} ms", begin.elapsed().as_secs_f64() * 1e3);
    if let Some(place) = place
        && let Err(error) = write(&place, &text)
    {
        log::warn!(
            "compiled kernels cannot be kept at {}: {error}; they are compiled again next time",
            place.display()
        );
    }
    Ok(Ptx::from_src(text))
}

fn key(source: &str, options: &[String], version: (i32, i32)) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{version:?} {options:?} "));
    hash.update(source);
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn cache(xdg: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Option<PathBuf> {
    let absolute = |value: Option<std::ffi::OsString>| value.map(PathBuf::from).filter(|path| path.is_absolute());
    Some(absolute(xdg).or_else(|| absolute(home).map(|home| home.join(".cache")))?.join("tinynccl").join("kernels"))
}

/// A whole file that begins as PTX does; anything else is compiled again.
fn read(place: &Path) -> Option<String> {
    fs::read_to_string(place).ok().filter(|text| text.contains(".version") && text.trim_end().ends_with('}'))
}

/// Atomic, even if other processes write the same file.
fn write(place: &Path, text: &str) -> std::io::Result<()> {
    let folder = place.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let temporary = folder.join(format!(".{}.{:?}", std::process::id(), std::thread::current().id()));
    fs::write(&temporary, text)?;
    fs::rename(&temporary, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_depends_on_everything() {
        let options = ["-DA=1".to_owned()];
        let key = |source, options: &[String], version| super::key(source, options, version);
        let one = key("a", &options, (12, 0));
        assert_eq!(one, key("a", &options, (12, 0)));
        assert_eq!(one.len(), 32);
        for other in [key("b", &options, (12, 0)), key("a", &[], (12, 0)), key("a", &options, (12, 1))] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn the_cache_is_the_users() {
        let os = |s: &str| Some(std::ffi::OsString::from(s));
        assert_eq!(cache(os("/x"), os("/h")), Some(PathBuf::from("/x/tinynccl/kernels")));
        assert_eq!(cache(os("x"), os("/h")), Some(PathBuf::from("/h/.cache/tinynccl/kernels")));
        assert_eq!(cache(None, None), None);
    }

    #[test]
    fn without_nvrtc_it_says_what_to_install() {
        match version() {
            Ok(_) => eprintln!("SKIPPED without_nvrtc_it_says_what_to_install: NVRTC is here"),
            Err(error) => {
                let error = error.to_string();
                assert!(
                    error.starts_with("NVRTC, the run-time compiler of CUDA C, is not available here: "),
                    "{error}"
                );
                assert!(error.contains("LD_LIBRARY_PATH") && error.lines().count() == 1, "{error}");
            }
        }
    }

    #[test]
    fn half_a_file_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("a").join("b.ptx");
        assert_eq!(read(&place), None);
        write(&place, ".version 8.0\n{\n}\n").unwrap();
        assert!(read(&place).is_some());
        write(&place, ".version 8.0\n{\n").unwrap();
        assert_eq!(read(&place), None);
    }
}
