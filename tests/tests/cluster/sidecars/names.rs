//! The programs by their upstream names, and what they say to wrong words.

use std::path::Path;
use std::process::Output;

use berth_e2e::{driver, machine};

const NAMES: [&str; 8] = [
    "csi-provisioner",
    "csi-attacher",
    "csi-resizer",
    "csi-snapshotter",
    "snapshot-controller",
    "csi-node-driver-registrar",
    "livenessprobe",
    "csi-external-health-monitor-controller",
];

fn run(program: &Path, args: &[&str]) -> (Option<i32>, String) {
    let mut command = machine::command(program);
    command.args(args);
    for name in ["KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME"] {
        command.env_remove(name);
    }
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&stdout).into_owned() + &String::from_utf8_lossy(&stderr))
}

#[test]
fn each_runs_as_a_subcommand_and_by_the_name_of_the_program() {
    let (dir, binary) = (tempfile::tempdir().unwrap(), driver::binary().unwrap());
    for name in NAMES {
        let link = dir.path().join(name);
        std::os::unix::fs::symlink(&binary, &link).unwrap();
        for words in [["--version"], ["-version"]] {
            let (status, said) = run(&link, &words);
            assert_eq!(status, Some(0), "{name} {words:?}: {said}");
            assert!(said.contains("0."), "{name}: {said}");
        }
        let (status, said) = run(&binary, &[name, "--help"]);
        assert_eq!(status, Some(0), "{said}");
        assert!(said.contains("Usage:"), "{name}: {said}");
    }
}

#[test]
fn a_wrong_word_is_answered_with_a_sentence_that_names_the_flag() {
    let binary = driver::binary().unwrap();
    for (words, flag) in [
        (&["csi-attacher", "--timeout=soon"][..], "--timeout"),
        (&["csi-attacher", "--worker-threads=0"], "--worker-threads"),
        (&["csi-provisioner", "--feature-gates=Teleport=true"], "--feature-gates"),
        (&["csi-provisioner", "--volume-name-uuid-length=99"], "--volume-name-uuid-length"),
        (&["csi-provisioner", "--enable-capacity"], "--enable-capacity"),
        (&["csi-provisioner", "--node-deployment=true"], "--node-deployment"),
        (&["csi-resizer", "--retry-interval-start=10m"], "--retry-interval-max"),
        (&["csi-resizer", "--handle-volume-inuse-error=perhaps"], "--handle-volume-inuse-error"),
        (&["csi-resizer"], "--kubeconfig"),
        (&["csi-snapshotter", "--metrics-path=metrics"], "--metrics-path"),
        (&["csi-snapshotter", "--node-deployment"], "NODE_NAME"),
        (&["csi-snapshotter", "--node-deployment", "--leader-election"], "--leader-election"),
        (&["csi-external-health-monitor-controller", "--monitor-interval=0"], "--monitor-interval"),
        (&["csi-external-health-monitor-controller"], "--kubeconfig"),
        (&["csi-attacher", "--http-endpoint=:0", "--metrics-address=:0"], "--metrics-address"),
        (&["snapshot-controller", "--master"], "--master"),
        (&["csi-node-driver-registrar"], "--kubelet-registration-path"),
        (&["livenessprobe", "--http-endpoint=:0", "--health-port=1"], "--health-port"),
        (&["sidecars", "--controllers=provisioner,barber"], "--controllers"),
        (&["sidecars", "--no-such-flag"], "--no-such-flag"),
    ] {
        let (status, said) = run(&binary, words);
        assert!(status.is_some_and(|status| status != 0), "{words:?} ended with {status:?}: {said}");
        assert!(said.contains(flag), "{words:?}: {said}");
        assert!(!said.contains("panicked"), "{words:?}: {said}");
    }
}

#[test]
fn a_registrar_in_the_probing_mode_of_old_ends_at_once_and_well() {
    let words = ["csi-node-driver-registrar", "--mode=kubelet-registration-probe"];
    let (status, said) = run(&driver::binary().unwrap(), &words);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("deprecated"), "{said}");
}
