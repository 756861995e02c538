//! Makes symbols with versions.
//!
//! Such a symbol is made by the assembler (`.symver`): a jump to the function, as the linker takes a version
//! for names of its own file alone. The versions are declared in `versions.map`. This needs lld, which Rust uses by
//! default on x86-64 Linux from 1.90 on; GNU ld does not take two version scripts, and rustc gives one already.

/// A symbol that jumps: `@@` with the version that programs are linked to today, `@` with an older one.
macro_rules! symbol {
    ($label:literal, $name:ident, $at:literal, $version:literal, $jump:tt, $($operand:tt)*) => {
        global_asm!(
            ".pushsection .text",
            concat!(".globl ", $label, stringify!($name)),
            concat!(".type ", $label, stringify!($name), ",@function"),
            concat!($label, stringify!($name), ":"),
            $jump!(),
            concat!(".symver ", $label, stringify!($name), ",", stringify!($name), $at, $version),
            ".popsection",
            $($operand)*
        );
    };
}

#[cfg(target_arch = "x86_64")]
macro_rules! to_function {
    () => {
        "jmp {function}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! to_function {
    () => {
        "b {function}"
    };
}
#[cfg(target_arch = "x86_64")]
macro_rules! through_slot {
    () => {
        "jmp *{slot}(%rip)"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! through_slot {
    () => {
        "adrp x16, {slot}\nldr x16, [x16, :lo12:{slot}]\nbr x16"
    };
}
