//! Losses: the mean over the batch, and its derivative with respect to each output.

/// Cross entropy of a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Classified {
    /// Mean over the batch of -ln(probability of the right class).
    pub loss: f64,
    /// Samples whose largest output is the right class.
    pub correct: usize,
}

/// Softmax and cross entropy of `outputs` (one row per label); writes the derivative of the mean into `d_outputs`.
pub fn cross_entropy(outputs: &[f32], labels: &[u8], d_outputs: &mut [f32]) -> Classified {
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

/// Mean of the squared differences; writes its derivative into `d_outputs`.
pub fn mean_squared_error(outputs: &[f32], targets: &[f32], d_outputs: &mut [f32]) -> f64 {
    let n = targets.len().max(1) as f32;
    let mut sum = 0.0;
    for ((d, y), t) in d_outputs.iter_mut().zip(outputs).zip(targets) {
        *d = 2.0 * (y - t) / n;
        sum += f64::from(y - t) * f64::from(y - t);
    }
    sum / f64::from(n)
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
    fn squared_error_is_a_mean() {
        let mut d = [0.0; 2];
        assert_eq!(mean_squared_error(&[1.0, 3.0], &[0.0, 0.0], &mut d), 5.0);
        assert_eq!(d, [1.0, 3.0]);
    }
}
