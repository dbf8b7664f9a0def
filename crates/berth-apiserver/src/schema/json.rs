//! Reading JSON and YAML, and noticing what a map would hide: keys that stand in an object twice.
//!
//! YAML is read as the JSON it means. A few hundred bytes of YAML can mean gigabytes, because an alias repeats what its anchor
//! names; so the length of that JSON is counted while it is read, and what grows beyond the limit is refused before it is
//! built.

use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::DuplicateKeyPolicy;

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
    // JSON means no more than its own length.
    let mut left = usize::MAX;
    let seed = Reader { path: &mut path, duplicates: &mut duplicates, left: &mut left };
    let value = seed.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(Parsed { value, duplicates })
}

/// Reads one YAML document that means at most `limit` bytes of JSON.
pub fn parse_yaml(text: &[u8], limit: usize) -> Result<Parsed, String> {
    // The parser takes tens of kilobytes for each level, more than the threads of the runtime have room for.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("yaml".to_owned()).stack_size(YAML_STACK);
        let parsing = thread.spawn_scoped(scope, || parse_yaml_here(text, limit));
        let parsed = parsing.map_err(|error| error.to_string())?.join();
        parsed.unwrap_or_else(|_| Err("the YAML parser failed".to_owned()))
    })
}

fn parse_yaml_here(text: &[u8], limit: usize) -> Result<Parsed, String> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: YAML_DEPTH,
            flow_nesting_limit: YAML_DEPTH,
            max_documents: 1,
            // The length of the result is limited instead.
            enforce_alias_anchor_ratio: false,
        },
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        strict_booleans: true,
        with_snippet: false,
    };
    let mut duplicates = Vec::new();
    let mut path = String::new();
    let mut left = limit;
    let read = |deserializer: serde_saphyr::Deserializer<'_, '_>| {
        Reader { path: &mut path, duplicates: &mut duplicates, left: &mut left }.deserialize(deserializer)
    };
    let value = serde_saphyr::with_deserializer_from_slice_with_options(text, options, read)
        .map_err(|error| error.to_string())?;
    Ok(Parsed { value, duplicates })
}

/// YAML nests no deeper than this; stored objects nest less deep.
const YAML_DEPTH: usize = 128;
const YAML_STACK: usize = 16 << 20;

/// About how long a value is as JSON: escapes are not counted.
pub fn length(value: &Value) -> usize {
    match value {
        Value::Null => 4,
        Value::Bool(_) | Value::Number(_) => 1,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => 1 + items.iter().map(|item| 1 + length(item)).sum::<usize>(),
        Value::Object(map) => 1 + map.iter().map(|(key, value)| 4 + key.len() + length(value)).sum::<usize>(),
    }
}

struct Reader<'a> {
    path: &'a mut String,
    duplicates: &'a mut Vec<String>,
    /// How many more bytes of JSON the document may mean.
    left: &'a mut usize,
}

