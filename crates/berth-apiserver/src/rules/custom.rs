//! Custom resources: what one version of their definition says.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::table::{Column, column};
use super::{Rules, age, jsonpath, metadata_fields, read};
use crate::resource::Cause;
use crate::schema::{self, Type};

/// The rules of a custom resource: its schema, its status, its columns and the fields it can be selected by.
pub(crate) struct CustomRules {
    schema: Arc<Type>,
    has_status: bool,
    /// `Name`, and then one for each of the paths.
    columns: Vec<Column>,
    paths: Vec<String>,
    /// Dotted paths that field selectors may ask for.
    selectable: Vec<String>,
}

impl CustomRules {
    /// The rules of a version of a definition, whose objects are of the type `schema`.
    pub(crate) fn new(version: &Value, schema: Arc<Type>) -> Self {
        let mut columns = vec![column("Name", "string", "name", "The object's name.", 0)];
        let mut paths = Vec::new();
        let given = read::items(version, &["additionalPrinterColumns"]);
        for given in given {
            let text = |field: &str| read::text(given, &[field]).to_owned();
            columns.push(Column {
                name: text("name").into(),
                type_: text("type").into(),
                format: text("format").into(),
                description: text("description").into(),
                priority: read::number(given, &["priority"]).unwrap_or(0),
            });
            paths.push(text("jsonPath"));
        }
        if given.is_empty() {
            columns.push(column("Age", "date", "", "How long ago the object was created.", 0));
            paths.push(".metadata.creationTimestamp".to_owned());
        }
        let selectable = read::items(version, &["selectableFields"])
            .iter()
            .map(|field| read::text(field, &["jsonPath"]).trim_start_matches('.').to_owned())
            .collect();
        let has_status = read::has(version, &["subresources", "status"]);
        Self { schema, has_status, columns, paths, selectable }
    }
}

impl Rules for CustomRules {
    fn default(&self, object: &mut Value) {
        schema::apply_defaults(&self.schema, object);
    }

    fn prepare_create(&self, object: &mut Value) {
        if self.has_status {
            read::drop(object, "status");
        }
    }

    fn prepare_update(&self, new: &mut Value, old: &Value) {
        if self.has_status {
            read::keep(new, old, "status");
        }
    }

    /// The status is written alone: everything else stays, metadata too.
    fn prepare_status_update(&self, new: &mut Value, old: &Value) {
        let status = new.get("status").cloned();
        *new = old.clone();
        match status {
            Some(status) => new["status"] = status,
            None => read::drop(new, "status"),
        }
    }

    fn status_keeps_metadata(&self) -> bool {
        true
    }

    fn validate(&self, object: &Value) -> Vec<Cause> {
        schema::validate(&self.schema, object)
    }

    fn validate_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        schema::validate_update(&self.schema, new, old)
    }

    fn validate_status_update(&self, new: &Value, old: &Value) -> Vec<Cause> {
        schema::validate_update(&self.schema, new, old)
    }

    fn unconditional_update(&self) -> bool {
        false
    }

    fn counts_generation(&self) -> bool {
        true
    }

    fn generation_changes(&self, new: &Value, old: &Value) -> bool {
        let counted = |object: &Value| -> Vec<(String, Value)> {
            object
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(key, _)| *key != "metadata" && !(self.has_status && *key == "status"))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect()
        };
        counted(new) != counted(old)
    }

    fn selectable_fields(&self, object: &Value) -> Vec<(&str, String)> {
        let mut fields: Vec<(&str, String)> = metadata_fields(object);
        fields.extend(self.selectable.iter().map(|path| {
            let found = jsonpath::find(object, path);
            let found = found.first().filter(|found| !found.is_null());
            (path.as_str(), found.map(|found| jsonpath::text(found)).unwrap_or_default())
        }));
        fields
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn cells(&self, object: &Value, now: Timestamp) -> Vec<Value> {
        let mut cells = vec![read::name(object).into()];
        let columns = self.columns.iter().skip(1).zip(&self.paths);
        cells.extend(columns.map(|(column, path)| cell(object, &column.type_, path, now)));
        cells
    }
}

fn cell(object: &Value, type_: &str, path: &str, now: Timestamp) -> Value {
    let found = jsonpath::find(object, path);
    let Some(first) = found.first() else { return Value::Null };
    match (type_, first) {
        (_, Value::Null) => Value::Null,
        ("date", value) => age::since(value, now).into(),
        ("integer", Value::Number(number)) => {
            // Fractions are cut off, as a client that asks for an integer expects.
            number.as_i64().map_or_else(|| Value::Number(number.clone()), Value::from)
        }
        ("number" | "boolean", value @ (Value::Number(_) | Value::Bool(_))) => (*value).clone(),
        ("string", value) => jsonpath::text(value).into(),
        _ => Value::Null,
    }
}
