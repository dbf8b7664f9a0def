//! The rules of the house that a compiler does not check.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A file longer than this, tests not counted, is more than one person reads.
const LONGEST: usize = 800;

/// What each crate may use of ours: dependencies point one way, and siblings never import each other.
const MAY_USE: &[(&str, &[&str])] = &[
    ("berth-core", &[]),
    ("berth-csi", &["berth-core"]),
    ("berth-host", &["berth-core"]),
    ("berth-runtime", &["berth-host"]),
    ("berth-journal", &["berth-host"]),
    ("berth-nfs", &["berth-core"]),
    ("berth-fuse", &["berth-host", "berth-nfs"]),
    ("berth-driver", &["berth-core", "berth-csi", "berth-host", "berth-journal"]),
    (
        "berth-backends",
        &["berth-core", "berth-driver", "berth-fuse", "berth-host", "berth-journal", "berth-nfs"],
    ),
    ("berth-apiserver", &["berth-core", "berth-host", "berth-journal"]),
    ("berth-kube", &["berth-core"]),
    ("berth-controllers", &["berth-core", "berth-kube"]),
    ("berth-sidecars", &["berth-core", "berth-csi", "berth-kube"]),
    ("berth-node", &["berth-core", "berth-csi", "berth-host", "berth-kube", "berth-runtime"]),
    (
        "berth",
        &[
            "berth-core",
            "berth-csi",
            "berth-fuse",
            "berth-host",
            "berth-nfs",
            "berth-driver",
            "berth-backends",
            "berth-apiserver",
            "berth-kube",
            "berth-controllers",
            "berth-sidecars",
            "berth-node",
            "berth-runtime",
        ],
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the workspace").to_owned()
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("the directory can be listed") {
        let path = entry.expect("the directory can be listed").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    rust_files(&root().join("crates"), &mut found);
    rust_files(&root().join("tests"), &mut found);
    assert!(found.len() > 30, "only {} files found", found.len());
    found
}

#[test]
fn every_file_opens_with_what_it_is_for() {
    let silent: Vec<_> =
        sources().into_iter().filter(|path| !fs::read_to_string(path).unwrap().starts_with("//! ")).collect();
    assert!(silent.is_empty(), "{silent:#?}");
}

#[test]
fn no_file_is_longer_than_one_person_reads() {
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        if text.starts_with("//! @generated ") {
            continue;
        }
        let is_test = path.components().any(|part| part.as_os_str() == "tests")
            || path.file_name().is_some_and(|name| name == "tests.rs");
        let own = text.split("#[cfg(test)]\nmod tests {").next().map_or(0, |own| own.lines().count());
        assert!(is_test || own <= LONGEST, "{} has {own} lines", path.display());
    }
}

#[test]
fn dependencies_point_one_way() {
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let dir = entry.expect("the directory can be listed").path();
        let name = dir.file_name().unwrap().to_str().unwrap().to_owned();
        let (_, allowed) = MAY_USE
            .iter()
            .find(|(crate_name, _)| *crate_name == name)
            .unwrap_or_else(|| panic!("{name} has no place in the order of crates"));
        let manifest = fs::read_to_string(dir.join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[dev-dependencies]").next().unwrap();
        for line in dependencies.lines().filter(|line| line.starts_with("berth")) {
            let used = line.split(['.', ' ', '=']).next().unwrap();
            assert!(allowed.contains(&used), "{name} uses {used}");
        }
    }
}

#[test]
fn only_host_and_runtime_have_unsafe_code_or_child_processes() {
    for path in sources() {
        let relative = path.strip_prefix(root()).unwrap();
        if relative.starts_with("crates/berth-host")
            || relative.starts_with("crates/berth-runtime")
            || relative.starts_with("tests")
        {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap();
            let shipped = |part: &str| part != "tests" && part != "examples";
            let is_test = !relative.components().all(|part| part.as_os_str().to_str().is_some_and(shipped));
            assert!(!code.contains("unsafe {"), "{}:{}", relative.display(), number + 1);
            assert!(is_test || !code.contains("Command::new("), "{}:{}", relative.display(), number + 1);
        }
    }
}
