//! The built book in a real browser: every page as a desktop and as a phone shows it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::browser::{self, Browser};
use crate::links::pages;

/// Width, height, and whether it is a phone.
pub(crate) const SCREENS: [(u32, u32, bool); 2] = [(1280, 900, false), (390, 844, true)];
/// Height of a page's screenshots, small enough to read them.
const SLICE: f64 = 1560.0;
const SLICES: usize = 20;

/// Elements that overflow on the right, unless an ancestor scrolls. The body may hide the overflow, so its own width
/// does not reveal it.
const OVERFLOW: &str = "(() => {
    const wide = WIDTH, out = [];
    if (document.documentElement.scrollWidth > wide) out.push('document: ' + document.documentElement.scrollWidth);
    const within = e => { for (let p = e.parentElement; p && p !== document.body && p.tagName !== 'MAIN'; p = p.parentElement)
        if (getComputedStyle(p).overflowX !== 'visible') return true; return false; };
    for (const e of document.querySelectorAll('main *')) {
        const box = e.getBoundingClientRect();
        if (box.width > 0 && box.right > wide + 1 && !within(e))
            out.push(e.tagName + ' to ' + Math.round(box.right) + ': ' + e.textContent.trim().slice(0, 60));
    }
    return out.slice(0, 5);
})()";

/// Words that are hard to read, each with its contrast.
const CONTRAST: &str = include_str!("contrast.js");

/// Steps through an animation to its end.
const STEP: &str =
    "(() => { const b = document.getElementById('forward'); if (b) for (let i = 0; i < 40; i++) b.click(); })()";

/// Frames that are lower than their page, which then has its own scroll bar or is cut. They are loaded when they come
/// into view, and grow when their page has sent its height.
const CUT: &str = "(async () => {
    const out = [], pause = () => new Promise(done => setTimeout(done, 50));
    for (const frame of document.querySelectorAll('.animation iframe')) {
        frame.scrollIntoView();
        let wrong = 'is not loaded';
        for (let i = 0; i < 60 && wrong; i++) {
            await pause();
            const page = frame.contentDocument;
            if (!page || page.URL === 'about:blank' || page.readyState !== 'complete') continue;
            const { scrollHeight, clientHeight } = page.documentElement;
            wrong = scrollHeight > clientHeight + 1 ? `has ${clientHeight} of ${scrollHeight} pixels` : '';
        }
        if (wrong) out.push(`${frame.title} ${wrong}`);
    }
    scrollTo(0, 0);
    return out;
})()";

/// The theme that the book takes where the system is dark.
const DARK: &str = "localStorage.setItem('mdbook-theme', 'navy')";

pub(crate) fn run(book: &Path, shots: Option<&Path>, only: &str, dark: bool) -> Result<()> {
    let program = browser::program().context("no chromium on the PATH: scripts/setup.sh --chromium")?;
    let book = fs::canonicalize(book).with_context(|| book.display().to_string())?;
    let paths: Vec<_> = pages(&book)?.into_keys().filter(|p| !p.ends_with("toc.html")).collect();
    // Pages of source are all made alike.
    let mut sources = 0;
    let mut browser = Browser::start(&program)?;
    let (mut wrong, mut looked) = (vec![], 0);
    for path in paths.iter().filter(|p| p.to_string_lossy().contains(only)) {
        if path.starts_with("code") && only.is_empty() {
            sources += 1;
            if sources > 1 {
                continue;
            }
        }
        looked += 1;
        // The many documents of the repository overflow on the narrow screen first, so only that one is checked.
        let screens = if path.starts_with("repository") && shots.is_none() { &SCREENS[1..] } else { &SCREENS };
        for &(wide, high, phone) in screens {
            let found = look(&mut browser, &book.join(path), (wide, high, phone), dark)?;
            wrong.extend(found.into_iter().map(|f| format!("{} at {wide}: {f}", path.display())));
            if let Some(shots) = shots {
                let name = path.with_extension("").to_string_lossy().replace('/', ".");
                fs::create_dir_all(shots)?;
                for (i, picture) in pictures(&mut browser, wide)?.iter().enumerate() {
                    fs::write(shots.join(format!("{name}.{wide}.{i:02}.png")), picture)?;
                }
            }
        }
    }
    crate::none_wrong(&wrong, |wrong| format!("{wrong} things to mend on {looked} pages"))?;
    println!("{looked} pages at 1280 and 390 pixels: nothing sticks out, words can be read, no errors in the console");
    Ok(())
}

