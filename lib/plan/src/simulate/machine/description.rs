//! The description of a machine, as a file holds it: TOML, JSON, or the XML of NCCL's topologies.
//!
//! ```toml
#![doc = include_str!("../../../topologies/two-hosts.toml")]
//! ```

use serde::{Deserialize, Serialize};

use super::nccl_xml;
use crate::error::{Error, Result};

/// The content of a file.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// To print.
    #[serde(default)]
    pub name: String,
    /// Costs of the ranks' processors.
    #[serde(default)]
    pub costs: CostsDescription,
    /// Hosts and switches.
    #[serde(default)]
    pub node: Vec<Node>,
    /// Links between nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub link: Vec<Link>,
    /// Resources that several links share.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<Shared>,
}

/// Costs of a rank's processor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CostsDescription {
    /// Microseconds of a call.
    pub call_us: f64,
    /// Microseconds of each end of a message.
    pub overhead_us: f64,
    /// GB combined per second; 0: takes no time.
    pub reduce_gb_s: f64,
    /// GB copied per second; 0: takes no time.
    pub copy_gb_s: f64,
}

/// A host, a part of one, or a switch.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Name by which links refer to it.
    pub name: String,
    /// Ranks on it.
    #[serde(default)]
    pub ranks: usize,
    /// The numbers of its ranks; if no node has any, ranks are numbered in the order of the nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub numbers: Vec<usize>,
    /// Its kind, for drawings: host, numa, gpu, pcie, port, nvswitch, network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Details in words, for drawings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// The connection of its ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<Inside>,
}

/// The connection of a node's ranks.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Inside {
    /// Latency of a message, in microseconds.
    pub latency_us: f64,
    /// Bandwidth of all messages together, in GB/s.
    pub bandwidth_gb_s: f64,
}

/// A link between two nodes.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Names of the nodes.
    pub between: [String; 2],
    /// Latency in microseconds.
    pub latency_us: f64,
    /// Bandwidth in GB/s: of each direction, in half duplex of both together.
    pub bandwidth_gb_s: f64,
    /// Full duplex, the default, or half duplex.
    #[serde(default)]
    pub duplex: Duplex,
    /// Its name in the report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Name of something that it shares with others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<String>,
}

/// Use of a link's bandwidth by its two directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Duplex {
    /// Each direction has the whole bandwidth.
    #[default]
    Full,
    /// Both share it.
    Half,
}

/// Something that several links share.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Shared {
    /// Name by which links refer to it.
    pub name: String,
    /// Bandwidth of all that passes it, in both directions together, in GB/s.
    pub bandwidth_gb_s: f64,
}

impl Description {
    /// Reads the text of a file. Its first character tells the format: `{` JSON, `<` NCCL's XML
    /// (`NCCL_TOPO_DUMP_FILE`), and TOML otherwise.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] names the line, what was expected, and what is there.
    pub fn parse(text: &str) -> Result<Description> {
        let read = match text.trim_start_matches('\u{feff}').trim_start().chars().next() {
            Some('{') => serde_json::from_str(text).map_err(|error| error.to_string()),
            Some('<') => nccl_xml::read(text),
            _ => toml::from_str(text).map_err(|error| {
                let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
                let message = error.message().lines().collect::<Vec<_>>().join(", ");
                format!("line {}: {message}", 1 + before.matches('\n').count())
            }),
        };
        read.map_err(|detail| Error::invalid("topology", detail))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_format_is_told_by_the_first_character() {
        let toml = "name = \"x\"\n[[node]]\nname = \"a\"\nranks = 1\n";
        let json = r#" {"name": "x", "node": [{"name": "a", "ranks": 1}]}"#;
        assert_eq!(Description::parse(toml).unwrap(), Description::parse(json).unwrap());
        let text = |text: &str| Description::parse(text).unwrap_err().to_string();
        assert_eq!(text("[[node]]\nname = \"a\"\nranks = -1\n").lines().count(), 1);
        assert!(text("[[node]]\nname = \"a\"\nranks = -1\n").starts_with("topology: line 3: "));
        assert!(text("name = \"a\"\nnode = [").contains("line 2"));
        assert!(text("{\"node\": 1}").contains("line 1"));
        assert!(text("<system version=\"1\">").starts_with("topology: line 1: "));
    }

    fn word() -> impl Strategy<Value = String> {
        proptest::string::string_regex("[a-z0-9 /.'\"<&]{1,9}").expect("a pattern")
    }

    fn node() -> impl Strategy<Value = Node> {
        let inside = (0.0f64..1e3, 1e-3f64..1e3);
        let inside = inside.prop_map(|(latency_us, bandwidth_gb_s)| Inside { latency_us, bandwidth_gb_s });
        let numbers = prop::collection::vec(0usize..9, 0..3);
        let labels = (proptest::option::of(word()), proptest::option::of(word()));
        (word(), 0usize..9, numbers, labels, proptest::option::of(inside))
            .prop_map(|(name, ranks, numbers, (kind, note), inside)| Node { name, ranks, numbers, kind, note, inside })
    }

    fn link() -> impl Strategy<Value = Link> {
        let labels = (proptest::option::of(word()), proptest::option::of(word()), any::<bool>());
        (word(), word(), 0.0f64..1e6, 1e-6f64..1e6, labels).prop_map(|(a, b, latency_us, bandwidth_gb_s, labels)| {
            let (kind, shared, half) = labels;
            let duplex = if half { Duplex::Half } else { Duplex::Full };
            Link { between: [a, b], latency_us, bandwidth_gb_s, duplex, kind, shared }
        })
    }

    fn description() -> impl Strategy<Value = Description> {
        let shared = (word(), 1e-3f64..1e3).prop_map(|(name, bandwidth_gb_s)| Shared { name, bandwidth_gb_s });
        let lists = (
            prop::collection::vec(node(), 0..4),
            prop::collection::vec(link(), 0..4),
            prop::collection::vec(shared, 0..3),
        );
        (word(), 0.0f64..1e3, lists).prop_map(|(name, call_us, (node, link, shared))| Description {
            name,
            costs: CostsDescription { call_us, ..CostsDescription::default() },
            node,
            link,
            shared,
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again(description in description()) {
            let json = serde_json::to_string_pretty(&description).unwrap();
            prop_assert_eq!(&Description::parse(&json).unwrap(), &description);
            let toml = toml::to_string(&description).unwrap();
            prop_assert_eq!(&Description::parse(&toml).unwrap(), &description);
        }

        #[test]
        fn no_text_is_a_panic(text in any::<String>()) {
            let _ = Description::parse(&text);
        }
    }
}
