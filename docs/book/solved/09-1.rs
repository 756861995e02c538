pub(crate) fn difference(ranks: usize, result: &[f32]) -> Option<String> {
    let off = |i: usize, x: f32| (x - expected(ranks, i)).abs() > 1e-6;
    let wrong: Vec<usize> = (0..result.len()).filter(|&i| off(i, result[i])).collect();
    let at = *wrong.first()?;
    let (value, right) = (result[at], expected(ranks, at));
    Some(format!(
        "{} of {} elements are wrong; element {at} is {value}, expected {right}",
        wrong.len(),
        result.len()
    ))
}
