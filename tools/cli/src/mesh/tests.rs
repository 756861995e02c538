use tinynccl::bootstrap::Host;

use super::node::{Node, Port};
use super::ping::Ping;
use super::plan::{Cable, Way, cables, ways};
use super::{Mesh, svg};

fn port(address: &str, speed: Option<u32>) -> Port {
    let (ip, prefix) = address.split_once('/').unwrap();
    let (ip, prefix) = (ip.parse().unwrap(), prefix.parse().unwrap());
    Port { interface: "eth0".to_owned(), ip, prefix, speed, mtu: Some(9000), echo: None }
}

/// Nodes on separate machines.
fn nodes(ports: &[&[&str]]) -> Vec<Node> {
    let node = |(number, ports): (usize, &&[&str])| Node {
        host: Host { boot_id: number.to_string(), hostname: format!("host{number}"), ..Host::current() },
        ports: ports.iter().map(|address| port(address, Some(1000))).collect(),
        token: 0,
    };
    ports.iter().enumerate().map(node).collect()
}

fn mesh(nodes: Vec<Node>) -> Mesh {
    Mesh { cables: cables(&nodes), nodes, pings: Vec::new() }
}

#[test]
fn subnets_have_their_first_address() {
    let subnet = |address| port(address, None).subnet();
    let all = ["10.1.2.3/24", "10.1.2.3/0", "10.1.2.3/32", "fd00::7:9/112", "fd00::1/128", "192.168.7.130/25"];
    let expected = ["10.1.2.0/24", "0.0.0.0/0", "10.1.2.3/32", "fd00::7:0/112", "fd00::1/128", "192.168.7.128/25"];
    assert_eq!(all.map(subnet), expected);
}

#[test]
fn a_line_of_four_goes_through_the_nodes_between() {
    let nodes =
        nodes(&[&["10.0.1.1/24"], &["10.0.1.2/24", "10.0.2.1/24"], &["10.0.2.2/24", "10.0.3.1/24"], &["10.0.3.2/24"]]);
    let cables = cables(&nodes);
    assert_eq!(cables.iter().map(|cable| cable.nodes).collect::<Vec<_>>(), [[0, 1], [1, 2], [2, 3]]);
    let ways = ways(&nodes, &cables);
    assert_eq!(ways.len(), 6);
    assert!(ways.contains(&([0, 3], Way::Through(vec![1, 2]))) && ways.contains(&([1, 3], Way::Through(vec![2]))));
    assert!(ways.contains(&([1, 2], Way::Cables(vec![Cable { nodes: [1, 2], ports: [1, 0] }]))));
}

#[test]
fn two_rails_differ_in_speed_and_a_node_apart_has_no_way() {
    let mut nodes = nodes(&[&["10.0.1.1/24", "10.0.2.1/24"], &["10.0.2.2/24", "10.0.1.2/24"], &["10.9.9.9/24"]]);
    nodes[1].ports[0].speed = Some(100);
    nodes[1].ports[1].speed = None;
    let mesh = mesh(nodes);
    assert_eq!(mesh.cables.iter().map(|cable| cable.speed(&mesh.nodes)).collect::<Vec<_>>(), [None, Some(100)]);
    assert!(!mesh.is_whole());
    let text = mesh.text();
    assert!(text.contains("node 0 - node 1: several cables, for stripes\n"), "{text}");
    assert!(text.contains("10.0.2.0/24, 100 Mbit/s\n") && text.contains("10.0.1.0/24, speed unknown\n"), "{text}");
    assert!(text.contains("node 0 - node 2: no way: no common subnet"), "{text}");
}

/// A bridge has one address on every host; with another length each end must still be in the other's subnet.
#[test]
fn equal_addresses_and_an_end_outside_are_no_cable() {
    assert_eq!(cables(&nodes(&[&["172.17.0.1/16"], &["172.17.0.1/16"]])), []);
    assert_eq!(cables(&nodes(&[&["10.0.0.1/24"], &["10.0.0.2/25"]])).len(), 1);
    assert_eq!(cables(&nodes(&[&["10.0.0.1/24"], &["10.0.0.129/25"]])), []);
    let mut one_machine = nodes(&[&["10.0.0.1/24"], &["10.0.0.1/24"]]);
    one_machine[1].host = one_machine[0].host.clone();
    assert_eq!(ways(&one_machine, &[]), [([0, 1], Way::Same)]);
}

#[test]
fn failed_pings_show_in_the_text_and_in_the_picture() {
    let mut mesh = mesh(nodes(&[&["10.0.1.1/24"], &["10.0.1.2/24"]]));
    let ping = |nodes, outcome| Ping { nodes, ports: [0, 0], outcome };
    mesh.pings = vec![ping([0, 1], Ok(12.6)), ping([1, 0], Ok(9.0))];
    assert!(mesh.is_whole() && mesh.text().contains("1 Gbit/s, ping 13 us\n"), "{}", mesh.text());
    assert!(!svg::page(&mesh).contains("stroke-dasharray"));
    mesh.pings[1].outcome = Err("no answer within 2 s".to_owned());
    assert!(!mesh.is_whole() && mesh.text().contains("FAILED: the ping of node 1: no answer"), "{}", mesh.text());
    let page = svg::page(&mesh);
    assert!(page.contains("stroke-dasharray") && page.contains("10.0.1.0/24, 1 Gbit/s"), "{page}");
}
