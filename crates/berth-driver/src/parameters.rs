//! Parameters, read once into a type of the backend's own.

use std::collections::BTreeMap;

use berth_core::names::KUBERNETES_PARAMETER_PREFIX;
use serde::de::{self, DeserializeOwned, IntoDeserializer, value::MapDeserializer};

use crate::{Error, Parameters};

/// A type that a class's parameters are read into.
///
/// Every `Deserialize` struct is one: its fields are the keys, values are read from text, and a key that is no field
/// is refused by its name, except those that Kubernetes adds. (`#[serde(flatten)]` would undo that.)
pub trait FromParameters: Sized + Send + Sync + 'static {
    /// Reads the parameters; the error names the one that is wrong.
    fn from_parameters(parameters: &Parameters) -> Result<Self, InvalidParameter>;
}

impl<T: DeserializeOwned + Send + Sync + 'static> FromParameters for T {
    fn from_parameters(parameters: &Parameters) -> Result<Self, InvalidParameter> {
        let own = parameters.iter().filter(|(key, _)| !key.starts_with(KUBERNETES_PARAMETER_PREFIX));
        T::deserialize(Reader(&own.collect()))
    }
}

/// Which parameter is wrong, and why.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidParameter(String);

impl From<InvalidParameter> for Error {
    fn from(invalid: InvalidParameter) -> Self {
        Self::Invalid(invalid.0)
    }
}

impl de::Error for InvalidParameter {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }

    fn missing_field(field: &'static str) -> Self {
        Self(format!("parameter {field:?} is missing"))
    }
}

struct Reader<'a>(&'a BTreeMap<&'a String, &'a String>);

impl Reader<'_> {
    fn refuse_unknown(&self, known: &[&str]) -> Result<(), InvalidParameter> {
        match self.0.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(()),
            Some(key) => {
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(InvalidParameter(format!("parameter {key:?} is not known; known are {known}")))
            }
        }
    }
}

impl<'de> de::Deserializer<'de> for Reader<'_> {
    type Error = InvalidParameter;

    fn deserialize_struct<V: de::Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, InvalidParameter> {
        self.refuse_unknown(fields)?;
        self.deserialize_map(visitor)
    }

    fn deserialize_map<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
        let pairs = self.0.iter().map(|(key, text)| (key.as_str(), Text { key, text }));
        visitor.visit_map(MapDeserializer::new(pairs))
    }

    fn deserialize_unit<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
        self.refuse_unknown(&[])?;
        visitor.visit_unit()
    }

    fn deserialize_any<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
        self.deserialize_map(visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option seq tuple tuple_struct enum
        identifier ignored_any unit_struct newtype_struct
    }
}

/// The value of one parameter, which is read from its text.
struct Text<'a> {
    key: &'a str,
    text: &'a str,
}

impl Text<'_> {
    fn wrong(&self, why: impl std::fmt::Display) -> InvalidParameter {
        InvalidParameter(format!("parameter {:?}: {:?} {why}", self.key, self.text))
    }
}

impl IntoDeserializer<'_, InvalidParameter> for Text<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

macro_rules! from_text {
    ($($deserialize:ident $visit:ident $type:ty;)*) => {$(
        fn $deserialize<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
            match self.text.parse::<$type>() {
                Ok(value) => visitor.$visit(value),
                Err(error) => Err(self.wrong(format_args!("is no {}: {error}", stringify!($type)))),
            }
        }
    )*};
}

impl<'de> de::Deserializer<'de> for Text<'_> {
    type Error = InvalidParameter;

    from_text! {
        deserialize_bool visit_bool bool;
        deserialize_u8 visit_u8 u8;
        deserialize_u16 visit_u16 u16;
        deserialize_u32 visit_u32 u32;
        deserialize_u64 visit_u64 u64;
        deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
        deserialize_f64 visit_f64 f64;
    }

    fn deserialize_any<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
        visitor.visit_str(self.text)
    }

    fn deserialize_option<V: de::Visitor<'de>>(self, visitor: V) -> Result<V::Value, InvalidParameter> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: de::Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, InvalidParameter> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: de::Visitor<'de>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, InvalidParameter> {
        if !known.contains(&self.text) {
            return Err(self.wrong(format_args!("is not one of {}", known.join(", "))));
        }
        visitor.visit_enum(IntoDeserializer::<InvalidParameter>::into_deserializer(self.text))
    }

    serde::forward_to_deserialize_any! {
        i8 i16 f32 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map struct identifier
        ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Class {
        server: String,
        sub_dir: Option<String>,
        #[serde(default)]
        port: u16,
        #[serde(default)]
        disk: Disk,
    }

    #[derive(Debug, PartialEq, Default, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Disk {
        #[default]
        Slow,
        VeryFast,
    }

    fn read<T: FromParameters>(pairs: &[(&str, &str)]) -> Result<T, String> {
        let parameters = pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        T::from_parameters(&parameters).map_err(|error| error.to_string())
    }

    #[test]
    fn values_are_read_from_text_and_the_error_names_the_parameter() {
        let all = [
            ("server", "s"),
            ("port", "2049"),
            ("disk", "very-fast"),
            ("subDir", "x"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ];
        let expected =
            Class { server: "s".into(), sub_dir: Some("x".into()), port: 2049, disk: Disk::VeryFast };
        assert_eq!(read(&all), Ok(expected));
        for (pairs, sentence) in [
            (&[][..], r#"parameter "server" is missing"#),
            (
                &[("server", "s"), ("sevrer", "t")],
                r#"parameter "sevrer" is not known; known are server, subDir, port, disk"#,
            ),
            (
                &[("server", "s"), ("port", "x")],
                r#"parameter "port": "x" is no u16: invalid digit found in string"#,
            ),
            (
                &[("server", "s"), ("disk", "blue")],
                r#"parameter "disk": "blue" is not one of slow, very-fast"#,
            ),
        ] {
            assert_eq!(read::<Class>(pairs), Err(sentence.to_owned()));
        }
        assert_eq!(read::<()>(&[]), Ok(()));
        assert!(read::<()>(&[("a", "b")]).is_err());
    }
}
