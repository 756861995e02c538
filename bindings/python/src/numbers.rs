//! Numbers of ranks in the text of errors.

/// The text with each number of a rank (`rank 1`, `ranks 0, 2`) as `names` has it; a number without a name stays.
pub(crate) fn renumber(text: String, names: &[usize]) -> String {
    if names.iter().enumerate().all(|(rank, &name)| rank == name) {
        return text;
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text.as_str());
    while let Some(at) = rest.find("rank") {
        let (before, found) = rest.split_at(at + "rank".len());
        let whole_word = !before[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        out.push_str(before);
        rest = found;
        let Some(list) = rest.strip_prefix("s ").or_else(|| rest.strip_prefix(' ')).filter(|_| whole_word) else {
            continue;
        };
        out.push_str(&rest[..rest.len() - list.len()]);
        rest = numbers(list, names, &mut out);
    }
    out + rest
}

/// Appends the numbers with which `list` begins, as they are named; gives what follows them.
fn numbers<'a>(list: &'a str, names: &[usize], out: &mut String) -> &'a str {
    let mut rest = list;
    loop {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (digits, after) = rest.split_at(end);
        match digits.parse::<usize>().ok().and_then(|rank| names.get(rank)) {
            Some(name) => out.push_str(&name.to_string()),
            None => out.push_str(digits),
        }
        match after
            .strip_prefix(", ")
            .filter(|next| !digits.is_empty() && next.starts_with(|c: char| c.is_ascii_digit()))
        {
            Some(next) => {
                out.push_str(", ");
                rest = next;
            }
            None => return after,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::renumber;

    #[test]
    fn ranks_are_named_and_other_numbers_stay() {
        let named = |text: &str| renumber(text.to_owned(), &[2, 3, 7]);
        assert_eq!(named("recv: rank 1 lost rank 0 (1 B)"), "recv: rank 3 lost rank 2 (1 B)");
        assert_eq!(named("not arrived: ranks 0, 2; 1 more"), "not arrived: ranks 2, 7; 1 more");
        assert_eq!(named("rank 12 of 1, frank 1, rank"), "rank 12 of 1, frank 1, rank");
        assert_eq!(named("call #1, count 2"), "call #1, count 2");
        assert_eq!(renumber("rank 1".to_owned(), &[]), "rank 1");
    }
}
