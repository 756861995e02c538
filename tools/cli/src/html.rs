//! A page that steps through a schedule: no library, nothing from the network.

use std::collections::{BTreeMap, BTreeSet};
use std::f64::consts::TAU;
use std::fmt::Write;

use tinynccl_plan::schedule::rounds::Round;
use tinynccl_plan::wire::Algorithm;

use crate::picture::{CELL, DEFS, FONT, arrow, colour, describe, rows, strip, width};
use crate::played::Played;

const STYLE: &str = "body{font-family:sans-serif;margin:0 auto;max-width:60rem;padding:.5rem;color:#222;background:#fff}\
     h1{font-size:1.2rem;margin:.3rem 0}p{margin:.5rem 0}svg{width:100%;height:auto;max-height:27rem;display:block}\
     .frame{display:none}.logs{display:grid}.log{grid-area:1/1;visibility:hidden}.log.shown{visibility:visible}\
     .shown{display:block}g.shown{display:inline}button{font-size:1rem;padding:.4rem .8rem;margin-right:.3rem}\
     table{border-collapse:collapse;font-size:.8rem}td,th{border:1px solid #8888;padding:.1rem .35rem;text-align:right}\
     td[data-link]{min-width:4.2rem}td.now{background:#ffe9a8;color:#222}button:focus-visible{outline:2px solid #06c}\
     .scroll{overflow-x:auto}.edge{stroke:#8886;stroke-width:1}ul{font-size:.9rem;margin:.4rem 0;padding-left:1.2rem;columns:19rem}\
     @media(max-width:480px){table{font-size:.68rem}td[data-link]{min-width:3.1rem}}\
     @media(prefers-color-scheme:dark){body{background:#161923;color:#d5d7e3}text{fill:#d5d7e3}marker path{fill:#aaa}}";

/// A page around this one learns how high this one is.
const SCRIPT: &str = "const frames=document.querySelectorAll('.frame'),logs=document.querySelectorAll('.log');\
     let at=0,timer=null;const last=frames.length-1,sending=sent[last].length?last:last-1;\
     function show(to){at=Math.max(0,Math.min(last,to));\
     frames.forEach((f,i)=>f.classList.toggle('shown',i===at));logs.forEach((l,i)=>l.classList.toggle('shown',i===at));\
     document.getElementById('at').textContent=at===0?'start':at>sending?'done':'round '+at+' of '+sending;\
     document.getElementById('back').disabled=at===0;document.getElementById('forward').disabled=at===last;count();}\
     function count(){const all={};sent.slice(0,at+1).forEach((round,i)=>round.forEach(([from,to,bytes])=>\
     [from+'-'+to,from+'-all'].forEach(k=>{const c=all[k]||(all[k]={bytes:0,now:false});c.bytes+=bytes;c.now=c.now||i===at;})));\
     document.querySelectorAll('td[data-link]').forEach(td=>{const c=all[td.dataset.link];\
     td.textContent=c?c.bytes.toLocaleString('en'):'';td.classList.toggle('now',!!c&&c.now);});}\
     function stop(){clearInterval(timer);timer=null;document.getElementById('play').textContent='Play';}\
     function play(){if(timer){stop();return;}if(at===last)show(0);\
     document.getElementById('play').textContent='Stop';\
     timer=setInterval(()=>{if(at===last)stop();else show(at+1);},1200);}\
     document.getElementById('back').onclick=()=>{stop();show(at-1);};\
     document.getElementById('forward').onclick=()=>{stop();show(at+1);};\
     document.getElementById('play').onclick=play;\
     document.addEventListener('keydown',e=>{if(e.key==='ArrowLeft'){stop();show(at-1);}\
     if(e.key==='ArrowRight'){stop();show(at+1);}if(e.key==='Home'){stop();show(0);}\
     if(e.key==='End'){stop();show(last);}});show(0);\
     if(parent!==window){const tell=()=>parent.postMessage({height:document.body.offsetHeight},'*');\
     new ResizeObserver(tell).observe(document.body);}";

