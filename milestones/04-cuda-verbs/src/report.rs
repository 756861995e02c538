//! The report: the available hardware, the chosen path, and the reasons against the others.

use crate::probe::{Line, Stage};
use crate::why::Why;

/// The lines of the report about buffer and wire. Without GPU and RDMA, the first line says so.
pub fn here(buffer: &str, no_gpu: Option<&Why>, wire: Result<&str, &Why>) -> Vec<String> {
    let mut text = Vec::new();
    if no_gpu.is_some() && wire.is_err() {
        text.push(
            "no GPU and no RDMA here: host memory over TCP shows the pipeline, and nothing about GPUDirect".to_owned(),
        );
    }
    text.push(format!("buffer: {buffer}"));
    text.extend(no_gpu.into_iter().flat_map(indented));
    match wire {
        Ok(wire) => text.push(format!("wire: {wire}")),
        Err(why) => {
            text.push("wire: TCP".to_owned());
            text.extend(indented(why));
        }
    }
    text
}

fn indented(Why { reason, next }: &Why) -> [String; 2] {
    [format!("    why:  {reason}"), format!("    next: {next}")]
}

/// The lines of the report about the stages.
pub fn stages(lines: &[Line]) -> Vec<String> {
    let mut text = Vec::new();
    for (number, line) in (1..).zip(lines) {
        let stage = line.stage;
        match &line.outcome {
            None => text.push(format!("{number} {stage}: not tried")),
            Some(Ok(how)) => text.push(format!("{number} {stage}: TAKEN: {how}")),
            Some(Err(why)) => {
                text.push(format!("{number} {stage}: not taken"));
                text.extend(indented(why));
            }
        }
    }
    text
}

/// The reason why the only allowed stage was not taken.
pub fn refused(lines: &[Line], stage: Stage) -> Why {
    let outcome = lines.iter().find(|line| line.stage == stage).and_then(|line| line.outcome.as_ref());
    match outcome {
        Some(Err(why)) => Why::new(format!("{stage} (--path) does not work here: {}", why.reason), why.next.clone()),
        _ => Why::new(format!("{stage} (--path) was not tried"), "leave out --path"),
    }
}

/// Bytes per second, for display: `1.23 GB/s`.
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
    fn what_is_missing_is_said_first() {
        let why = Why::new("none", "get one");
        assert_eq!(here("1 byte", None, Ok("RDMA")), ["buffer: 1 byte", "wire: RDMA"]);
        assert_eq!(here("1 byte", Some(&why), Ok("RDMA"))[..2], ["buffer: 1 byte", "    why:  none"]);
        assert_eq!(here("1 byte", None, Err(&why))[1..], ["wire: TCP", "    why:  none", "    next: get one"]);
        let neither = here("1 byte", Some(&why), Err(&why));
        assert!(neither[0].starts_with("no GPU and no RDMA here") && neither.len() == 7, "{neither:?}");
    }

    #[test]
    fn rates() {
        assert_eq!(rate(2_000_000_000, 0.5), "4.00 GB/s");
        assert_eq!(rate(1_000_000, 0.1), "10.0 MB/s");
    }
}
