//! The loss of a classification: the mean over the batch, and its derivative with respect to each output.

use course_kit::train::loss::Classified;

/// Softmax and cross entropy of `outputs` (one row per label); writes the derivative of the mean into `d_outputs`.
// EXERCISE 1 (How it works): per sample the softmax of its outputs, without overflow; the mean loss -ln p(label); its
// derivative, (p - 1 at the label) / batch; and the number of right answers.
pub(crate) fn cross_entropy(outputs: &[f32], labels: &[u8], d_outputs: &mut [f32]) -> Classified {
    let batch = labels.len().max(1);
    let classes = (outputs.len() / batch).max(1);
    let mut total = Classified { loss: 0.0, correct: 0 };
    for ((row, d), &label) in outputs.chunks_exact(classes).zip(d_outputs.chunks_exact_mut(classes)).zip(labels) {
        let label = usize::from(label);
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = row.iter().map(|v| (v - largest).exp()).sum();
        for (d, v) in d.iter_mut().zip(row) {
            *d = (v - largest).exp() / sum / batch as f32;
        }
        d[label] -= 1.0 / batch as f32;
        total.loss += f64::from(sum.ln() - (row[label] - largest)) / batch as f64;
        total.correct += usize::from(row.iter().all(|v| *v <= row[label]));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_outputs_cost_ln_of_the_classes() {
        let got = cross_entropy(&[0.0; 6], &[0, 2], &mut [0.0; 6]);
        approx::assert_relative_eq!(got.loss, 3f64.ln(), epsilon = 1e-6);
    }

    #[test]
    fn large_outputs_do_not_overflow() {
        let mut d = [0.0; 3];
        let got = cross_entropy(&[1e4, 0.0, -1e4], &[0], &mut d);
        assert_eq!((got.loss, got.correct), (0.0, 1));
        assert!(d.iter().all(|v| v.is_finite()));
    }
}
