//! What a registered buffer does not let one do, found by the compiler.
//!
//! After a change of the compiler's words: `TRYBUILD=overwrite cargo test -p tinynccl --test compile_fail`, and read the difference.

#[test]
fn registered_memory_cannot_be_freed_moved_or_shared_with_a_call() {
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
