//! The report: what is here, which way was taken, and why the others were not.

use crate::probe::{Line, Stage};
use crate::why::Why;

/// The lines of the report about the stages.
pub fn stages(lines: &[Line]) -> Vec<String> {
    let mut text = Vec::new();
    for (number, line) in (1..).zip(lines) {
        let stage = line.stage;
        match &line.outcome {
            None => text.push(format!("{number} {stage}: not tried")),
            Some(Ok(how)) => text.push(format!("{number} {stage}: TAKEN: {how}")),
            Some(Err(Why { reason, next })) => {
                text.push(format!("{number} {stage}: not taken"));
                text.push(format!("    why:  {reason}"));
                text.push(format!("    next: {next}"));
            }
        }
    }
    text
}

/// The reason why the only stage that was allowed is not taken.
pub fn refused(lines: &[Line], stage: Stage) -> Why {
    let outcome = lines.iter().find(|line| line.stage == stage).and_then(|line| line.outcome.as_ref());
    match outcome {
        Some(Err(why)) => Why::new(format!("{stage} (--path) does not work here: {}", why.reason), why.next.clone()),
        _ => Why::new(format!("{stage} (--path) was not tried"), "leave out --path"),
    }
}

/// Bytes per second, for people: `1.23 GB/s`.
pub fn rate(bytes: usize, seconds: f64) -> String {
    let rate = bytes as f64 / seconds.max(1e-9);
    if rate >= 1e9 { format!("{:.2} GB/s", rate / 1e9) } else { format!("{:.1} MB/s", rate / 1e6) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_has_its_line_and_a_reason() {
        let lines = [
            Line { stage: Stage::Dmabuf, outcome: Some(Err(Why::new("no dmabuf", "make one"))) },
            Line { stage: Stage::PeerMemory, outcome: None },
            Line { stage: Stage::Staging, outcome: Some(Ok("2 slots".to_owned())) },
        ];
        let expected = [
            "1 dmabuf: not taken",
            "    why:  no dmabuf",
            "    next: make one",
            "2 peer memory: not tried",
            "3 staging: TAKEN: 2 slots",
        ];
        assert_eq!(stages(&lines), expected);
        assert_eq!(
            refused(&lines, Stage::Dmabuf).to_string(),
            "dmabuf (--path) does not work here: no dmabuf; make one"
        );
    }

    #[test]
    fn rates() {
        assert_eq!(rate(2_000_000_000, 0.5), "4.00 GB/s");
        assert_eq!(rate(1_000_000, 0.1), "10.0 MB/s");
    }
}
