//! The rules of the house that a compiler does not check.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use berth_e2e::machine;
use serde_json::Value;

/// A file longer than this, tests not counted, is more than one person reads.
const LONGEST: usize = 800;

/// What each crate may use of ours: dependencies point one way, and siblings never import each other.
const MAY_USE: &[(&str, &[&str])] = &[
    ("berth-core", &[]),
    ("berth-csi", &["berth-core"]),
    ("berth-host", &["berth-core"]),
    ("berth-runtime", &["berth-host"]),
    ("berth-journal", &["berth-host"]),
    ("berth-flex", &["berth-core", "berth-host"]),
    ("berth-nfs", &["berth-core"]),
    ("berth-fuse", &["berth-core", "berth-host", "berth-nfs"]),
    ("berth-nfsd", &["berth-core", "berth-host", "berth-nfs"]),
    ("berth-driver", &["berth-core", "berth-csi", "berth-host", "berth-journal"]),
    (
        "berth-backends",
        &[
            "berth-core",
            "berth-driver",
            "berth-flex",
            "berth-fuse",
            "berth-host",
            "berth-journal",
            "berth-nfs",
        ],
    ),
    ("berth-certify", &["berth-csi", "berth-host"]),
    ("berth-dev", &["berth-certify", "berth-core", "berth-csi", "berth-host"]),
    ("berth-cloud", &["berth-core", "berth-host", "berth-journal"]),
    ("berth-apiserver", &["berth-core", "berth-host", "berth-journal"]),
    ("berth-kube", &["berth-core"]),
    ("berth-controllers", &["berth-core", "berth-flex", "berth-host", "berth-kube"]),
    ("berth-sidecars", &["berth-core", "berth-csi", "berth-kube"]),
    ("berth-node", &["berth-core", "berth-csi", "berth-flex", "berth-host", "berth-kube", "berth-runtime"]),
    ("berth-network", &["berth-core", "berth-kube"]),
    ("berth-ui", &["berth-core", "berth-kube"]),
    // For tests alone: no other row may name it.
    ("berth-testkit", &["berth-apiserver", "berth-csi", "berth-kube"]),
    (
        "berth",
        &[
            "berth-core",
            "berth-csi",
            "berth-flex",
            "berth-fuse",
            "berth-host",
            "berth-journal",
            "berth-nfs",
            "berth-nfsd",
            "berth-driver",
            "berth-backends",
            "berth-certify",
            "berth-cloud",
            "berth-dev",
            "berth-apiserver",
            "berth-kube",
            "berth-controllers",
            "berth-network",
            "berth-sidecars",
            "berth-node",
            "berth-runtime",
            "berth-ui",
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
            let code = code.replace("clap::Command::new(", "");
            assert!(is_test || !code.contains("Command::new("), "{}:{}", relative.display(), number + 1);
        }
    }
}

#[test]
fn names_of_kubernetes_stand_in_berth_core() {
    let crates = root().join("crates");
    let mut found = Vec::new();
    for path in sources() {
        let Ok(relative) = path.strip_prefix(&crates) else { continue };
        let is_test = relative.components().any(|part| {
            let name = part.as_os_str();
            name == "tests" || name == "tests.rs" || name == "examples"
        });
        if is_test
            || relative.starts_with("berth-testkit")
            || relative.starts_with("berth-core/src/names")
            || relative.ends_with("berth-core/src/names.rs")
        {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let own = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        for (number, line) in own.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
        {
            // Every second part is inside quotes.
            let mut literals = line.split('"').skip(1).step_by(2);
            if literals.any(|text| text.contains("kubernetes.io/") || text.contains("k8s.io/")) {
                found.push(format!("{}:{}", relative.display(), number + 1));
            }
        }
    }
    assert!(found.is_empty(), "move these names into berth_core::names: {found:#?}");
}

/// The doc comments (`///`) of a file that have at most three words, with their lines.
fn short_comments(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut comment: Option<(usize, String)> = None;
    for (number, line) in text.lines().chain([""]).enumerate() {
        if let Some(words) = line.trim_start().strip_prefix("///") {
            let (_, text) = comment.get_or_insert((number + 1, String::new()));
            text.push_str(words);
        } else if let Some(whole) = comment.take() {
            found.extend(Some(whole).filter(|(_, text)| text.split_whitespace().count() <= 3));
        }
    }
    found
}

#[test]
fn doc_comments_are_sentences() {
    let mut wrong = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(root()).unwrap().display().to_string();
        if text.starts_with("//! @generated ") || name.contains("/target/") {
            continue;
        }
        wrong.extend(
            short_comments(&text).into_iter().map(|(line, comment)| format!("{name}:{line}:{comment}")),
        );
    }
    assert!(
        wrong.is_empty(),
        "write a sentence that says what the caller may rely on, or nothing: {wrong:#?}"
    );
}

/// Names that say nothing to somebody who knows Kubernetes storage and has never seen this code.
const UNCLEAR_TYPES: &[&str] =
    &["Place", "Seen", "Known", "Told", "Drawer", "Suspects", "Who", "Here", "Wanted"];
const UNCLEAR_MODULES: &[&str] = &["alone", "together", "beside"];
const UNCLEAR_FUNCTIONS: &[&str] =
    &["heed", "tell", "told", "let_go", "furnish", "look", "try_to_be_selected"];

