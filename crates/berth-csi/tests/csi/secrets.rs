//! No secret of any message reaches `Debug`, and everything else does.

use std::collections::HashMap;
use std::fmt::Debug;

use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor, Value,
};

use berth_csi::v1;

use crate::messages::EVERY_MESSAGE;

/// Decodes a message and formats it on one line and on many.
pub(crate) type Formatted = fn(&[u8]) -> [String; 2];

const SECRET: &str = "marker-of-a-secret";

pub(crate) fn formatted<M: prost::Message + Default + Debug>(bytes: &[u8]) -> [String; 2] {
    let message = M::decode(bytes).expect("the sample has the type of its message");
    assert_eq!(message.encode_to_vec().len(), bytes.len(), "every field of the sample is one of the message");
    [format!("{message:?}"), format!("{message:#?}")]
}

#[test]
fn no_secret_of_any_message_appears_in_debug_and_everything_else_does() {
    let mut compiler = protox::Compiler::new([concat!(env!("CARGO_MANIFEST_DIR"), "/proto")]).unwrap();
    compiler.include_imports(true).open_file("csi.proto").unwrap();
    let pool = compiler.descriptor_pool();
    let mut walked = 0;
    let mut secrets = 0;
    for message in pool.all_messages().filter(|m| m.package_name() == "csi.v1" && !m.is_map_entry()) {
        let name = message.full_name();
        let (_, format) = EVERY_MESSAGE
            .iter()
            .find(|(known, _)| *known == name)
            .unwrap_or_else(|| panic!("{name} is missing from the list"));
        // Each turn sets another member of every oneof.
        for turn in 0..2 {
            let mut filler = Filler { pool: &pool, turn, shown: Vec::new(), secrets: 0 };
            let sample = filler.fill(&message);
            for text in format(&prost::Message::encode_to_vec(&sample)) {
                assert!(!text.contains(SECRET), "{name} shows a secret: {text}");
                for shown in &filler.shown {
                    assert!(text.contains(shown), "{name} does not show {shown}: {text}");
                }
                assert_eq!(text.matches("***stripped***").count(), filler.secrets, "{name}: {text}");
            }
            secrets += filler.secrets;
        }
        walked += 1;
    }
    assert_eq!(walked, EVERY_MESSAGE.len());
    assert!(secrets >= 2 * 19, "only {secrets} secrets were tried");
}

#[test]
fn a_message_without_secrets_says_so() {
    let request = v1::DeleteVolumeRequest { volume_id: "v".to_owned(), ..Default::default() };
    assert_eq!(format!("{request:?}"), r#"DeleteVolumeRequest { volume_id: "v", secrets: {} }"#);
}

/// Fills every field of a message, and remembers what `Debug` must show of it.
struct Filler<'a> {
    pool: &'a DescriptorPool,
    turn: usize,
    shown: Vec<String>,
    secrets: usize,
}

impl Filler<'_> {
    fn fill(&mut self, descriptor: &MessageDescriptor) -> DynamicMessage {
        let mut message = DynamicMessage::new(descriptor.clone());
        for field in descriptor.fields() {
            if let Some(oneof) = field.containing_oneof() {
                let chosen = self.turn % oneof.fields().len();
                if oneof.fields().nth(chosen) != Some(field.clone()) {
                    continue;
                }
            }
            let value = self.value_of(&field);
            message.set_field(&field, value);
        }
        message
    }

    fn value_of(&mut self, field: &FieldDescriptor) -> Value {
        if self.is_secret(field) {
            self.secrets += 1;
            return map_of(&format!("{SECRET}-key"), SECRET);
        }
        if field.is_map() {
            let (key, value) = (format!("{}-key", field.name()), format!("{}-value", field.name()));
            self.shown.extend([key.clone(), value.clone()]);
            return map_of(&key, &value);
        }
        let value = self.single(field);
        if field.is_list() { Value::List(vec![value]) } else { value }
    }

    fn single(&mut self, field: &FieldDescriptor) -> Value {
        match field.kind() {
            Kind::String => {
                let text = format!("{}-text", field.name());
                self.shown.push(text.clone());
                Value::String(text)
            }
            Kind::Bool => {
                self.shown.push("true".to_owned());
                Value::Bool(true)
            }
            Kind::Int32 => {
                self.shown.push("32323232".to_owned());
                Value::I32(32_323_232)
            }
            Kind::Int64 => {
                self.shown.push("6464646464".to_owned());
                Value::I64(6_464_646_464)
            }
            Kind::Enum(enumeration) => {
                let last = enumeration.values().last().expect("an enum has values");
                self.shown.push(camel_case(last.name()));
                Value::EnumNumber(last.number())
            }
            Kind::Message(nested) => Value::Message(self.fill(&nested)),
            other => panic!("{}: the test knows no value of kind {other:?}", field.full_name()),
        }
    }

    fn is_secret(&self, field: &FieldDescriptor) -> bool {
        let secret = self.pool.get_extension_by_name("csi.v1.csi_secret").expect("the option is declared");
        field.options().get_extension(&secret).as_bool() == Some(true)
    }
}

fn camel_case(screaming: &str) -> String {
    screaming.split('_').flat_map(|word| [word[..1].to_owned(), word[1..].to_lowercase()]).collect()
}

fn map_of(key: &str, value: &str) -> Value {
    Value::Map(HashMap::from([(MapKey::String(key.to_owned()), Value::String(value.to_owned()))]))
}
