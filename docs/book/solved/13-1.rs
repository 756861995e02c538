pub fn cross_entropy(outputs: &[f32], labels: &[u8], d_outputs: &mut [f32]) -> Classified {
    let batch = labels.len().max(1);
    let classes = (outputs.len() / batch).max(1);
    let mut total = Classified { loss: 0.0, correct: 0 };
    for ((row, d), &label) in outputs.chunks_exact(classes).zip(d_outputs.chunks_exact_mut(classes)).zip(labels) {
        let label = usize::from(label);
        let sum: f32 = row.iter().map(|v| v.exp()).sum();
        for (d, v) in d.iter_mut().zip(row) {
            *d = v.exp() / sum / batch as f32;
        }
        d[label] -= 1.0 / batch as f32;
        total.loss += f64::from(sum.ln() - row[label]) / batch as f64;
        total.correct += usize::from(row.iter().all(|v| *v <= row[label]));
    }
    total
}