#[test]
fn types_modules_and_functions_have_names_of_the_field() {
    let mut wrong = Vec::new();
    for path in sources() {
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in text.lines().enumerate() {
            let mut words = line
                .split_whitespace()
                .skip_while(|word| word.starts_with("pub") || *word == "async" || *word == "const");
            let (keyword, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
            let unclear = match keyword {
                "struct" | "enum" | "trait" | "type" => UNCLEAR_TYPES.contains(&name),
                "mod" => UNCLEAR_MODULES.contains(&name),
                "fn" => UNCLEAR_FUNCTIONS.contains(&name),
                _ => false,
            };
            if unclear {
                wrong.push(format!("{}:{}: {name}", path.display(), number + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The least number of lines with which a crate says what it is for, what its main types are and where to start reading.
const PAGE: usize = 12;

#[test]
fn every_crate_opens_with_a_page() {
    let mut wrong = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let source = entry.unwrap().path().join("src");
        let path = Some(source.join("lib.rs")).filter(|path| path.exists()).unwrap_or(source.join("main.rs"));
        let text = fs::read_to_string(&path).unwrap();
        // A page may quote a program by `#![doc = include_str!(…)]`.
        let page = text.lines().take_while(|line| line.starts_with("//!") || line.starts_with("#![doc"));
        let lines = page.count();
        if lines < PAGE {
            wrong.push(format!("{} opens with {lines} lines", path.display()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The strings of a list in a section of deny.toml.
fn listed(section: &str, key: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join("deny.toml")).expect("deny.toml can be read");
    let (_, section) = text.split_once(&format!("\n[{section}]\n")).expect("deny.toml has the section");
    let section = section.split("\n[").next().expect("a split has a first part");
    let (_, list) = section.split_once(&format!("\n{key} = [")).expect("the section has the list");
    let list = list.split("\n]").next().expect("a split has a first part");
    // Of a table in the list, the first string: the crate.
    let lines = list.lines().map(str::trim).filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split('"').nth(1)).map(str::to_owned).collect()
}

/// What cargo knows of every package that is built for this machine.
fn packages() -> Vec<Value> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = machine::command(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", &target])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let nodes = metadata["resolve"]["nodes"].as_array().expect("cargo prints a list");
    let built: BTreeSet<_> =
        nodes.iter().map(|node| node["id"].as_str().expect("cargo prints a string")).collect();
    let packages = metadata["packages"].as_array().expect("cargo prints a list").iter();
    packages
        .filter(|package| built.contains(package["id"].as_str().expect("cargo prints a string")))
        .cloned()
        .collect()
}

fn name(package: &Value) -> String {
    format!(
        "{} {}",
        package["name"].as_str().expect("cargo prints a string"),
        package["version"].as_str().expect("cargo prints a string")
    )
}

#[test]
fn dependencies_have_licences_and_sources_that_deny_toml_allows() {
    let allowed = listed("licenses", "allow");
    let is_allowed = |licence: &str| {
        let parts = licence.replace('/', " OR ").replace(['(', ')'], " ");
        parts.split(" AND ").all(|any| {
            any.split(" OR ")
                .any(|one| allowed.iter().any(|allowed| one.trim().trim_end_matches('+') == allowed))
        })
    };
    for package in packages() {
        let licence = package["license"].as_str().unwrap_or("no licence");
        assert!(is_allowed(licence), "{}: {licence}", name(&package));
        let source = package["source"].as_str();
        let from_registry = source == Some("registry+https://github.com/rust-lang/crates.io-index");
        assert!(source.is_none() || from_registry, "{}: {source:?}", name(&package));
    }
}

#[test]
fn a_crate_is_built_in_two_versions_only_where_deny_toml_says_why() {
    let explained = listed("bans", "skip");
    let mut versions = BTreeMap::<String, BTreeSet<String>>::new();
    for package in packages() {
        let of = versions.entry(package["name"].as_str().unwrap().to_owned()).or_default();
        of.insert(package["version"].as_str().unwrap().to_owned());
    }
    for (name, versions) in &versions {
        assert!(versions.len() == 1 || explained.contains(name), "{name}: {versions:?}");
    }
    for name in explained {
        assert!(versions.get(&name).is_some_and(|versions| versions.len() > 1), "{name} needs no exception");
    }
}

#[test]
fn every_dependency_is_used() {
    for manifest in fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .chain([root().join("tests")])
    {
        let text = fs::read_to_string(manifest.join("Cargo.toml")).unwrap();
        let mut files = Vec::new();
        rust_files(&manifest, &mut files);
        let sources: Vec<_> = files.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
        let mut is_dependency = false;
        for line in text.lines() {
            if line.starts_with('[') {
                is_dependency = line.ends_with("dependencies]");
            }
            let Some(dependency) = line
                .split(['.', ' ', '='])
                .next()
                .filter(|name| is_dependency && !name.is_empty() && !name.starts_with(['[', '#']))
            else {
                continue;
            };
            let word = dependency.replace('-', "_");
            let uses = |source: &String| {
                source.match_indices(&word).any(|(at, _)| {
                    let before = source[..at].chars().next_back();
                    let after = &source[at + word.len()..];
                    before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '.')
                        && (after.starts_with("::") || after.starts_with(';') || after.starts_with(" as "))
                })
            };
            assert!(sources.iter().any(uses), "{} does not use {dependency}", manifest.display());
        }
    }
}