impl Reader<'_> {
    fn spend<E: serde::de::Error>(&mut self, bytes: usize) -> Result<(), E> {
        match self.left.checked_sub(bytes) {
            Some(left) => *self.left = left,
            None => return Err(E::custom("the document expands to more than a request may hold")),
        }
        Ok(())
    }
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

    fn visit_unit<E: serde::de::Error>(mut self) -> Result<Value, E> {
        self.spend(4)?;
        Ok(Value::Null)
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Value, E> {
        self.visit_unit()
    }

    fn visit_some<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_bool<E: serde::de::Error>(mut self, value: bool) -> Result<Value, E> {
        self.spend(1)?;
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: serde::de::Error>(mut self, value: i64) -> Result<Value, E> {
        self.spend(1)?;
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E: serde::de::Error>(mut self, value: u64) -> Result<Value, E> {
        self.spend(1)?;
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(mut self, value: f64) -> Result<Value, E> {
        self.spend(1)?;
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E: serde::de::Error>(mut self, value: &str) -> Result<Value, E> {
        self.spend(value.len() + 2)?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E: serde::de::Error>(mut self, value: String) -> Result<Value, E> {
        self.spend(value.len() + 2)?;
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<Value, A::Error> {
        self.spend(1)?;
        let mut list = Vec::new();
        let length = self.path.len();
        loop {
            use fmt::Write as _;
            write!(self.path, "[{}]", list.len()).map_err(A::Error::custom)?;
            let seed = Reader { path: self.path, duplicates: self.duplicates, left: self.left };
            let next = items.next_element_seed(seed)?;
            self.path.truncate(length);
            self.spend(1)?;
            match next {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<Value, A::Error> {
        self.spend(1)?;
        let mut map = Map::new();
        let length = self.path.len();
        while let Some(key) = entries.next_key::<String>()? {
            self.spend(key.len() + 4)?;
            if length > 0 {
                self.path.push('.');
            }
            self.path.push_str(&key);
            if map.contains_key(&key) {
                self.duplicates.push(self.path.clone());
            }
            let seed = Reader { path: self.path, duplicates: self.duplicates, left: self.left };
            let value = entries.next_value_seed(seed)?;
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
    fn yaml_is_read_as_the_json_it_means() {
        let text = "a: &x {b: [1, -2, 1.5, true, null, ~, 'yes', yes, \"q\"]}\nc: *x\n1: |\n  two\n  lines\n";
        let parsed = parse_yaml(text.as_bytes(), 1000).unwrap();
        let inner = json!({ "b": [1, -2, 1.5, true, null, null, "yes", "yes", "q"] });
        assert_eq!(parsed.value, json!({ "a": inner, "c": inner, "1": "two\nlines\n" }));
        assert_eq!(parse_yaml(b"a: 1\nb: {c: 1, c: 2}\na: 3", 100).unwrap().duplicates, ["b.c", "a"]);
        assert_eq!(parse_yaml(b"", 100).unwrap().value, Value::Null);
        let deep = |depth: usize| {
            (0..depth).map(|level| format!("{}a:\n", " ".repeat(level))).collect::<Vec<_>>().concat()
        };
        assert!(parse_yaml(deep(100).as_bytes(), 1000).is_ok());
        assert!(parse_yaml(deep(2000).as_bytes(), 100_000).is_err());
        for text in ["a: 1\n---\nb: 2", "a: [", "a: *nobody", "\u{1}", "a: .nan"] {
            assert!(parse_yaml(text.as_bytes(), 1000).is_err(), "{text}");
        }
    }

    #[test]
    fn yaml_that_means_more_than_the_limit_is_refused_before_it_is_built() {
        // A long text that is repeated, lists that are repeated, keys, and merged maps.
        let long = format!("a: &a {}\nb: [{}]", "x".repeat(1000), "*a,".repeat(1000));
        let lists = format!("a: &a [{}]\nb: [{}]", "1,".repeat(1000), "*a,".repeat(1000));
        let keys = format!("a: &a {{{}: 1}}\nb: [{}]", "k".repeat(1000), "*a,".repeat(1000));
        let empty = format!("a: &a [{}]\nb: [{}]", "{},".repeat(1000), "*a,".repeat(1000));
        for text in [long, lists, keys, empty] {
            let error = parse_yaml(text.as_bytes(), 100_000).unwrap_err();
            assert!(error.contains("expands to more than a request may hold"), "{error}");
        }
    }

    #[test]
    fn values_survive_being_written_as_yaml() {
        let texts = [
            "yes",
            "no",
            "1",
            "1.5",
            "0x1f",
            "1e3",
            "null",
            "~",
            "",
            " a ",
            "a: b",
            "# c",
            "- d",
            "a\nb\n",
            "\t",
            "\u{1}",
            "é",
            "*x",
            "&x",
            "!x",
            "{}",
            "[]",
            "'",
            "\"",
            "2020-01-01",
            "---",
            "a\n  b\n\n\nc",
        ];
        let long = "word ".repeat(100);
        let value = json!({ "texts": texts, "long": long, "map": { "yes": 1, "a: b": [[], {}, [1.5, -1, u64::MAX]] } });
        let written = serde_saphyr::to_string(&value).unwrap();
        assert_eq!(parse_yaml(written.as_bytes(), 100_000).unwrap().value, value, "{written}");
    }

    #[test]
    fn bad_json_is_an_error_and_deep_nesting_does_not_overflow() {
        for text in ["", "{", "{}x", "[1,]", "{\"a\"}"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse("[".repeat(1_000_000).as_bytes()).is_err());
    }
}
