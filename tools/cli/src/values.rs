//! Values on the command line: collectives and sizes.

use tinynccl::wire::Collective;

/// Names with hyphens, as on a command line, or with underscores.
pub(crate) fn collective(name: &str) -> Result<Collective, String> {
    let wanted = name.replace('-', "_");
    let mut known = Collective::ALL.into_iter().filter(|&c| c != Collective::SendRecv);
    known.clone().find(|c| c.name() == wanted).ok_or_else(|| {
        let names: Vec<String> = known.by_ref().map(|c| c.name().replace('_', "-")).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// 512, 4K, 1M, 2G.
pub(crate) fn size(text: &str) -> Result<usize, String> {
    let unit = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match &text[unit..] {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        _ => return Err("expected bytes, like 8, 4K, 1M or 1G".to_owned()),
    };
    let number: usize = text[..unit].parse().map_err(|_| "expected bytes, like 8, 4K, 1M or 1G".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!(collective("all-reduce"), Ok(Collective::AllReduce));
        assert_eq!(collective("all_to_all"), Ok(Collective::AllToAll));
        assert!(collective("allreduce").unwrap_err().contains("all-reduce, "));
    }

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(size("8"), Ok(8));
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("1G"), Ok(1 << 30));
        for wrong in ["", "K", "1T", "-1", "1.5M", "99999999999G"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
