//! Quantities of objects, as JSON has them: strings or numbers, alone or in lists of resources.

use berth_core::InvalidQuantity;
pub(crate) use berth_core::Quantity;
use serde_json::Value;

/// Reads a quantity from a JSON string or number.
pub(crate) fn from_value(value: &Value) -> Result<Quantity, InvalidQuantity> {
    text(value).ok_or(InvalidQuantity::Form)?.parse()
}

/// Rewrites a JSON quantity in its canonical spelling; leaves alone what is no quantity.
pub(crate) fn canonicalise(value: &mut Value) {
    if let Some(Ok(text)) = text(value).map(|text| Quantity::canonical(&text)) {
        *value = Value::String(text);
    }
}

/// Rewrites every quantity of a resource list (`{"storage": "1024Mi"}`).
///
/// What is finer than a thousandth is rounded up, as the server does for lists but not for single quantities.
pub(crate) fn canonicalise_list(owner: &mut serde_json::Map<String, Value>, list: &str) {
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

    #[test]
    fn lists_know_nothing_finer_than_thousandths() {
        let mut owner = serde_json::Map::new();
        owner
            .insert("limits".to_owned(), serde_json::json!({"cpu": "100u", "memory": 1024, "x": "nonsense"}));
        canonicalise_list(&mut owner, "limits");
        assert_eq!(owner["limits"], serde_json::json!({"cpu": "1m", "memory": "1024", "x": "nonsense"}));
    }
}
