//! The command `topology`, as a process.

use std::fs;
use std::process::{Command, Stdio};

use program_kit::testing;
use tinynccl_plan::simulate::machine::description::Description;

const DGX_1: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/topologies/dgx-1.xml");
const TWO_HOSTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/topologies/two-hosts.toml");

fn topology(arguments: &[&str]) -> Command {
    let mut command = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
    command.arg("topology").args(arguments);
    command
}

fn output(arguments: &[&str]) -> String {
    testing::output(&mut topology(arguments))
}

#[test]
fn a_file_as_text() {
    let text = output(&["--file", TWO_HOSTS]);
    assert!(text.starts_with("two hosts on one switch: 4 ranks, 3 nodes, 2 links\n\n"), "{text}");
    for line in [
        "host0: ranks 0-1, inside 10 GB/s, 0.1 us",
        "host1: ranks 2-3, inside 10 GB/s, 0.1 us",
        "  host0 - switch  12.5 GB/s, 1 us, cable, shares bus0",
        "  shared bus0: 16 GB/s",
        "  host0  10 / 0.1  12.5 / 2",
    ] {
        assert!(text.lines().any(|found| found == line), "no {line:?} in:\n{text}");
    }
}

#[test]
fn nccls_xml_is_drawn_and_written_as_ours() {
    let text = output(&["--file", DGX_1]);
    for part in [
        "DGX-1 (V100): 8 ranks, 18 nodes",
        "numa0: numa, x86_64, GenuineIntel\n├─ pcie 0000:04:00.0: pcie, 12 GB/s\n│  ├─ gpu0: gpu, 0000:06:00.0, sm 70, 12 GB/s, rank 0\n",
        "  gpu0 - gpu3    40 GB/s, 0.3 us, nvlink\n",
        "GB/s of the narrowest link / us on the way",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    let folder = tempfile::tempdir().unwrap();
    let mut read = Vec::new();
    for format in ["json", "toml"] {
        let path = folder.path().join(format!("dgx-1.{format}"));
        fs::write(&path, output(&["--file", DGX_1, "--format", format])).unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(output(&["--file", path]), text);
        let mut simulate = testing::program(env!("CARGO_BIN_EXE_tinynccl-cli"));
        let simulated =
            testing::output(simulate.args(["simulate", "all-reduce", "-n", "8", "-t", path, "--algo", "ring"]));
        assert!(simulated.contains("DGX-1 (V100)"), "{simulated}");
        read.push(Description::parse(&fs::read_to_string(path).unwrap()).unwrap());
    }
    assert_eq!(read[0], read[1]);
}

#[test]
fn a_picture_has_a_box_for_each_node_and_a_line_for_each_link() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/dgx-1.svg");
    output(&["--file", DGX_1, "--svg", path.to_str().unwrap()]);
    let svg = fs::read_to_string(path).unwrap();
    let description = Description::parse(&fs::read_to_string(DGX_1).unwrap()).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<rect x=").count(), description.node.len());
    assert_eq!(svg.matches("<path d=").count(), description.link.len());
    assert!(svg.contains(">rank 7</text>") && svg.contains("<title>40 GB/s, nvlink</title>"), "{svg}");
}

/// One line that names the file, and for a file of ours the line in it.
#[test]
fn a_bad_file_is_one_clear_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).to_str().unwrap().to_owned()
    };
    let whole = fs::read_to_string(DGX_1).unwrap();
    for (path, words) in [
        (file("cut.xml", &whole[..700]), "topology: line "),
        (file("no.xml", "<graphs version=\"1\"/>"), "topology: line 1: <graphs>, expected NCCL's <system>"),
        (file("a.toml", "[[node]]\nname = \"a\"\nranks = \"two\"\n"), "topology: line 3: invalid type: string"),
        (file("a.json", "{\"node\": [}"), "line 1 column 11"),
        (file("b.toml", "[[node]]\nname = \"a\"\n"), "topology: no node has ranks"),
        ("/nowhere/x.toml".to_owned(), "No such file"),
    ] {
        let outcome = testing::run(&mut topology(&["--file", &path]));
        assert_ne!(outcome.code, Some(0), "{path}: {}", outcome.stdout);
        let said = &outcome.stderr;
        assert!(said.contains(words) && said.contains(&path) && said.lines().count() == 1, "{path}: {said}");
    }
}

#[test]
fn ranks_are_put_on_gpus() {
    let said = testing::run(&mut topology(&["--file", TWO_HOSTS, "--gpus"])).stderr;
    assert!(said.contains("--gpus: there is no GPU in two hosts on one switch"), "{said}");
    assert!(output(&["--file", DGX_1, "--gpus"]).contains("gpu7: gpu, 0000:8a:00.0, sm 70, 12 GB/s, rank 7"));
}

#[cfg(feature = "doctor")]
fn check_this_host(text: &str, ranks: usize) {
    let description = Description::parse(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(description.node.iter().map(|node| node.ranks).sum::<usize>(), ranks, "{text}");
    let kinds: Vec<&str> = description.node.iter().filter_map(|node| node.kind.as_deref()).collect();
    assert!(kinds.iter().any(|kind| matches!(*kind, "host" | "numa")), "{text}");
}

#[cfg(feature = "doctor")]
#[test]
fn this_machine_has_a_rank_on_each_core() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = output(&[]);
    let last = text.lines().last().unwrap_or_default();
    // Without NVIDIA's library one line says so.
    assert!(text.matches("\nGPUs: ").count() <= 1, "{text}");
    assert!(!text.contains("GPUs: none") || last.starts_with("GPUs: none (") && last.ends_with(')'), "{text}");
    assert!(text.contains(" core"), "{text}");
    check_this_host(&output(&["--format", "json"]), cores.min(64));
}

/// Two ranks by hand: the first prints, and what it prints is read again.
#[cfg(feature = "doctor")]
#[test]
fn a_job_is_shown_by_its_first_rank() {
    let port = program_kit::port::Port::new("127.0.0.1".parse().expect("an address"));
    let at = port.at.port().to_string();
    let rank = |rank: usize| {
        let mut command = topology(&["--format", "toml"]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("TINYNCCL_TUNE", "off");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &at).env("TINYNCCL_SECRET", "secret of a test");
        command
    };
    let other = rank(1).stdout(Stdio::piped()).spawn().expect("the program");
    let text = testing::output(&mut rank(0));
    let other = other.wait_with_output().expect("its end");
    assert!(other.status.success() && other.stdout.is_empty(), "{other:?}");
    check_this_host(&text, 2);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("job.toml");
    fs::write(&path, &text).unwrap();
    let again = output(&["--file", path.to_str().unwrap(), "--format", "toml"]);
    assert_eq!(again, text);
}