pub(crate) fn page(played: &Played) -> String {
    let title = played.title();
    let complete = if played.shape.collective.reduces() { ": the result is complete when all are there" } else { "" };
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{title}</title>\
         <style>{STYLE}</style></head><body><h1>{title}</h1>\
         <p>Each cell is a part of a rank's memory. It has one stripe for each rank whose data is in it{complete}. \
         Arrow keys step, Home and End jump.</p>\
         <p><button id=\"back\">Back</button><button id=\"forward\">Forward</button><button id=\"play\">Play</button>\
         <span id=\"at\" aria-live=\"polite\"></span></p>\n"
    );
    drawing(&mut out, played);
    out.push_str("<div class=\"logs\">");
    for round in &played.rounds {
        out.push_str("<div class=\"log\"><ul>");
        for message in &round.sent {
            let _ = write!(out, "<li>{}</li>", describe(played, message));
        }
        if round.sent.is_empty() {
            let what =
                if round.steps.is_empty() { "Every rank has its own input." } else { "The last messages arrive." };
            let _ = write!(out, "<li>{what}</li>");
        }
        out.push_str("</ul></div>\n");
    }
    out.push_str("</div>\n");
    links(&mut out, played);
    let _ = writeln!(out, "<script>const sent={};{SCRIPT}</script></body></html>", sent(played));
    out
}

/// Where the ranks stand: a tree as a tree, all others in a circle.
fn places(played: &Played) -> Vec<(f64, f64)> {
    let ranks = played.shape.ranks;
    let (wide, high) = (width(played), rows(played) as f64 * (CELL + 4.0));
    if played.algorithm == Algorithm::Tree {
        // Ranks are numbered such that children stand on both sides of their parents.
        return depths(played)
            .iter()
            .enumerate()
            .map(|(rank, depth)| (rank as f64 * (wide + 34.0), *depth as f64 * (high + 66.0)))
            .collect();
    }
    // Strips of neighbours do not touch.
    let radius = (ranks as f64 * (wide + 30.0) / TAU).max(wide.max(110.0));
    let angle = |rank: usize| TAU * rank as f64 / ranks as f64 - TAU / 4.0;
    (0..ranks).map(|rank| (radius * angle(rank).cos(), radius * angle(rank).sin())).collect()
}

/// How many links each rank is away from the root.
fn depths(played: &Played) -> Vec<usize> {
    let links: Vec<(usize, usize)> = played.rounds.iter().flat_map(|r| &r.sent).map(|m| (m.from, m.to)).collect();
    let mut depths: Vec<Option<usize>> = vec![None; played.shape.ranks];
    depths[played.shape.root] = Some(0);
    for depth in 0..played.shape.ranks {
        for &(from, to) in &links {
            for (near, far) in [(from, to), (to, from)] {
                if depths[near] == Some(depth) && depths[far].is_none() {
                    depths[far] = Some(depth + 1);
                }
            }
        }
    }
    depths.into_iter().map(Option::unwrap_or_default).collect()
}

