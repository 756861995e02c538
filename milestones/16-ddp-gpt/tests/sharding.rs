//! R ranks with 1/R of the batch each give the losses of one rank with all of it, to f32 rounding.

use ddp_gpt::config::{Preset, TrainConfig};

use crate::common::{corpus, plan, run_ranks};

#[test]
fn any_number_of_ranks_gives_the_same_losses() {
    let corpus = corpus();
    for dropout in [0.0, 0.2] {
        let plan = plan(TrainConfig { steps: 12, dropout, ..Preset::Tiny.train() });
        let alone = run_ranks(1, &plan, &corpus).remove(0).0;
        assert_eq!(alone.len(), 13);
        for ranks in [2, 3, 4] {
            let results = run_ranks(ranks, &plan, &corpus);
            for (rank, (history, values)) in results.iter().enumerate() {
                assert_eq!(values, &results[0].1, "rank {rank} of {ranks} ended with other parameters than rank 0");
                for (a, b) in alone.iter().zip(history) {
                    let close = |x: Option<f64>, y: Option<f64>| match (x, y) {
                        (Some(x), Some(y)) => approx::abs_diff_eq!(x, y, epsilon = 2e-5),
                        (x, y) => x == y,
                    };
                    assert!(close(a.train, b.train) && close(a.validation, b.validation), "{ranks} ranks: {a:?} {b:?}");
                }
            }
        }
    }
}
