//! The command `schedule`, as a process.

use program_kit::testing;

#[test]
fn numbers_of_ranks_that_no_schedule_has() {
    let refused = |ranks: &str, code, words: &[&str]| {
        let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
        testing::refused(command.args(["schedule", "all-reduce", "ring", "--ranks", ranks]), code, words);
    };
    refused("0", 2, &["0 is not in 1..="]);
    refused("100000", 2, &["2200.0 GB in all", "tinynccl-cli simulate all-reduce --algo ring --ranks 100000"]);
}
