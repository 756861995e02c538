//! Linker arguments of the library: its soname, and that it stays loaded.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-tinynccl.so");
    // NCCL closes a plugin of a version before 11 without a call, while threads of ours still sleep in it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
