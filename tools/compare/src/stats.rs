//! Medians and geometric means.

/// The median; `None` without values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 { Some(upper) } else { Some((sorted[sorted.len() / 2 - 1] + upper) / 2.0) }
}

/// The geometric mean of positive values; `None` without values.
pub(crate) fn geometric_mean(values: &[f64]) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    Some((values.iter().map(|v| v.ln()).sum::<f64>() / values.len() as f64).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
    }

    #[test]
    fn a_ratio_and_its_inverse_cancel() {
        assert_eq!(geometric_mean(&[]), None);
        approx::assert_abs_diff_eq!(geometric_mean(&[4.0, 0.25]).unwrap(), 1.0, epsilon = 1e-12);
        approx::assert_abs_diff_eq!(geometric_mean(&[2.0, 8.0]).unwrap(), 4.0, epsilon = 1e-12);
    }
}
