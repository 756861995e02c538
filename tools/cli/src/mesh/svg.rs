//! The mesh as a picture: nodes on a circle, a line for each port pair.

use std::fmt::Write as _;

use super::Mesh;
use super::node::speed;
use super::plan::Cable;
use crate::picture::{FONT, colour};

/// Radius of the circle of nodes, and of a node.
const CIRCLE: f64 = 190.0;
const NODE: f64 = 26.0;
/// Half of the picture's side.
const MIDDLE: f64 = 290.0;
/// Distance between the lines of two nodes.
const APART: f64 = 14.0;

pub(super) fn page(mesh: &Mesh) -> String {
    let count = mesh.nodes.len();
    let side = 2.0 * MIDDLE;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {side} {side}\" width=\"{side}\" height=\"{side}\" role=\"img\">\
         <title>{title}</title><rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\
         <text x=\"8\" y=\"20\" {FONT} font-weight=\"bold\">{title}</text>",
        title = mesh.title()
    );
    for (number, cable) in mesh.cables.iter().enumerate() {
        // Several lines of two nodes lie side by side.
        let pair: Vec<usize> = (0..mesh.cables.len()).filter(|&i| mesh.cables[i].nodes == cable.nodes).collect();
        let place = pair.iter().position(|&i| i == number).unwrap_or(0) as f64 - (pair.len() as f64 - 1.0) / 2.0;
        line(&mut out, mesh, cable, place * APART);
    }
    for (number, node) in mesh.nodes.iter().enumerate() {
        let ((x, y), fill) = (at(number, count), colour(number, count));
        let _ = write!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{NODE}\" fill=\"{fill}\"/>");
        let _ = write!(
            out,
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" {FONT} font-weight=\"bold\" stroke=\"#fff\" stroke-width=\"3\" \
             paint-order=\"stroke\">node {number}</text>",
            y + 4.0
        );
        let below = if y >= MIDDLE { y + NODE + 14.0 } else { y - NODE - 6.0 };
        let name = escaped(&node.host.hostname);
        let _ = write!(out, "<text x=\"{x:.1}\" y=\"{below:.1}\" text-anchor=\"middle\" {FONT}>{name}</text>");
    }
    out.push_str("</svg>\n");
    out
}

/// Returns the position of a node on the circle, the first one at the top.
fn at(node: usize, nodes: usize) -> (f64, f64) {
    let angle = std::f64::consts::TAU * node as f64 / nodes as f64;
    (MIDDLE + CIRCLE * angle.sin(), MIDDLE - CIRCLE * angle.cos())
}

/// Draws a port pair with its subnet and speed, `aside` of the line between its nodes; red and dashed if a ping failed.
fn line(out: &mut String, mesh: &Mesh, cable: &Cable, aside: f64) {
    let Some([port, _]) = cable.ends(&mesh.nodes) else { return };
    let [a, b] = cable.nodes.map(|node| at(node, mesh.nodes.len()));
    let length = (b.0 - a.0).hypot(b.1 - a.1).max(1.0);
    let (dx, dy) = (-(b.1 - a.1) / length * aside, (b.0 - a.0) / length * aside);
    let dead = mesh.failures(cable).next().is_some();
    let style = if dead { "stroke=\"#c00\" stroke-dasharray=\"6 4\"" } else { "stroke=\"#555\"" };
    let (x1, y1, x2, y2) = (a.0 + dx, a.1 + dy, b.0 + dx, b.1 + dy);
    let _ =
        write!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" {style} stroke-width=\"2\"/>");
    let words = format!("{}, {}", port.subnet(), speed(cable.speed(&mesh.nodes)));
    let _ = write!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" {FONT} stroke=\"#fff\" stroke-width=\"3\" paint-order=\"stroke\">{words}</text>",
        (x1 + x2) / 2.0,
        (y1 + y2) / 2.0 + aside + 4.0
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
