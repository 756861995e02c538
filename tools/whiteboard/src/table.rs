//! Lines of words and numbers: compared with those that were computed, without giving away what is right.

/// Relative error up to which a fraction is right: a whiteboard has no calculator.
const CLOSE: f64 = 0.02;

/// Lists the errors in `lines`, where `ours` are right. Words are compared without regard to case, numbers with a
/// fraction to 2 %.
pub(crate) fn faults(ours: &[String], lines: &[&str]) -> Vec<String> {
    let mut faults = Vec::new();
    for (at, ours) in ours.iter().enumerate() {
        let expected: Vec<&str> = ours.split_whitespace().collect();
        let Some(line) = lines.get(at) else {
            faults.push(format!("line {} is missing: {} words were expected", at + 1, expected.len()));
            continue;
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.len() != expected.len() {
            let (got, expected) = (words.len(), expected.len());
            faults.push(format!("line {}, '{line}', has {got} words: {expected} were expected", at + 1));
            continue;
        }
        let wrong = words.iter().zip(&expected).filter(|(word, expected)| !same(word, expected));
        faults.extend(wrong.map(|(word, _)| format!("line {}, '{line}': not {word}", at + 1)));
    }
    if lines.len() > ours.len() {
        faults.push(format!("{} lines: {} were expected", lines.len(), ours.len()));
    }
    faults
}

fn same(word: &str, expected: &str) -> bool {
    let number = |text: &str| text.replace([',', '_'], "").parse::<f64>().ok().filter(|n| n.is_finite());
    match (number(word), number(expected)) {
        (Some(word), Some(whole)) if !expected.contains('.') => word == whole,
        (Some(word), Some(right)) => (word - right).abs() <= CLOSE * right.abs().max(1e-9),
        _ => word.eq_ignore_ascii_case(expected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_compared_and_not_given_away() {
        let ours = ["ring 8K 71.43".to_owned(), "next 82".to_owned()];
        assert_eq!(faults(&ours, &["Ring 8k 71", "next 82"]), [""; 0]);
        assert_eq!(
            faults(&ours, &["ring 8K 60", "next 82.5"]),
            ["line 1, 'ring 8K 60': not 60", "line 2, 'next 82.5': not 82.5"]
        );
        assert_eq!(
            faults(&ours, &["ring 8K"]),
            ["line 1, 'ring 8K', has 2 words: 3 were expected", "line 2 is missing: 2 words were expected"]
        );
        assert_eq!(faults(&ours, &["ring 8K 71.4", "next 82", "more"]), ["3 lines: 2 were expected"]);
        assert!(!faults(&["0.00".to_owned()], &["nan"]).is_empty() && faults(&["0.00".to_owned()], &["0"]).is_empty());
        assert!(faults(&["16,777,297".to_owned()], &["16777297"]).is_empty());
    }
}
