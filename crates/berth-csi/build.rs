//! Compiles `proto/registration.proto`, and `proto/csi.proto` with what depends on its options beside the messages: a
//! `Debug` without secrets, the table of methods, and the list of messages that the test of `Debug` walks.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use prost_reflect::{DescriptorPool, ExtensionDescriptor, FieldDescriptor, MessageDescriptor, Value};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    println!("cargo::rerun-if-changed=proto/csi.proto");
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_source_info(true).include_imports(true).open_file("csi.proto")?;
    let pool = compiler.descriptor_pool();
    let secret = pool.get_extension_by_name("csi.v1.csi_secret").ok_or("csi.proto declares no csi_secret")?;
    let messages = messages_of_csi(&pool);
    let with_secrets: Vec<&MessageDescriptor> =
        messages.iter().filter(|message| message.fields().any(|field| is_secret(&field, &secret))).collect();

    tonic_prost_build::configure()
        .btree_map(".")
        .generate_default_stubs(true)
        .skip_debug(with_secrets.iter().map(|message| format!(".{}", message.full_name())))
        .compile_fds(compiler.file_descriptor_set())?;

    println!("cargo::rerun-if-changed=proto/registration.proto");
    tonic_prost_build::configure().compile_fds(protox::compile(["registration.proto"], ["proto"])?)?;

    let out = env::var("OUT_DIR")?;
    let out = Path::new(&out);
    fs::write(out.join("debug_without_secrets.rs"), debug_without_secrets(&with_secrets, &secret)?)?;
    fs::write(out.join("methods.rs"), methods(&pool)?)?;
    fs::write(out.join("every_message.rs"), every_message(&messages)?)?;
    Ok(())
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

/// Every method by its path on the wire, and whether it answers with a stream.
fn methods(pool: &DescriptorPool) -> Result<String, Failure> {
    let mut code = String::from("[\n");
    for service in pool.services() {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            writeln!(code, "    ({path:?}, {}),", method.is_server_streaming())?;
        }
    }
    code.push_str("]\n");
    Ok(code)
}

/// The full name of every message with a function that decodes it and formats it both ways.
fn every_message(messages: &[MessageDescriptor]) -> Result<String, Failure> {
    let mut code = String::from("[\n");
    for message in messages {
        let path = rust_path(message);
        writeln!(code, "    ({:?}, formatted::<berth_csi::v1::{path}> as Formatted),", message.full_name())?;
    }
    code.push_str("]\n");
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
