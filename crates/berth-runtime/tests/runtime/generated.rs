//! The generated code of the CRI that is checked in is what `proto/cri.proto` gives, and that file declares nothing that the
//! published one does not.
//!
//! `BERTH_CRI_GENERATE=1 cargo test -p berth-runtime --test runtime generated::` writes the code again. The published file is
//! found through `BERTH_CRI_PROTO`, or else by asking Go for the module that carries it.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use prost_reflect::DescriptorPool;

const MODULE: &str = "k8s.io/cri-api@v0.37.2";
const OURS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/proto/cri.proto");
const GENERATED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/cri/v1/generated.rs");

#[test]
fn the_code_that_is_checked_in_is_what_the_protocol_gives() {
    let expected = generate();
    if std::env::var_os("BERTH_CRI_GENERATE").is_some() {
        fs::write(GENERATED, &expected).unwrap();
    }
    assert!(
        fs::read_to_string(GENERATED).unwrap_or_default() == expected,
        "write {GENERATED} again with BERTH_CRI_GENERATE=1"
    );
}

#[test]
fn every_declaration_is_one_of_the_published_interface() {
    let (ours, published) = (declarations(Path::new(OURS)), declarations(&published()));
    assert!(ours.len() > 200 && published.len() > ours.len(), "{} and {}", ours.len(), published.len());
    let surplus: Vec<_> = ours.difference(&published).collect();
    assert!(surplus.is_empty(), "not in the published file: {surplus:#?}");
}

/// Messages carry environments, commands and passwords: their `Debug` says their name and nothing else.
fn generate() -> String {
    let directory = tempfile::tempdir().unwrap();
    let mut compiler = protox::Compiler::new([Path::new(OURS).parent().unwrap()]).unwrap();
    compiler.include_source_info(true).include_imports(true).open_file("cri.proto").unwrap();
    let pool = compiler.descriptor_pool();
    let messages = || pool.all_messages().filter(|message| !message.is_map_entry());
    tonic_prost_build::configure()
        .out_dir(&directory)
        .btree_map(".")
        .build_server(false)
        .skip_debug(messages().map(|message| format!(".{}", message.full_name())))
        .compile_fds(compiler.file_descriptor_set())
        .unwrap();
    let mut code =
        "//! @generated from `proto/cri.proto` by `tests/runtime/generated.rs`; do not edit.\n\n".to_owned();
    code.push_str(&fs::read_to_string(directory.path().join("runtime.v1.rs")).unwrap());
    for message in messages() {
        let name = message.name();
        // The generator writes acronyms as words.
        let kind = name.replace("DNS", "Dns");
        writeln!(code, "\nimpl core::fmt::Debug for {kind} {{").unwrap();
        writeln!(code, "    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {{")
            .unwrap();
        writeln!(code, "        f.write_str({name:?})\n    }}\n}}").unwrap();
    }
    code
}

/// Every method, field and value, with its number and type.
fn declarations(path: &Path) -> BTreeSet<String> {
    let mut compiler = protox::Compiler::new([path.parent().unwrap()]).unwrap();
    compiler.include_imports(true).open_file(path.file_name().unwrap()).unwrap();
    let pool: DescriptorPool = compiler.descriptor_pool();
    let mut found = BTreeSet::new();
    for service in pool.services() {
        for method in service.methods() {
            let (input, output) = (method.input(), method.output());
            let streams = (method.is_client_streaming(), method.is_server_streaming());
            found.insert(format!(
                "{}: {} {} {streams:?}",
                method.full_name(),
                input.full_name(),
                output.full_name()
            ));
        }
    }
    for message in pool.all_messages() {
        for field in message.fields() {
            let (number, kind, cardinality) = (field.number(), field.kind(), field.cardinality());
            found.insert(format!("{}: {number} {kind:?} {cardinality:?}", field.full_name()));
        }
    }
    for kind in pool.all_enums() {
        found.extend(kind.values().map(|value| format!("{}: {}", value.full_name(), value.number())));
    }
    found
}

fn published() -> PathBuf {
    if let Some(path) = std::env::var_os("BERTH_CRI_PROTO") {
        return path.into();
    }
    let output = Command::new("go").args(["mod", "download", "-json", MODULE]).output();
    let output = output.expect("go runs; or set BERTH_CRI_PROTO to the published api.proto");
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let directory =
        answer["Dir"].as_str().unwrap_or_else(|| panic!("go mod download {MODULE} gave {answer}"));
    Path::new(directory).join("pkg/apis/runtime/v1/api.proto")
}
