//! The program as its user starts it. Where Python has no numpy and no torch it must say so.

fn run(arguments: &[&str]) -> Option<(bool, String)> {
    let output = assert_cmd::cargo::cargo_bin_cmd!("pytorch-bindings").args(arguments).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(77) {
        assert!(err.contains("error: no Python 3.11 or later with numpy or torch here"), "{err}");
        eprintln!("SKIPPED {arguments:?}: {}", err.trim_end());
        return None;
    }
    Some((output.status.success(), format!("{out}{err}")))
}

#[test]
fn ranks_of_python_agree() {
    for ranks in ["1", "2", "3"] {
        let Some((ok, out)) = run(&["--ranks", ranks]) else { return };
        assert!(ok, "{out}");
        assert!(out.contains(&format!("OK: world of size {ranks}")), "{out}");
        assert_eq!(out.contains("Mismatch: rank"), ranks != "1", "{out}");
    }
}

#[test]
fn a_rank_that_raises_ends_the_others() {
    let script = std::env::temp_dir().join(format!("tinynccl-raises-{}.py", std::process::id()));
    let text = "import tinynccl\ncomm = tinynccl.Comm.from_env()\nif comm.rank == 1: raise ValueError('a bug of rank 1')\ncomm.barrier()\n";
    std::fs::write(&script, text).unwrap();
    let outcome = run(&["--ranks", "2", script.to_str().unwrap()]);
    std::fs::remove_file(&script).unwrap();
    let Some((ok, out)) = outcome else { return };
    assert!(!ok && out.contains("ValueError: a bug of rank 1"), "{out}");
}

#[test]
fn no_interpreter_is_status_77() {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("pytorch-bindings");
    let assert = command.args(["--python", "/nonexistent/python"]).assert().code(77);
    let errors = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(errors.contains("error: no Python 3.11 or later with numpy or torch here"), "{errors}");
}