/// All ranks, one group for each round.
fn drawing(out: &mut String, played: &Played) {
    let ranks = played.shape.ranks;
    let (wide, high) = (width(played), rows(played) as f64 * (CELL + 4.0));
    let places = places(played);
    let centre = |rank: usize| places[rank];
    let least = |of: fn(&(f64, f64)) -> f64| places.iter().map(of).fold(f64::INFINITY, f64::min);
    let most = |of: fn(&(f64, f64)) -> f64| places.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
    // Names and arrows beside the strips need some room.
    let (left, top) = (least(|p| p.0) - (wide / 2.0).max(32.0) - 8.0, least(|p| p.1) - high / 2.0 - 28.0);
    let (right, bottom) = (most(|p| p.0) + (wide / 2.0).max(32.0) + 8.0, most(|p| p.1) + high / 2.0 + 12.0);
    // Not larger than twice.
    let _ = write!(
        out,
        "<svg viewBox=\"{left:.0} {top:.0} {:.0} {:.0}\" style=\"max-width:{:.0}px;margin:.6rem auto\" role=\"img\" \
         aria-label=\"{}\">{DEFS}",
        right - left,
        bottom - top,
        2.0 * (right - left),
        played.title()
    );
    if played.algorithm == Algorithm::Tree {
        let links: BTreeSet<(usize, usize)> =
            played.rounds.iter().flat_map(|r| &r.sent).map(|m| (m.from.min(m.to), m.from.max(m.to))).collect();
        for (a, b) in links {
            let ((x1, y1), (x2, y2)) = (centre(a), centre(b));
            let _ = write!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"edge\"/>");
        }
    }
    for rank in 0..ranks {
        let (x, y) = centre(rank);
        let top = y - high / 2.0 - 8.0;
        let fill = colour(rank, ranks);
        let _ = write!(out, "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"{fill}\"/>", x - 26.0, top - 4.0);
        let _ = write!(out, "<text x=\"{:.1}\" y=\"{top:.1}\" {FONT}>rank {rank}</text>", x - 16.0);
    }
    for Round { sent, memory, .. } in &played.rounds {
        out.push_str("<g class=\"frame\">");
        for (rank, memory) in memory.iter().enumerate() {
            let (x, y) = centre(rank);
            strip(out, played, rank, memory, (x - wide / 2.0, y - high / 2.0));
        }
        for message in sent {
            let (from, to) = (centre(message.from), centre(message.to));
            let (dx, dy) = (to.0 - from.0, to.1 - from.1);
            let length = dx.hypot(dy).max(1.0);
            // Beside the straight line, so that the two directions of a pair do not cover each other; and clear of the
            // strips.
            let beside = (dy / length * 9.0, -dx / length * 9.0);
            let clear =
                0.5_f64.min((wide / 2.0 * dx.abs() / length + high / 2.0 * dy.abs() / length + 8.0) / length * 0.8);
            let point = |along: f64| (from.0 + dx * along + beside.0, from.1 + dy * along + beside.1);
            arrow(out, played, message, point(clear), point(1.0 - clear), 0.4);
        }
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
}

/// Bytes of each message, as a script reads them: for each round, lists of (from, to, bytes).
fn sent(played: &Played) -> String {
    let round = |round: &Round| {
        let messages: Vec<String> =
            round.sent.iter().map(|m| format!("[{},{},{}]", m.from, m.to, played.bytes(m))).collect();
        format!("[{}]", messages.join(","))
    };
    format!("[{}]", played.rounds.iter().map(round).collect::<Vec<_>>().join(","))
}

/// Bytes that each pair of ranks exchanges: in all, until the script counts up to the round that is shown.
fn links(out: &mut String, played: &Played) {
    let ranks = played.shape.ranks;
    let mut sent: BTreeMap<(usize, usize), u64> = BTreeMap::new();
    for message in played.rounds.iter().flat_map(|r| &r.sent) {
        *sent.entry((message.from, message.to)).or_default() += played.bytes(message);
    }
    let _ = write!(
        out,
        "<p>Bytes sent over each link up to here, for segments of {} bytes:</p><div class=\"scroll\"><table><tr>\
         <th>from \\ to</th>",
        played.size
    );
    for to in 0..ranks {
        let _ = write!(out, "<th>{to}</th>");
    }
    out.push_str("<th>in all</th></tr>");
    for from in 0..ranks {
        let _ = write!(out, "<tr><th>{from}</th>");
        for to in 0..ranks {
            match sent.get(&(from, to)) {
                Some(bytes) => {
                    let _ = write!(out, "<td data-link=\"{from}-{to}\">{bytes}</td>");
                }
                None => out.push_str("<td></td>"),
            }
        }
        let all: u64 = sent.range((from, 0)..(from, ranks)).map(|(_, bytes)| bytes).sum();
        let _ = write!(out, "<td data-link=\"{from}-all\">{all}</td></tr>");
    }
    out.push_str("</table></div>\n");
}
