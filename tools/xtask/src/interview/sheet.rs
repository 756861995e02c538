//! The questions as a page to print: questions first, answers behind them on separate pages.

use super::{Question, TOPICS, Whiteboard};

const STYLE: &str = "body{font:11pt/1.4 serif;max-width:45rem;margin:2rem auto;padding:0 1rem;color:#000;background:#fff}\
    h1,h2{font-family:sans-serif;line-height:1.2}h2{margin-top:1.6em;border-bottom:1px solid #888}li{margin:.5em 0;break-inside:avoid}\
    .level{color:#555;white-space:nowrap;font-size:.85em}code{font-size:.9em;overflow-wrap:anywhere}pre{white-space:pre-wrap;border:1px solid #aaa;padding:.5em}\
    table{border-collapse:collapse}td,th{border:1px solid #aaa;padding:.1em .5em}.answers{break-before:page}\
    @media print{body{margin:0;max-width:none}}";

/// The page.
pub fn sheet(questions: &[Question], tasks: &[Whiteboard]) -> String {
    let mut asked = String::new();
    let mut answered = String::new();
    let mut number = 0;
    for topic in TOPICS {
        let of_topic: Vec<&Question> = questions.iter().filter(|q| q.topic == topic).collect();
        if of_topic.is_empty() {
            continue;
        }
        for part in [&mut asked, &mut answered] {
            part.push_str(&format!("<h2>{topic}</h2>\n<ol start=\"{}\">\n", number + 1));
        }
        for q in of_topic {
            number += 1;
            let text = inline(&q.text);
            let then = |words: &str| format!("Then: {}", inline(words));
            let (next, its_answer) = q.follow_up.as_ref().map_or_else(Default::default, |(next, answer)| {
                (format!("<br>{}", then(next)), format!("<p>{}</p>", then(answer)))
            });
            let origin = format!("<span class=\"level\">level {}, {}</span>", q.level, q.step.folder());
            asked.push_str(&format!("<li>{text} {origin}{next}</li>\n"));
            answered.push_str(&format!("<li>{}{its_answer}</li>\n", blocks(&q.answer)));
        }
        for part in [&mut asked, &mut answered] {
            part.push_str("</ol>\n");
        }
        for task in tasks.iter().filter(|t| t.topic == topic) {
            let (text, command) = (blocks(&task.text), escape(&task.command));
            asked.push_str(&format!("<h3>Whiteboard</h3>\n{text}\n<pre>{command}</pre>\n"));
        }
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" \
         content=\"width=device-width\"><title>tinynccl: interview questions</title><style>{STYLE}</style></head><body>\n\
         <h1>Interview questions</h1>\n<p>{number} questions of the milestones' READMEs, by <code>cargo xtask interview --sheet</code>. Level 1 is \
         for those who name the topic, 2 for those who have worked with it, 3 for those who build it. Answers begin on a page of \
         their own.</p>\n{asked}<div class=\"answers\">\n<h1>Answers</h1>\n{answered}</div>\n</body></html>\n"
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Paragraphs and tables.
fn blocks(text: &str) -> String {
    let block = |text: &str| {
        if !text.starts_with('|') {
            return format!("<p>{}</p>", inline(text));
        }
        let cells = |line: &str| -> String {
            line.trim_matches('|').split('|').map(|cell| format!("<td>{}</td>", inline(cell.trim()))).collect()
        };
        let rows = text.lines().filter(|line| !line.starts_with("|--"));
        let rows: String = rows.map(|line| format!("<tr>{}</tr>", cells(line))).collect();
        format!("<table>{rows}</table>")
    };
    text.split("\n\n").map(|text| block(text.trim())).collect()
}

/// Code, emphasis, and links as their words. The READMEs write code and emphasis of questions as HTML.
fn inline(text: &str) -> String {
    let text = crate::readme::plain(text);
    let paired = |text: &str, mark: char, tag: &str| -> String {
        let parts: Vec<&str> = text.split(mark).collect();
        if parts.len().is_multiple_of(2) {
            return text.to_owned(); // a mark without its pair is a character
        }
        let tagged =
            |(i, part): (usize, &&str)| if i % 2 == 1 { format!("<{tag}>{part}</{tag}>") } else { (*part).to_owned() };
        parts.iter().enumerate().map(tagged).collect()
    };
    let mut out = String::new();
    let escaped = escape(&text);
    // Within code a star is a star.
    for (i, part) in escaped.split('`').enumerate() {
        out.push_str(&if i % 2 == 1 { format!("<code>{part}</code>") } else { paired(part, '*', "em") });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::course::checkout;
    use crate::learn::Learn;

    #[test]
    fn marks_become_tags_and_nothing_else_does() {
        assert_eq!(
            inline("*a* `x * y < z` 2 * 3 [w](u)"),
            "*a* <code>x * y &lt; z</code> 2 * 3 w".replace("*a*", "<em>a</em>")
        );
        assert_eq!(inline("Is <code>T&U</code>?"), "Is <code>T&amp;U</code>?");
        assert_eq!(
            blocks("One.\n\n| a | b |\n|---|---|\n| 1 | `2` |"),
            "<p>One.</p><table><tr><td>a</td><td>b</td></tr><tr><td>1</td><td><code>2</code></td></tr></table>"
        );
    }

    #[test]
    fn all_questions_stand_on_it_and_their_answers_behind_them() {
        let learn = Learn::new(&checkout(), "learn").unwrap();
        let (questions, tasks) = crate::interview::all(&learn).unwrap();
        let page = sheet(&questions, &tasks);
        let (asked, answered) = page.split_once("<div class=\"answers\">").unwrap();
        assert_eq!(asked.matches("<li>").count(), questions.len());
        assert_eq!(answered.matches("<li>").count(), questions.len());
        for task in &tasks {
            assert!(asked.contains(&escape(&task.command)), "{}", task.command);
        }
        for tag in ["li", "p", "em", "code", "ol", "table", "tr", "td", "div"] {
            let count = |text: &str| page.matches(text).count();
            let opened = count(&format!("<{tag}>")) + count(&format!("<{tag} "));
            assert_eq!(opened, count(&format!("</{tag}>")), "{tag}");
        }
    }
}
