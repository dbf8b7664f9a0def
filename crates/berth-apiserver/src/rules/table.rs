//! Columns of tables, and how values are spelled in their cells.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::read::{items, text};

/// One column of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    /// The heading of the column, as people read it.
    pub name: Cow<'static, str>,
    /// The type of its cells: `string`, `integer`, `boolean`, `date`.
    pub type_: Cow<'static, str>,
    /// `name` for the column that holds the object's name.
    pub format: Cow<'static, str>,
    /// A sentence that says what the cells show.
    pub description: Cow<'static, str>,
    /// 0 for columns that are always shown, 1 for those of wide output.
    pub priority: i64,
}

pub(crate) const fn column(
    name: &'static str,
    type_: &'static str,
    format: &'static str,
    description: &'static str,
    priority: i64,
) -> Column {
    Column {
        name: Cow::Borrowed(name),
        type_: Cow::Borrowed(type_),
        format: Cow::Borrowed(format),
        description: Cow::Borrowed(description),
        priority,
    }
}

/// A column of texts.
pub(crate) const fn string(name: &'static str, description: &'static str) -> Column {
    column(name, "string", "", description, 0)
}

/// A column of numbers.
pub(crate) const fn integer(name: &'static str, description: &'static str) -> Column {
    column(name, "integer", "", description, 0)
}

/// A column of yes and no.
pub(crate) const fn boolean(name: &'static str, description: &'static str) -> Column {
    column(name, "boolean", "", description, 0)
}

/// A column that only wide output shows.
pub(crate) const fn wide(name: &'static str, description: &'static str) -> Column {
    column(name, "string", "", description, 1)
}

/// The name of the object.
pub(crate) const NAME: Column = column("Name", "string", "name", "The name of the object.", 0);

/// How long ago the object was created.
pub(crate) const AGE: Column = string("Age", "How long ago the object was created.");

/// The columns of kinds that have none of their own.
pub(crate) const PLAIN: &[Column] =
    &[NAME, column("Created At", "date", "", "When the object was created.", 0)];

/// Access modes in short: `RWO,ROX`, each once, in the order of the API.
pub(crate) fn access_modes(modes: &[Value]) -> String {
    const SHORT: [(&str, &str); 4] = [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ];
    let given = |mode: &str| modes.iter().any(|m| m.as_str() == Some(mode));
    SHORT.iter().filter(|(mode, _)| given(mode)).map(|(_, short)| *short).collect::<Vec<_>>().join(",")
}

/// The names and the images of containers, each joined by commas.
pub(crate) fn containers(template: &Value) -> [Value; 2] {
    let join = |field| {
        let of = items(template, &["spec", "containers"]).iter().map(|c| text(c, &[field]));
        json!(of.collect::<Vec<_>>().join(","))
    };
    [join("name"), join("image")]
}

/// A map as `a=b,c=d`, or `<none>`.
pub(crate) fn labels(map: &Value) -> String {
    let pairs: Vec<String> = super::read::entries(map, &[])
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    if pairs.is_empty() { "<none>".to_owned() } else { pairs.join(",") }
}

/// A selector inside an object as text: `app=web,tier in (a,b)`, or `<none>`.
pub(crate) fn selector(selector: &Value) -> String {
    if !super::selector::label_selector_causes(selector, &super::field::Path::new("")).is_empty() {
        return "<error>".to_owned();
    }
    let mut parts: Vec<(String, String)> = super::read::entries(selector, &["matchLabels"])
        .map(|(key, value)| (key.to_owned(), format!("{key}={}", value.as_str().unwrap_or_default())))
        .collect();
    for expression in items(selector, &["matchExpressions"]) {
        let key = text(expression, &["key"]);
        let mut values: Vec<&str> = items(expression, &["values"]).iter().filter_map(Value::as_str).collect();
        values.sort_unstable();
        let values = values.join(",");
        let shown = match text(expression, &["operator"]) {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "Exists" => key.to_owned(),
            "DoesNotExist" => format!("!{key}"),
            _ => return "<error>".to_owned(),
        };
        parts.push((key.to_owned(), shown));
    }
    parts.sort_by(|one, other| one.0.cmp(&other.0));
    let parts: Vec<String> = parts.into_iter().map(|(_, shown)| shown).collect();
    if parts.is_empty() { "<none>".to_owned() } else { parts.join(",") }
}

/// A text, or what stands for none.
pub(crate) fn or<'a>(text: &'a str, none: &'a str) -> &'a str {
    if text.is_empty() { none } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_spelled_as_kubectl_shows_them() {
        assert_eq!(access_modes(&[json!("ReadWriteMany"), json!("ReadWriteOnce")]), "RWO,RWX");
        assert_eq!(labels(&json!({})), "<none>");
        assert_eq!(labels(&json!({"b": "c", "a": "x"})), "a=x,b=c");
        assert_eq!(
            selector(
                &json!({"matchLabels": {"b": "c"}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["y", "x"]}]})
            ),
            "a in (x,y),b=c"
        );
        assert_eq!(
            containers(
                &json!({"spec": {"containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "j"}]}})
            ),
            [json!("a,b"), json!("i,j")]
        );
    }
}
