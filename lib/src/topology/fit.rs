//! Alpha and beta from measured messages.

use super::cost::LinkCost;

/// Bounds on what a link can cost: 1 ns to 1 s per message, 1000 GB/s to 1 kB/s.
const ALPHA: (f64, f64) = (1.0, 1e9);
const BETA: (f64, f64) = (1e-3, 1e6);

/// Fits `alpha + beta·bytes` to samples of (bytes of a message, its time in nanoseconds).
///
/// Least squares of the *relative* error, since sizes and times span decades; the median of the samples of one size
/// counts, so that a descheduled measurement does not. Times that are not positive and finite are ignored.
/// The result is always usable: figures are clamped to what a link can be, and rounded to 6 digits, so that they
/// survive JSON. Without any sample they are those of [`CostModel::tcp`](super::CostModel::tcp).
pub fn fit(samples: &[(usize, f64)]) -> LinkCost {
    let points = medians(samples);
    let (alpha, beta) = match points.as_slice() {
        [] => return super::CostModel::tcp().link,
        // One size cannot tell the two apart: half of the time each.
        [(0, ns)] => (*ns, 0.0),
        [(bytes, ns)] => (ns / 2.0, ns / 2.0 / *bytes as f64),
        _ => line(&points),
    };
    LinkCost {
        alpha_ns: six_digits(alpha.clamp(ALPHA.0, ALPHA.1)),
        beta_ns_per_byte: six_digits(beta.clamp(BETA.0, BETA.1)),
    }
}

/// One point per size, sorted.
fn medians(samples: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let mut sorted: Vec<(usize, f64)> = samples.iter().copied().filter(|(_, ns)| ns.is_finite() && *ns > 0.0).collect();
    sorted.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    sorted.chunk_by(|a, b| a.0 == b.0).filter_map(|same| same.get(same.len() / 2).copied()).collect()
}

/// Minimises the sum of ((alpha + beta·x - y) / y)².
fn line(points: &[(usize, f64)]) -> (f64, f64) {
    let (mut w, mut wx, mut wy, mut wxx, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for &(bytes, y) in points {
        let (x, weight) = (bytes as f64, 1.0 / (y * y));
        w += weight;
        wx += weight * x;
        wy += weight * y;
        wxx += weight * x * x;
        wxy += weight * x * y;
    }
    let beta = (w * wxy - wx * wy) / (w * wxx - wx * wx);
    let beta = if beta.is_finite() { beta.max(0.0) } else { 0.0 };
    let alpha = (wy - beta * wx) / w;
    if alpha.is_finite() && alpha > 0.0 {
        return (alpha, beta);
    }
    // A line through the origin or below: the smallest message cannot take less than it took.
    let alpha = points.first().map_or(0.0, |p| p.1);
    (alpha, if wxx > 0.0 { (wxy / wxx).max(0.0) } else { 0.0 })
}

fn six_digits(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::CostModel;
    use super::*;

    #[test]
    fn exact_samples_give_the_line_back() {
        let samples: Vec<_> = [8usize, 1024, 65536, 1 << 20].map(|b| (b, 120.0 + 0.125 * b as f64)).to_vec();
        assert_eq!(fit(&samples), LinkCost { alpha_ns: 120.0, beta_ns_per_byte: 0.125 });
    }

    #[test]
    fn a_descheduled_measurement_does_not_count() {
        let mut samples = vec![];
        for bytes in [8usize, 4096, 1 << 20] {
            let ns = 100.0 + 0.1 * bytes as f64;
            samples.extend([(bytes, ns * 1.01), (bytes, ns), (bytes, 4e6), (bytes, ns * 0.99), (bytes, f64::NAN)]);
        }
        let cost = fit(&samples);
        assert!((95.0..105.0).contains(&cost.alpha_ns), "{cost:?}");
        assert!((0.095..0.105).contains(&cost.beta_ns_per_byte), "{cost:?}");
    }

    #[test]
    fn too_little_to_go_by() {
        assert_eq!(fit(&[]), CostModel::tcp().link);
        assert_eq!(fit(&[(8, -1.0), (8, f64::INFINITY)]), CostModel::tcp().link);
        assert_eq!(fit(&[(0, 50.0)]).alpha_ns, 50.0);
        assert_eq!(fit(&[(100, 50.0)]), LinkCost { alpha_ns: 25.0, beta_ns_per_byte: 0.25 });
    }

    proptest! {
        #[test]
        fn garbage_gives_sane_figures_that_survive_json(
            samples in proptest::collection::vec((any::<usize>(), any::<f64>()), 0..20),
            plain in proptest::collection::vec((0usize..1 << 24, 0.0f64..1e9), 0..20),
        ) {
            for samples in [samples, plain] {
                let cost = fit(&samples);
                prop_assert!((ALPHA.0..=ALPHA.1).contains(&cost.alpha_ns), "{:?}", cost);
                prop_assert!((BETA.0..=BETA.1).contains(&cost.beta_ns_per_byte), "{:?}", cost);
                let model = CostModel::with_link(cost);
                prop_assert_eq!(CostModel::from_json(&model.to_json()).unwrap(), model);
            }
        }
    }
}
