//! Real ranks over the library: processes that the program starts itself, over tcp and over shared memory.

use std::fs;
use std::path::Path;

use ddp_gpt::checkpoint::{self, Point};
use program_kit::testing;

fn train(folder: &Path, out: &str, args: &[&str]) -> Vec<Point> {
    let mut command = testing::program(env!("CARGO_BIN_EXE_ddp-gpt"));
    command.current_dir(folder).args(["--preset", "tiny", "--threads", "1", "--data", "text.txt"]);
    command.args(["--steps", "12", "--lr", "0.003", "--sample-chars", "10", "--out", out]).args(args);
    testing::output(&mut command);
    checkpoint::load(&folder.join(out).join("checkpoint.bin")).unwrap().header.history
}

#[test]
fn any_number_of_ranks_over_any_transport_gives_the_losses_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..600).map(|i| ["to be ", "or not ", "to sum\n"][(i * i + i / 5) % 3]).collect();
    fs::write(folder.path().join("text.txt"), text).unwrap();
    let alone = train(folder.path(), "1", &["--ranks", "1"]);
    assert_eq!(alone.len(), 12);
    // Buckets of 1 KiB: many all-reduces per step.
    for (ranks, transport, kib) in [("2", "tcp", "1"), ("2", "shm", "512"), ("3", "shm", "1"), ("4", "tcp", "512")] {
        let args = ["--ranks", ranks, "--transport", transport, "--bucket-kib", kib];
        let history = train(folder.path(), &format!("{ranks}{transport}"), &args);
        assert_eq!(history.len(), alone.len());
        for (a, b) in alone.iter().zip(&history) {
            let close = approx::abs_diff_eq!(a.train.unwrap(), b.train.unwrap(), epsilon = 2e-5);
            assert!(close, "{args:?}: {a:?} {b:?}");
        }
    }
}