fn look(browser: &mut Browser, page: &Path, (wide, high, phone): (u32, u32, bool), dark: bool) -> Result<Vec<String>> {
    browser.screen(wide, high, phone)?;
    browser.open(page)?;
    if dark {
        browser.evaluate(DARK)?;
        browser.open(page)?;
    }
    browser.evaluate(STEP)?;
    // Folded parts are checked unfolded.
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")?;
    let found = browser.evaluate(&OVERFLOW.replace("WIDTH", &wide.to_string()))?;
    let mut wrong: Vec<String> =
        found.as_array().into_iter().flatten().filter_map(Value::as_str).map(|s| format!("too wide: {s}")).collect();
    let cut = browser.evaluate(CUT)?;
    wrong.extend(cut.as_array().into_iter().flatten().filter_map(Value::as_str).map(|s| format!("cut: {s}")));
    // The theme is the same at every width.
    if !phone {
        let found = browser.evaluate(CONTRAST)?;
        wrong.extend(found.as_array().into_iter().flatten().filter_map(Value::as_str).map(|s| format!("contrast {s}")));
    }
    wrong.extend(browser.complaints().into_iter().map(|c| format!("console: {c}")));
    Ok(wrong)
}

/// The page from top to bottom.
fn pictures(browser: &mut Browser, wide: u32) -> Result<Vec<Vec<u8>>> {
    let high = browser.evaluate("document.documentElement.scrollHeight")?.as_f64().unwrap_or(SLICE);
    let slices = ((high / SLICE).ceil() as usize).clamp(1, SLICES);
    (0..slices)
        .map(|i| {
            let top = SLICE * i as f64;
            let height = SLICE.min(high - top).max(1.0);
            browser.screenshot(Some(json!({ "x": 0, "y": top, "width": wide, "height": height, "scale": 1 })))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use replay::look::{SCRIPT, head};

    use super::*;

    /// None, and a line that says so, without Chromium.
    fn started() -> Option<Browser> {
        let Some(program) = browser::program() else {
            println!("SKIPPED: no chromium here (scripts/setup.sh --chromium)");
            return None;
        };
        Some(Browser::start(&program).unwrap())
    }

    /// The folder of the book's own styles and scripts.
    fn theme() -> String {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/theme");
        fs::canonicalize(folder).unwrap().display().to_string()
    }

    #[test]
    fn words_that_are_hard_to_read_are_found() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("x.html");
        let mut found = |body: &str| {
            fs::write(&page, format!("<body style='background:#161923;color:#bcbdd0'>{body}")).unwrap();
            look(&mut browser, &page, SCREENS[0], false).unwrap()
        };
        assert_eq!(
            found("<p>light on dark</p><p style='color:#2b79a2;display:none'>not shown</p>"),
            Vec::<String>::new()
        );
        assert_eq!(found("<p>a <a style='color:#2b79a2'>dark link</a></p>"), ["contrast 3.6, A: dark link"]);
        assert_eq!(found("<p style='color:#2b79a2;font-size:24px'>large</p>"), Vec::<String>::new());
        assert_eq!(found("<p style='opacity:.4'>faint</p>").len(), 1);
        assert_eq!(found("<pre style='background:#eee'>on a light box</pre>").len(), 1);
    }

    #[test]
    fn what_sticks_out_is_found() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("x.html");
        let mut found = |body: &str| {
            fs::write(&page, format!("<meta name=viewport content='width=device-width'><body><main>{body}</main>"))
                .unwrap();
            look(&mut browser, &page, (390, 800, true), false).unwrap()
        };
        assert_eq!(found("<p>short</p>"), Vec::<String>::new());
        assert!(!found("<div style='width:500px'>wide</div>").is_empty());
        assert_eq!(found("<div style='overflow-x:auto'><div style='width:500px'>x</div></div>"), Vec::<String>::new());
        assert!(found("<script>throw new Error('no')</script>").iter().any(|f| f.contains("console")));
        assert!(found("<img src='nowhere.png'>").iter().any(|f| f.contains("console")));
    }

    /// The page in the frame is loaded, and has sent its height, before the script of the page around it runs.
    #[test]
    fn a_frame_is_as_high_as_its_page_whichever_is_loaded_first() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let inside = format!("{}<div style='height:1100px'>x</div><script>{}</script>", head("x", ""), SCRIPT);
        fs::write(folder.path().join("inside.html"), inside).unwrap();
        let page = folder.path().join("x.html");
        let late =
            "const s=document.createElement('script');s.src='file://THEME/animation.js';document.body.append(s);";
        let frame = |with: &str| {
            format!(
                "<link rel=stylesheet href='file://{0}/book.css'><body><main><figure class=animation>\
                 <iframe src=inside.html title=ring onload=\"{1}\"></iframe></figure></main>",
                theme(),
                with.replace("THEME", &theme())
            )
        };
        fs::write(&page, frame(late)).unwrap();
        assert_eq!(look(&mut browser, &page, SCREENS[0], false).unwrap(), Vec::<String>::new());
        fs::write(&page, frame("")).unwrap();
        let found = look(&mut browser, &page, SCREENS[0], false).unwrap();
        assert!(found.len() == 1 && found[0].starts_with("cut: ring has 7"), "{found:?}");
    }

    #[test]
    fn what_scrolls_fades_until_its_end() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("x.html");
        let body = format!(
            "<meta name=viewport content='width=device-width'><link rel=stylesheet href='file://{0}/book.css'><body>\
             <div class=content><div class=table-wrapper id=wide><div style='width:900px'>x</div></div>\
             <div class=table-wrapper id=narrow>x</div></div><script src='file://{0}/code.js'></script>",
            theme()
        );
        fs::write(&page, body).unwrap();
        browser.screen(390, 844, true).unwrap();
        browser.open(&page).unwrap();
        let settled = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(\
                       [...document.querySelectorAll('.more')].map(e => e.id)))))";
        assert_eq!(browser.evaluate(settled).unwrap(), json!(["wide"]));
        browser.evaluate("document.querySelector('#wide').scrollLeft = 900").unwrap();
        assert_eq!(browser.evaluate(settled).unwrap(), json!([]));
    }

    #[test]
    fn answers_open_after_predictions() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("x.html");
        let body = |script: &str| {
            format!(
                "<meta name=viewport content='width=device-width'><link rel=stylesheet href='file://{0}/book.css'><body>\
                 <div class=content><h2>Predict, then run</h2><ol><li>One?<li>Two?</ol><pre>run</pre><details><summary>Answers\
                 </summary><ol><li>first<li>second</ol></details><h2>Next</h2><details><summary>Hint</summary>x</details>\
                 </div>{script}",
                theme()
            )
        };
        let with_script = body(&format!("<script src='file://{}/predict.js'></script>", theme()));
        const OPEN: &str = "[...document.querySelectorAll('details')].map(d => d.open)";
        const SAYS: &str = "document.querySelector('[role=status]').textContent";
        const PREDICTED: &str = "[...document.querySelectorAll('.predicted')].map(e => e.textContent)";
        browser.screen(390, 844, true).unwrap();

        // Without the script the answers are folded as ever.
        fs::write(&page, body("")).unwrap();
        browser.open(&page).unwrap();
        browser.click("summary").unwrap();
        assert_eq!(browser.evaluate(OPEN).unwrap(), json!([true, false]));

        fs::write(&page, with_script).unwrap();
        browser.open(&page).unwrap();
        browser.click("summary").unwrap();
        browser.click("h2 ~ h2 ~ details > summary").unwrap();
        assert_eq!(browser.evaluate(OPEN).unwrap(), json!([false, true]), "only answers to predictions are locked");
        assert!(browser.evaluate(SAYS).unwrap().as_str().unwrap().starts_with("Predict first"));
        let predict = |browser: &mut Browser, item: u32, text: &str| {
            browser.click(&format!("ol > li:nth-child({item}) > .prediction")).unwrap();
            browser.call("Input.insertText", json!({ "text": text })).unwrap();
        };
        predict(&mut browser, 1, "44 <b>ms</b>");
        browser.click(".predict button").unwrap();
        assert!(browser.evaluate(SAYS).unwrap().as_str().unwrap().starts_with("Question 2 has no prediction"));
        assert_eq!(browser.evaluate(OPEN).unwrap()[0], json!(false));
        predict(&mut browser, 2, "six");
        browser.click(".predict button").unwrap();
        assert_eq!(browser.evaluate(OPEN).unwrap()[0], json!(true));
        let predicted = json!(["You predicted: 44 <b>ms</b>", "You predicted: six"]);
        assert_eq!(browser.evaluate(PREDICTED).unwrap(), predicted, "as it was typed, not as HTML");

        // They are there again, and cannot be changed.
        browser.open(&page).unwrap();
        assert_eq!(browser.evaluate(PREDICTED).unwrap(), predicted);
        predict(&mut browser, 1, "5");
        assert_eq!(browser.evaluate("document.querySelector('.prediction').value").unwrap(), json!("44 <b>ms</b>"));
        assert_eq!(browser.evaluate(OPEN).unwrap()[0], json!(false));
        browser.click("summary").unwrap();
        assert_eq!(browser.evaluate(OPEN).unwrap()[0], json!(true));

        // Or without a prediction.
        browser.evaluate("localStorage.clear()").unwrap();
        browser.open(&page).unwrap();
        browser.click(".predict a").unwrap();
        assert_eq!((browser.evaluate(OPEN).unwrap()[0].clone(), browser.complaints()), (json!(true), vec![]));
        assert_eq!(browser.evaluate(PREDICTED).unwrap(), json!([]));
    }

    /// A picture of black lines on white, as the simulator draws it, must not be a white or black block on a dark page,
    /// also where the box around it fades because there is more at the right.
    #[test]
    fn pictures_follow_the_books_dark_theme() {
        let Some(mut browser) = started() else { return };
        let folder = tempfile::tempdir().unwrap();
        let svg = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 60 40'><rect width='60' height='40' fill='white'/></svg>";
        fs::write(folder.path().join("plot.svg"), svg).unwrap();
        let page = folder.path().join("x.html");
        let mut colours = |class: &str, picture: &str| {
            let body = format!(
                "<html class='{class}'><link rel=stylesheet href='file://{}/book.css'><body style='margin:0;background:#161923'>\
                 <main class=content>{picture}</main>",
                theme()
            );
            fs::write(&page, body).unwrap();
            browser.open(&page).unwrap();
            // The picture and a strip of the page beside it.
            browser.evaluate("document.body.style.paddingBottom = '50px'").unwrap();
            browser.colours("body").unwrap()
        };
        let wide = "figure class=schedule><div class=wide";
        for box_ in
            [wide, &format!("{wide} style='mask-image:linear-gradient(#000,#000)'"), "label class=checkbox-label"]
        {
            let picture = format!("<{box_}><img src=plot.svg>");
            // Rounding at the picture's edge is another colour.
            assert!(colours("light", &picture) > 2, "{box_}: white on the page");
            assert!(colours("navy", &picture) <= 2, "{box_}: as the page");
        }
    }
}
