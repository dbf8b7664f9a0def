//! Our `csi.proto` declares exactly what the published one declares.
//!
//! The published file is found through `BERTH_CSI_PROTO`, or else by asking Go for the module that carries it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use prost_reflect::{
    EnumDescriptor, ExtensionDescriptor, FieldDescriptor, FileDescriptor, MessageDescriptor,
    ServiceDescriptor,
};

const MODULE: &str = "github.com/container-storage-interface/spec@v1.13.0";

/// What is declared: the place of each declaration, and all there is to say about it.
type Declarations = BTreeMap<String, String>;

#[test]
fn our_csi_proto_declares_what_the_published_one_declares() {
    let ours = declarations(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/proto/csi.proto")));
    let published = declarations(&published_proto());
    assert!(published.len() > 500, "the published file was not read: {} declarations", published.len());
    let mut differences = Vec::new();
    for (place, expected) in &published {
        match ours.get(place) {
            None => differences.push(format!("missing: {place} ({expected})")),
            Some(found) if found != expected => {
                differences.push(format!("{place}: published {expected}, ours {found}"));
            }
            Some(_) => {}
        }
    }
    differences
        .extend(ours.keys().filter(|place| !published.contains_key(*place)).map(|p| format!("surplus: {p}")));
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn nineteen_fields_or_more_are_secret_and_all_are_maps_of_strings() {
    let ours = declarations(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/proto/csi.proto")));
    let secrets: Vec<_> = ours.iter().filter(|(_, declared)| declared.contains("csi_secret")).collect();
    let fields: Vec<_> = secrets.iter().filter(|(place, _)| place.starts_with("field")).collect();
    assert!(fields.len() >= 19, "{fields:#?}");
    for (place, declared) in fields {
        assert!(declared.contains("map true") && place.ends_with("secrets"), "{place}: {declared}");
    }
}

fn published_proto() -> PathBuf {
    if let Some(path) = std::env::var_os("BERTH_CSI_PROTO") {
        return path.into();
    }
    #[expect(clippy::disallowed_methods, reason = "a test asks Go where its modules are")]
    let asked = std::process::Command::new("go").args(["mod", "download", "-json", MODULE]).output();
    let without = "set BERTH_CSI_PROTO to the published csi.proto, or install Go";
    let output = asked.unwrap_or_else(|error| panic!("go does not run ({error}); {without}"));
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let Some(directory) = answer["Dir"].as_str() else {
        panic!(
            "go mod download {MODULE} gave no directory: {} {}; {without}",
            answer["Error"],
            String::from_utf8_lossy(&output.stderr)
        );
    };
    Path::new(directory).join("csi.proto")
}

fn declarations(path: &Path) -> Declarations {
    let directory = path.parent().expect("a file has a directory");
    let name = path.file_name().and_then(|name| name.to_str()).expect("the file has a name");
    let mut compiler = protox::Compiler::new([directory]).expect("the directory can be searched");
    compiler.include_imports(true);
    compiler.open_file(name).unwrap_or_else(|error| panic!("compiling {}: {error}", path.display()));
    let pool = compiler.descriptor_pool();
    let file = pool.get_file_by_name(name).expect("the file was just compiled");
    let mut declared = Declarations::new();
    declare_file(&file, &mut declared);
    declared
}

fn declare_file(file: &FileDescriptor, declared: &mut Declarations) {
    let imports: Vec<String> = file.dependencies().map(|import| import.name().to_owned()).collect();
    let about = format!("package {}, {:?}, imports {imports:?}", file.package_name(), file.syntax());
    declared.insert("file".to_owned(), about);
    file.messages().for_each(|message| declare_message(&message, declared));
    file.enums().for_each(|enumeration| declare_enum(&enumeration, declared));
    file.services().for_each(|service| declare_service(&service, declared));
    file.extensions().for_each(|extension| declare_extension(&extension, declared));
}

fn declare_message(message: &MessageDescriptor, declared: &mut Declarations) {
    let proto = message.descriptor_proto();
    let ranges: Vec<_> = proto.reserved_range.iter().map(|range| (range.start(), range.end())).collect();
    declared.insert(
        format!("message {}", message.full_name()),
        format!("options [{}], reserved {ranges:?} {:?}", message.options(), proto.reserved_name),
    );
    message.fields().for_each(|field| declare_field(&field, declared));
    message.child_messages().for_each(|child| declare_message(&child, declared));
    message.child_enums().for_each(|child| declare_enum(&child, declared));
}

fn declare_field(field: &FieldDescriptor, declared: &mut Declarations) {
    let oneof = field.containing_oneof().map(|oneof| oneof.name().to_owned());
    declared.insert(
        format!("field {}", field.full_name()),
        format!(
            "number {}, {:?}, {:?}, json {}, oneof {oneof:?}, map {}, presence {}, options [{}]",
            field.number(),
            field.kind(),
            field.cardinality(),
            field.json_name(),
            field.is_map(),
            field.supports_presence(),
            field.options()
        ),
    );
}

fn declare_enum(enumeration: &EnumDescriptor, declared: &mut Declarations) {
    let proto = enumeration.enum_descriptor_proto();
    let ranges: Vec<_> = proto.reserved_range.iter().map(|range| (range.start(), range.end())).collect();
    declared.insert(
        format!("enum {}", enumeration.full_name()),
        format!("options [{}], reserved {ranges:?} {:?}", enumeration.options(), proto.reserved_name),
    );
    for value in enumeration.values() {
        declared.insert(
            format!("value {}.{}", enumeration.full_name(), value.name()),
            format!("number {}, options [{}]", value.number(), value.options()),
        );
    }
}

fn declare_service(service: &ServiceDescriptor, declared: &mut Declarations) {
    declared.insert(format!("service {}", service.full_name()), format!("options [{}]", service.options()));
    for method in service.methods() {
        declared.insert(
            format!("method {}", method.full_name()),
            format!(
                "{} -> {}, streams {} {}, options [{}]",
                method.input().full_name(),
                method.output().full_name(),
                method.is_client_streaming(),
                method.is_server_streaming(),
                method.options()
            ),
        );
    }
}

fn declare_extension(extension: &ExtensionDescriptor, declared: &mut Declarations) {
    declared.insert(
        format!("extension {}", extension.full_name()),
        format!(
            "of {}, number {}, {:?}, {:?}",
            extension.containing_message().full_name(),
            extension.number(),
            extension.kind(),
            extension.cardinality()
        ),
    );
}
