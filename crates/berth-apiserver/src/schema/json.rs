//! Reading JSON and noticing what a map would hide: keys that stand in an object twice.

use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// A body that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed {
    /// What it says; of a key that stands there twice, the last.
    pub value: Value,
    /// The paths of keys that stand there twice, as `spec.containers[0].name`.
    pub duplicates: Vec<String>,
}

/// Reads one JSON document.
pub fn parse(text: &[u8]) -> Result<Parsed, serde_json::Error> {
    let mut duplicates = Vec::new();
    let mut path = String::new();
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let seed = Reader { path: &mut path, duplicates: &mut duplicates };
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(Parsed { value, duplicates })
}

struct Reader<'a> {
    path: &'a mut String,
    duplicates: &'a mut Vec<String>,
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        let length = self.path.len();
        loop {
            use fmt::Write as _;
            write!(self.path, "[{}]", list.len()).map_err(A::Error::custom)?;
            let seed = Reader { path: self.path, duplicates: self.duplicates };
            let next = items.next_element_seed(seed)?;
            self.path.truncate(length);
            match next {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        let length = self.path.len();
        while let Some(key) = entries.next_key::<String>()? {
            if length > 0 {
                self.path.push('.');
            }
            self.path.push_str(&key);
            if map.contains_key(&key) {
                self.duplicates.push(self.path.clone());
            }
            let value = entries.next_value_seed(Reader { path: self.path, duplicates: self.duplicates })?;
            self.path.truncate(length);
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_that_stand_twice_are_reported_with_their_paths() {
        let text = br#"{"a":{"b":1,"b":2},"c":[{"d":1},{"d":1,"d":null}],"a":3}"#;
        let parsed = parse(text).unwrap();
        assert_eq!(parsed.duplicates, ["a.b", "c[1].d", "a"]);
        assert_eq!(parsed.value, json!({"a": 3, "c": [{"d": 1}, {"d": null}]}));
    }

    #[test]
    fn values_are_read_as_serde_json_reads_them() {
        let text = r#" {"n":[0,-1,18446744073709551615,1.5,1e300,true,false,null,"\u00e9\n"],"o":{}} "#;
        let parsed = parse(text.as_bytes()).unwrap();
        assert_eq!(parsed.value, serde_json::from_str::<Value>(text).unwrap());
        assert!(parsed.duplicates.is_empty());
    }

    #[test]
    fn bad_json_is_an_error_and_deep_nesting_does_not_overflow() {
        for text in ["", "{", "{}x", "[1,]", "{\"a\"}"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse("[".repeat(1_000_000).as_bytes()).is_err());
    }
}
