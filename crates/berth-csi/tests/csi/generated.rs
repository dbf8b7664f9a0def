//! The generated code that is checked in is what `proto/csi.proto` and `proto/registration.proto` give.
//!
//! Beside what prost and tonic generate there is what depends on the options of the published file: a `Debug` without
//! secrets, the method and the answer of each request, the table of methods, and the list of messages that the test of
//! `Debug` walks. `BERTH_CSI_GENERATE=1 cargo test -p berth-csi --test csi generated::` writes the files again.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use prost_reflect::{DescriptorPool, ExtensionDescriptor, FieldDescriptor, MessageDescriptor, Value};

type Failure = Box<dyn std::error::Error>;

/// Directory of the crate; the files below are named relative to it.
const CRATE: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn the_code_that_is_checked_in_is_what_the_protocols_give() {
    let write = std::env::var_os("BERTH_CSI_GENERATE").is_some();
    let mut outdated = Vec::new();
    for (path, expected) in generate().unwrap() {
        let path = Path::new(CRATE).join(path);
        if fs::read_to_string(&path).ok().as_deref() == Some(expected.as_str()) {
            continue;
        }
        if write {
            fs::write(&path, expected).unwrap();
        } else {
            outdated.push(path);
        }
    }
    assert!(outdated.is_empty(), "write these again with BERTH_CSI_GENERATE=1: {outdated:#?}");
}

/// Each generated file, with its text.
fn generate() -> Result<[(&'static str, String); 3], Failure> {
    let directory = tempfile::tempdir()?;
    let proto = Path::new(CRATE).join("proto");
    let mut compiler = protox::Compiler::new([&proto])?;
    compiler.include_source_info(true).include_imports(true).open_file("csi.proto")?;
    let pool = compiler.descriptor_pool();
    let secret = pool.get_extension_by_name("csi.v1.csi_secret").ok_or("csi.proto declares no csi_secret")?;
    let messages = messages_of_csi(&pool);
    let with_secrets: Vec<&MessageDescriptor> =
        messages.iter().filter(|message| message.fields().any(|field| is_secret(&field, &secret))).collect();

    tonic_prost_build::configure()
        .out_dir(&directory)
        .btree_map(".")
        .generate_default_stubs(true)
        .skip_debug(with_secrets.iter().map(|message| format!(".{}", message.full_name())))
        .compile_fds(compiler.file_descriptor_set())?;
    let csi = [
        "//! @generated from `proto/csi.proto` by `tests/csi/generated.rs`; do not edit.\n".to_owned(),
        fs::read_to_string(directory.path().join("csi.v1.rs"))?,
        debug_without_secrets(&with_secrets, &secret)?,
        calls(&pool)?,
        methods(&pool)?,
    ];

    let mut compiler = protox::Compiler::new([&proto])?;
    compiler.include_source_info(true).include_imports(true).open_file("registration.proto")?;
    tonic_prost_build::configure().out_dir(&directory).compile_fds(compiler.file_descriptor_set())?;
    let registration = [
        "//! @generated from `proto/registration.proto` by `tests/csi/generated.rs`; do not edit.\n"
            .to_owned(),
        fs::read_to_string(directory.path().join("pluginregistration.rs"))?,
        calls(&compiler.descriptor_pool())?,
    ];
    Ok([
        ("src/v1/generated.rs", csi.join("\n")),
        ("src/registration/generated.rs", registration.join("\n")),
        ("tests/csi/messages.rs", every_message(&messages)?),
    ])
}

fn messages_of_csi(pool: &DescriptorPool) -> Vec<MessageDescriptor> {
    pool.all_messages()
        .filter(|message| message.package_name() == "csi.v1" && !message.is_map_entry())
        .collect()
}

fn is_secret(field: &FieldDescriptor, secret: &ExtensionDescriptor) -> bool {
    matches!(field.options().get_extension(secret).as_ref(), Value::Bool(true))
}

/// `Debug` of each message with secrets; the messages themselves are generated without one.
fn debug_without_secrets(
    messages: &[&MessageDescriptor],
    secret: &ExtensionDescriptor,
) -> Result<String, Failure> {
    let mut code = String::new();
    for message in messages {
        let name = message.name();
        writeln!(code, "impl core::fmt::Debug for {} {{", rust_path(message))?;
        writeln!(code, "    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {{")?;
        writeln!(code, "        f.debug_struct({name:?})")?;
        for field in message.fields().filter(|field| field.containing_oneof().is_none()) {
            let field_name = field.name();
            if !is_secret(&field, secret) {
                writeln!(code, "            .field({field_name:?}, &self.{field_name})")?;
            } else if field.is_map() {
                writeln!(code, "            .field({field_name:?}, &super::Stripped(&self.{field_name}))")?;
            } else {
                return Err(format!("{}: only maps are known as secrets", field.full_name()).into());
            }
        }
        for oneof in message.oneofs() {
            if let Some(field) = oneof.fields().find(|field| is_secret(field, secret)) {
                return Err(format!("{}: a secret in a oneof is not known", field.full_name()).into());
            }
            writeln!(code, "            .field({:?}, &self.{})", oneof.name(), oneof.name())?;
        }
        writeln!(code, "            .finish()\n    }}\n}}\n")?;
    }
    Ok(code)
}

/// The method and the answer of each request that is answered once.
fn calls(pool: &DescriptorPool) -> Result<String, Failure> {
    let mut code = String::new();
    for service in pool.services() {
        for method in service.methods().filter(|method| !method.is_server_streaming()) {
            writeln!(code, "impl crate::Call for {} {{", rust_path(&method.input()))?;
            writeln!(
                code,
                "    const METHOD: &'static str = \"/{}/{}\";",
                service.full_name(),
                method.name()
            )?;
            writeln!(code, "    type Answer = {};\n}}\n", rust_path(&method.output()))?;
        }
    }
    Ok(code)
}

/// Every method by its path on the wire, and whether it answers with a stream.
fn methods(pool: &DescriptorPool) -> Result<String, Failure> {
    let mut code =
        String::from("/// Every method of CSI by its path, and whether it answers with a stream.\n");
    writeln!(code, "pub const METHODS: &[(&str, bool)] = &[")?;
    for service in pool.services() {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            writeln!(code, "    ({path:?}, {}),", method.is_server_streaming())?;
        }
    }
    code.push_str("];\n");
    Ok(code)
}

/// The full name of every message with a function that decodes it and formats it both ways.
fn every_message(messages: &[MessageDescriptor]) -> Result<String, Failure> {
    let mut code = String::from(
        "//! @generated from `proto/csi.proto` by `tests/csi/generated.rs`; do not edit.\n\n\
         use crate::secrets::{Formatted, formatted};\n\n\
         pub(crate) const EVERY_MESSAGE: &[(&str, Formatted)] = &[\n",
    );
    for message in messages {
        let path = rust_path(message);
        writeln!(code, "    ({:?}, formatted::<berth_csi::v1::{path}>),", message.full_name())?;
    }
    code.push_str("];\n");
    Ok(code)
}

/// Where prost puts a message: a nested one in a module named after the message around it.
fn rust_path(message: &MessageDescriptor) -> String {
    let mut path = match message.name() {
        "RPC" => "Rpc".to_owned(),
        name => name.to_owned(),
    };
    let mut around = message.parent_message();
    while let Some(parent) = around {
        path = format!("{}::{path}", snake_case(parent.name()));
        around = parent.parent_message();
    }
    path
}

fn snake_case(camel: &str) -> String {
    let mut snake = String::new();
    for letter in camel.chars() {
        if letter.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}
