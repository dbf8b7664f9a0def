//! Texts and bytes of all sorts: JSON, protobuf, selectors, quantities, times.

use berth_apiserver::schema::{self, protobuf};
use berth_apiserver::{parse_field_selector, parse_label_selector};
use berth_core::Quantity;
use serde_json::{Value, json};

use super::fuzz;
use super::making::{any, mutate, named};
use crate::kubernetes::random::Random;

fn text(random: &mut Random, words: &[&str], most: usize) -> String {
    (0..random.below(most)).map(|_| *random.pick(words)).collect()
}

#[test]
fn json_is_read_as_serde_json_reads_it() {
    fuzz(|random| {
        let mut bytes = any(random, 6).to_string().into_bytes();
        mutate(random, &mut bytes);
        let ours = schema::json::parse(&bytes).map(|parsed| parsed.value).ok();
        assert_eq!(ours, serde_json::from_slice::<Value>(&bytes).ok());
    });
}

#[test]
fn objects_that_were_decoded_once_are_decoded_for_good() {
    fuzz(|random| {
        let (type_, mut value) = named(random);
        let decoded = schema::decode(&type_, &mut value);
        if decoded.errors.is_empty() {
            let once = value.clone();
            assert!(schema::decode(&type_, &mut value).unknown.is_empty());
            assert_eq!(once, value);
        }
    });
}

#[test]
fn protobuf_bodies() {
    fuzz(|random| {
        let (type_, mut value) = named(random);
        let errors = schema::decode(&type_, &mut value).errors;
        let Ok(mut bytes) = protobuf::encode(&type_, &value) else { return };
        if errors.is_empty() {
            protobuf::decode(&type_, &bytes).unwrap();
        }
        mutate(random, &mut bytes);
        let _ = protobuf::decode(&type_, &bytes);
        let _ = protobuf::decode_message(&type_, &bytes);
        let noise: Vec<u8> =
            (0..random.below(60)).map(|_| u8::try_from(random.below(256)).unwrap()).collect();
        let _ = protobuf::decode_message(&type_, &noise);
    });
}

#[test]
fn selectors() {
    let words = [
        "a",
        "b",
        "x.y/z",
        "=",
        "==",
        "!=",
        "!",
        "in",
        "notin",
        " in ",
        " notin ",
        "(",
        ")",
        ",",
        " ",
        "<",
        ">",
        "\\",
        "metadata.name",
        "é",
        "\n",
        "1",
        "-",
        "_",
        "%",
    ];
    fuzz(|random| {
        let text = text(random, &words, 14);
        if let Ok(selector) = parse_label_selector(&text) {
            selector.matches(&json!({ "a": "b", "x.y/z": "1" }));
            selector.matches(&Value::Null);
        }
        if let Ok(selector) = parse_field_selector(&text) {
            selector.matches(&[("metadata.name", "a".to_owned())]);
        }
    });
}

#[test]
fn quantities_have_one_canonical_form() {
    let words = [
        "0",
        "1",
        "9",
        "99999999999999999999",
        ".",
        "-",
        "+",
        "e",
        "E",
        "n",
        "u",
        "m",
        "k",
        "M",
        "G",
        "Ki",
        "Mi",
        "Gi",
        "Ti",
        "Pi",
        "Ei",
        "e9",
        "E-3",
        "e2147483647",
        "e-999999999999",
        " ",
        "i",
    ];
    fuzz(|random| {
        let text = text(random, &words, 6);
        if let Ok(once) = Quantity::canonical(&text) {
            let twice = Quantity::canonical(&once).unwrap();
            assert_eq!(once, twice, "{text}");
            assert!(once.parse::<Quantity>().is_ok(), "{once} is a quantity for one only");
        }
        if let Ok(quantity) = text.parse::<Quantity>() {
            quantity.value();
            let _ = quantity.rounded_to_thousandths();
        }
    });
}

#[test]
fn times_have_one_canonical_form() {
    let words = [
        "2026",
        "-",
        "01",
        "31",
        "T",
        "t",
        ":",
        "59",
        "60",
        "Z",
        "z",
        "+",
        ".",
        "123456789",
        "00:00:00",
        " ",
    ];
    fuzz(|random| {
        let text = match random.below(3) {
            0 => text(random, &words, 14),
            _ => format!(
                "2026-0{}-1{}T0{}:00:00{}Z",
                random.below(10),
                random.below(10),
                random.below(10),
                ".5".repeat(random.below(3))
            ),
        };
        if let Ok(once) = schema::time::canonical(&text) {
            assert_eq!(schema::time::canonical(&once).ok(), Some(once));
        }
        let _ = schema::time::canonical_micro(&text);
    });
}
