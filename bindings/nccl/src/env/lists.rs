//! `NCCL_ALGO` and `NCCL_PROTO`: lists of names, for all functions and for single ones, as NCCL reads them.
//!
//! ```text
//! ring,tree;allreduce:^tree;broadcast:ring
//! ```
//! A text before a colon is a function; without one the list is for all of them, and must be the first. `^` in front
//! takes all names but those of the list.

/// NCCL's functions, as it names them.
const FUNCTIONS: [&str; 5] = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"];
/// NCCL's algorithms and protocols.
pub(crate) const ALGORITHMS: [&str; 7] = ["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"];
pub(crate) const PROTOCOLS: [&str; 3] = ["LL", "LL128", "Simple"];

/// The names that are allowed for each function, a bit each; `None` for a function that no list is for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Allowed([Option<u32>; FUNCTIONS.len()]);

impl Allowed {
    /// Returns the names that every function may take; `names` are those that the list was parsed with.
    pub(crate) fn everywhere(&self, names: &[&'static str]) -> Vec<&'static str> {
        let common = self.0.iter().flatten().fold(u32::MAX, |common, one| common & one);
        names.iter().enumerate().filter(|(i, _)| common >> i & 1 == 1).map(|(_, name)| *name).collect()
    }

    /// Returns true if functions may take different names.
    pub(crate) fn differ(&self) -> bool {
        self.0.iter().any(|one| *one != self.0[0])
    }
}

/// Reads a list of these names.
///
/// # Errors
/// Text of what NCCL does not understand.
pub(crate) fn parse(text: &str, names: &[&str]) -> Result<Allowed, String> {
    let mut allowed = [None; FUNCTIONS.len()];
    for (index, part) in text.split(';').filter(|part| !part.is_empty()).enumerate() {
        let mut halves = part.split(':').filter(|half| !half.is_empty());
        let (function, list) = match (halves.next(), halves.next()) {
            (Some(function), Some(list)) => (Some(function), list),
            (Some(list), None) if index == 0 => (None, list),
            (None, _) => continue,
            _ => return Err(format!("{part:?} names no function: only the first list can be for all of them")),
        };
        let (list, but) = list.strip_prefix('^').map_or((list, false), |list| (list, true));
        let mut bits = 0u32;
        for one in list.split(',').filter(|one| !one.is_empty()) {
            let found = names.iter().position(|name| name.eq_ignore_ascii_case(one));
            bits |= 1 << found.ok_or_else(|| format!("{one:?} is none of {}", names.join(", ")))?;
        }
        let bits = if but { !bits & ((1 << names.len()) - 1) } else { bits };
        match function {
            None => allowed = [Some(bits); FUNCTIONS.len()],
            Some(function) => {
                let found = FUNCTIONS.iter().position(|name| name.eq_ignore_ascii_case(function));
                let found = found.ok_or_else(|| format!("{function:?} is none of {}", FUNCTIONS.join(", ")))?;
                allowed[found] = Some(bits);
            }
        }
    }
    Ok(Allowed(allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> [Option<u32>; 5] {
        parse(text, &PROTOCOLS).unwrap().0
    }

    /// Bits: LL 1, LL128 2, Simple 4.
    #[test]
    fn lists_are_for_all_functions_or_for_one() {
        assert_eq!(of("LL,simple"), [Some(5); 5]);
        assert_eq!(of("^LL128"), [Some(5); 5]);
        assert_eq!(of("^LL,Simple;BROADCAST:Simple"), [Some(4), Some(2), Some(2), Some(2), Some(2)]);
        assert_eq!(of("broadcast:^Simple;reduce:Simple,LL"), [Some(3), Some(5), None, None, None]);
        assert_eq!(of("^LL128;allreduce:LL128"), [Some(5), Some(5), Some(5), Some(5), Some(2)]);
        assert_eq!((of(""), of(";;"), of("LL;")), ([None; 5], [None; 5], [Some(1); 5]));
        for wrong in
            ["allreduce:LL128;LL,Simple", "LL64", "scan:LL", "LL;allreduce", "LL Simple", "^foo", "allreduce:ring"]
        {
            assert!(parse(wrong, &PROTOCOLS).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_all_functions_may_take_is_found() {
        let of = |text: &str| parse(text, &ALGORITHMS).unwrap();
        let names = |text: &str| of(text).everywhere(&ALGORITHMS);
        assert_eq!((names("Tree,ring"), names("allreduce:tree")), (vec!["Tree", "Ring"], vec!["Tree"]));
        assert_eq!((names("^tree,nvls").len(), names("tree;allreduce:ring").len(), names("").len()), (5, 0, 7));
        assert!(of("allreduce:tree").differ() && !of("^tree").differ() && !of("").differ());
    }
}
