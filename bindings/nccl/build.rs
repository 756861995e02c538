//! Names the library as programs look for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The name that programs linked to NCCL have recorded: a library with it that is loaded first is taken for theirs.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
