//! Quantities of objects, as JSON has them: strings or numbers, alone or in lists of resources.

use serde_json::Value;

use crate::schema::quantity::canonical;
pub use crate::schema::quantity::{Error, Quantity};

/// Reads a quantity from a JSON string or number.
pub fn from_value(value: &Value) -> Result<Quantity, Error> {
    text(value).ok_or(Error::Form)?.parse()
}

/// Rewrites a JSON quantity in its canonical spelling; leaves alone what is no quantity.
pub fn canonicalise(value: &mut Value) {
    if let Some(Ok(text)) = text(value).map(|text| canonical(&text)) {
        *value = Value::String(text);
    }
}

/// Rewrites every quantity of a resource list (`{"storage": "1024Mi"}`).
///
/// What is finer than a thousandth is rounded up, as the server does for lists but not for single quantities.
pub fn canonicalise_list(owner: &mut serde_json::Map<String, Value>, list: &str) {
    let Some(Value::Object(map)) = owner.get_mut(list) else { return };
    for value in map.values_mut() {
        let Ok(quantity) = from_value(value) else { continue };
        match quantity.rounded_to_thousandths() {
            Some(rounded) => *value = Value::String(rounded.to_string()),
            None => canonicalise(value),
        }
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> String {
        super::canonical(text).unwrap_or_else(|e| e.to_string())
    }

    #[test]
    fn quantities_are_rewritten_as_the_server_rewrites_them() {
        for (written, stored) in [
            ("0", "0"),
            ("10Gi", "10Gi"),
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("0.5", "500m"),
            ("1.5", "1500m"),
            ("100m", "100m"),
            ("1000m", "1"),
            ("1e3", "1e3"),
            ("1000e0", "1e3"),
            ("1000", "1k"),
            ("1024", "1024"),
            ("1024Ki", "1Mi"),
            ("512Ki", "512Ki"),
            ("8Gi", "8Gi"),
            ("0.5Gi", "512Mi"),
            ("1G", "1G"),
            ("5000M", "5G"),
            ("0Gi", "0"),
            ("0.00000000001", "1n"),
            ("1.500", "1.500"),
            ("-1", "-1"),
            ("100Ei", "9223372036854775807"),
        ] {
            assert_eq!(canonical(written), stored, "{written}");
        }
    }

    #[test]
    fn texts_that_are_no_quantities_are_refused() {
        for text in ["", "abc", "1 Gi", "Gi?", "1.2.3", "1Gi "] {
            assert_eq!(text.parse::<Quantity>().err(), Some(Error::Form), "{text}");
        }
        for text in ["1gi", "1Kb", "1mm", "1KiKi"] {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
        assert_eq!("1KiKi".parse::<Quantity>().err(), Some(Error::Suffix));
    }

    #[test]
    fn quantities_compare_by_amount() {
        let q = |text: &str| text.parse::<Quantity>().unwrap();
        assert_eq!(q("1Gi"), q("1073741824"));
        assert!(q("1Gi") > q("1G"));
        assert!(q("-1") < q("0"));
        assert_eq!(q("1.2").value(), 2);
        assert_eq!(q("1.2").rounded_to_thousandths(), None);
    }

    #[test]
    fn lists_know_nothing_finer_than_thousandths() {
        let mut owner = serde_json::Map::new();
        owner
            .insert("limits".to_owned(), serde_json::json!({"cpu": "100u", "memory": 1024, "x": "nonsense"}));
        canonicalise_list(&mut owner, "limits");
        assert_eq!(owner["limits"], serde_json::json!({"cpu": "1m", "memory": "1024", "x": "nonsense"}));
    }

    #[test]
    fn huge_quantities_do_not_overflow() {
        for text in ["1e400", "99999999999999999999999999999999999999999999", "1e-400", "9e2147483647"] {
            let quantity = text.parse::<Quantity>().unwrap();
            assert!(quantity.is_positive(), "{text}");
            let _ = (quantity.to_string(), quantity.value(), quantity.rounded_to_thousandths());
        }
    }
}
