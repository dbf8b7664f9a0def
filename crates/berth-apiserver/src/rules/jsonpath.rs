//! The little of JSONPath that printer columns, scale paths and selectable fields use.

use serde_json::Value;

enum Step {
    Field(String),
    Index(usize),
    All,
    /// The items whose text at a path is equal to a value: `[?(@.type=="Ready")]`.
    Where(Vec<String>, String),
}

/// The values at a path such as `.status.conditions[?(@.type=="Ready")].status`.
pub(crate) fn find<'a>(object: &'a Value, path: &str) -> Vec<&'a Value> {
    let Some(steps) = parse(path) else { return Vec::new() };
    let mut found = vec![object];
    for step in &steps {
        found = found.into_iter().flat_map(|value| follow(value, step)).collect();
    }
    found
}

/// Sets the value at a path of plain fields, making what is missing on the way.
pub(crate) fn set(object: &mut Value, path: &str, value: Value) {
    let mut place = object;
    for field in path.split('.').filter(|field| !field.is_empty()) {
        if !place.is_object() {
            *place = Value::Object(serde_json::Map::new());
        }
        place = &mut place[field];
    }
    *place = value;
}

/// A value as a cell of text shows it.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn follow<'a>(value: &'a Value, step: &Step) -> Vec<&'a Value> {
    match step {
        Step::Field(name) => value.get(name).into_iter().collect(),
        Step::Index(index) => value.get(*index).into_iter().collect(),
        Step::All => match value {
            Value::Array(items) => items.iter().collect(),
            Value::Object(map) => map.values().collect(),
            _ => Vec::new(),
        },
        Step::Where(path, wanted) => value
            .as_array()
            .into_iter()
            .flatten()
            .filter(|item| {
                let found = path.iter().try_fold(*item, |value, field| value.get(field));
                found.is_some_and(|value| text(value) == *wanted)
            })
            .collect(),
    }
}

fn parse(path: &str) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    let mut rest = path.trim();
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('.') {
            let end = field_end(after);
            let (name, after) = after.split_at_checked(end)?;
            match name {
                "" => {}
                "*" => steps.push(Step::All),
                // A backslash keeps a dot in the name, as in annotations.
                name => steps.push(Step::Field(name.replace('\\', ""))),
            }
            rest = after;
        } else if let Some(after) = rest.strip_prefix('[') {
            let end = after.find(']')?;
            steps.push(bracket(after.get(..end)?)?);
            rest = after.get(end + 1..)?;
        } else {
            let end = field_end(rest).max(1);
            let (name, after) = rest.split_at_checked(end)?;
            steps.push(Step::Field(name.to_owned()));
            rest = after;
        }
    }
    Some(steps)
}

fn field_end(text: &str) -> usize {
    let mut escaped = false;
    for (index, character) in text.char_indices() {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '.' | '[' => return index,
            _ => {}
        }
    }
    text.len()
}

fn bracket(inside: &str) -> Option<Step> {
    let inside = inside.trim();
    let unquote = |text: &str| text.trim().trim_matches(['\'', '"']).to_owned();
    if inside == "*" {
        Some(Step::All)
    } else if let Ok(index) = inside.parse() {
        Some(Step::Index(index))
    } else if let Some(filter) = inside.strip_prefix("?(@.") {
        let (path, wanted) = filter.strip_suffix(')')?.split_once("==")?;
        Some(Step::Where(path.trim().split('.').map(str::to_owned).collect(), unquote(wanted)))
    } else {
        Some(Step::Field(unquote(inside)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn paths_lead_through_fields_items_and_conditions() {
        let object = json!({
            "metadata": { "annotations": { "a.b/c": "x" } },
            "status": { "conditions": [{ "type": "A", "status": "1" }, { "type": "Ready", "status": "True" }] },
        });
        let first = |path: &str| find(&object, path).first().map(|value| text(value));
        assert_eq!(first(r#".status.conditions[?(@.type=="Ready")].status"#).as_deref(), Some("True"));
        assert_eq!(first(".status.conditions[0].status").as_deref(), Some("1"));
        assert_eq!(first(r".metadata.annotations.a\.b/c").as_deref(), Some("x"));
        assert_eq!(first(".metadata.annotations['a.b/c']").as_deref(), Some("x"));
        assert_eq!(first(".status.missing"), None);
        assert_eq!(first(".status.conditions[?(@.type"), None);
    }
}
