//! Whether an applied configuration fits its type: what structured merge refuses, in its words.

use serde_json::Value;

use super::super::fields::display;
use super::{Form, edge, is_free, root};
use crate::schema::{ListType, Schema, Shape, Type};

/// Checks a configuration; the messages begin with the place.
pub(in crate::patch) fn validate(type_: &Type, object: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    check_form(root(type_), object, "", &mut problems);
    problems
}

fn check(schema: &Schema, value: &Value, path: &str, problems: &mut Vec<String>) {
    if value.is_null() {
        return;
    }
    let wrong = misfit(&schema.shape, value);
    match wrong {
        Some(message) => problems.push(format!("{path}: {message}")),
        // Atomic values are checked as well, hence the form is taken from the shape.
        None => match &schema.shape {
            Shape::Object(link) => check_form(Form::Object(link.get()), value, path, problems),
            Shape::Map(of) => check_form(Form::Map(of), value, path, problems),
            Shape::List(of) | Shape::Items(of) => {
                check_form(Form::List(of, &schema.list), value, path, problems);
            }
            _ => {}
        },
    }
}

/// Why a value is not of a shape.
fn misfit(shape: &Shape, value: &Value) -> Option<String> {
    let fits = match shape {
        Shape::Object(_) | Shape::Map(_) => value.is_object(),
        Shape::List(_) | Shape::Items(_) => value.is_array(),
        Shape::Int32 | Shape::Int64 | Shape::Double => value.is_number(),
        Shape::Bool => value.is_boolean(),
        Shape::Quantity | Shape::IntOrString => value.is_string() || value.is_number(),
        Shape::RawExtension => true,
        shape => is_free(shape) || value.is_string(),
    };
    if fits {
        return None;
    }
    let expected = match shape {
        Shape::Object(_) | Shape::Map(_) => "map",
        Shape::List(_) | Shape::Items(_) => "list",
        Shape::Int32 | Shape::Int64 | Shape::Double => "numeric (int or float)",
        Shape::Bool => "boolean",
        _ => "string",
    };
    Some(format!("expected {expected}, got {value}"))
}

fn check_form(form: Form<'_>, value: &Value, path: &str, problems: &mut Vec<String>) {
    match (form, value) {
        (Form::List(of, list), Value::Array(items)) => check_items(of, list, items, path, problems),
        (Form::Object(_) | Form::Map(_), Value::Object(object)) => {
            for (key, item) in object {
                let path = format!("{path}.{key}");
                let declared = match form {
                    Form::Object(type_) => type_.preserve_unknown || type_.field(key).is_some(),
                    _ => true,
                };
                if !declared {
                    problems.push(format!("{path}: field not declared in schema"));
                    return;
                }
                check(form.child(key), item, &path, problems);
            }
        }
        _ => {}
    }
}

fn check_items(of: &Schema, list: &ListType, items: &[Value], path: &str, problems: &mut Vec<String>) {
    let mut seen = std::collections::BTreeSet::new();
    for (index, item) in items.iter().enumerate() {
        let place = if *list == ListType::Atomic {
            format!("[{index}]")
        } else {
            match edge(of, list, item) {
                Ok(edge) => {
                    let shown = display(&edge);
                    if !seen.insert(edge) {
                        problems.push(format!("{path}: duplicate entries for key {shown}"));
                    }
                    shown
                }
                Err(reason) => {
                    problems.push(format!("{path}: element {index}: {reason}"));
                    return;
                }
            }
        };
        check(of, item, &format!("{path}{place}"), problems);
    }
}
