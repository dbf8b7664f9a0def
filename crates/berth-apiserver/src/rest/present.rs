//! How objects are shown: as they are stored, translated, as tables, or as metadata only.

use bytes::Bytes;
use http::Response;
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::content::{self, Accept, Body, Format, Shape};
use super::error::{Answer, Failure};
use super::events;
use super::registry::{Served, Stored};
use crate::rules::read;
use crate::schema::protobuf;

/// What a table's rows carry of their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Include {
    Nothing,
    Metadata,
    Object,
}

impl Include {
    pub(crate) fn parse(text: Option<&str>) -> Answer<Self> {
        match text {
            None | Some("Metadata") => Ok(Self::Metadata),
            Some("None") => Ok(Self::Nothing),
            Some("Object") => Ok(Self::Object),
            Some(other) => Err(Failure::bad_request(format!(
                "Unable to convert to Table as requested: includeObject: Invalid value: {other:?}: must be \
                 'Metadata', 'Object', 'None', or empty"
            ))),
        }
    }
}

/// How one client wants to see the objects of one resource.
pub(crate) struct Presenter<'a> {
    pub(crate) served: &'a Served,
    pub(crate) accept: Accept,
    pub(crate) include: Include,
}

impl Presenter<'_> {
    /// Whether stored bytes can be sent as they are.
    pub(crate) fn is_plain(&self) -> bool {
        self.accept.format == Format::Json
            && self.accept.shape == Shape::Object
            && self.served.stored == Stored::Same
            && !self.accept.pretty
    }

    /// An object of the store as the client wants it.
    pub(crate) fn object(&self, mut object: Value) -> Value {
        from_store(self.served, &mut object);
        match self.accept.shape {
            Shape::Object | Shape::Discovery => object,
            Shape::Table => self.table(&[object], None, true),
            Shape::PartialMetadata | Shape::PartialMetadataList => {
                self.partial(&object, "PartialObjectMetadata")
            }
        }
    }

    /// Like [`Self::object`], for an event of a watch: only the first table names its columns.
    pub(crate) fn event(&self, mut object: Value, first: bool) -> Value {
        if self.accept.shape == Shape::Table {
            from_store(self.served, &mut object);
            return self.table(&[object], None, first);
        }
        self.object(object)
    }

    /// A list of objects of the store as the client wants it.
    fn list(&self, objects: Vec<Value>, metadata: Value) -> Value {
        let objects = objects.into_iter().map(|mut object| {
            from_store(self.served, &mut object);
            object
        });
        match self.accept.shape {
            Shape::Table => self.table(&objects.collect::<Vec<_>>(), Some(metadata), true),
            Shape::PartialMetadata | Shape::PartialMetadataList => {
                let items: Vec<Value> =
                    objects.map(|object| self.partial(&object, "PartialObjectMetadata")).collect();
                let version = self.meta_version();
                json!({
                    "kind": "PartialObjectMetadataList", "apiVersion": version, "metadata": metadata,
                    "items": items,
                })
            }
            Shape::Object | Shape::Discovery => json!({
                "kind": &*self.served.resource.list_kind,
                "apiVersion": self.served.api_version,
                "metadata": metadata,
                "items": objects.map(|object| self.item(object)).collect::<Vec<_>>(),
            }),
        }
    }

    /// An object in a list: the list says what kind it is, except for custom resources.
    fn item(&self, mut object: Value) -> Value {
        if self.served.resource.built_in && self.accept.format != Format::Protobuf {
            read::drop(&mut object, "apiVersion");
            read::drop(&mut object, "kind");
        }
        object
    }

    /// The answer with one object, given as stored bytes.
    pub(crate) fn respond_stored(&self, code: u16, bytes: &Bytes) -> Answer<Response<Body>> {
        if self.is_plain() {
            return Ok(content::respond_bytes(code, "application/json", self.accept.gzip, bytes.clone()));
        }
        let object = serde_json::from_slice(bytes).map_err(Failure::internal)?;
        self.respond(code, object)
    }

    /// The answer with one object of the store.
    pub(crate) fn respond(&self, code: u16, object: Value) -> Answer<Response<Body>> {
        let object = self.object(object);
        if self.accept.format != Format::Protobuf {
            return Ok(content::respond(code, self.accept, &object));
        }
        let bytes = protobuf::encode(&self.served.schema, &object).map_err(Failure::internal)?;
        Ok(content::respond_bytes(code, content::PROTOBUF, self.accept.gzip, bytes.into()))
    }

    /// The answer with a list of objects of the store.
    pub(crate) fn respond_list(&self, objects: Vec<Value>, metadata: Value) -> Answer<Response<Body>> {
        let list = self.list(objects, metadata);
        if self.accept.format != Format::Protobuf {
            return Ok(content::respond(200, self.accept, &list));
        }
        let bytes = protobuf::encode_list(&self.served.schema, &list).map_err(Failure::internal)?;
        Ok(content::respond_bytes(200, content::PROTOBUF, self.accept.gzip, bytes.into()))
    }

    fn meta_version(&self) -> &'static str {
        if self.accept.beta { "meta.k8s.io/v1beta1" } else { "meta.k8s.io/v1" }
    }

    fn partial(&self, object: &Value, kind: &str) -> Value {
        json!({
            "kind": kind, "apiVersion": self.meta_version(), "metadata": read::at(object, &["metadata"]),
        })
    }

    fn table(&self, objects: &[Value], metadata: Option<Value>, columns: bool) -> Value {
        let now = Timestamp::now();
        let rows: Vec<Value> = objects
            .iter()
            .map(|object| {
                let mut row = Map::new();
                row.insert("cells".to_owned(), self.served.rules.cells(object, now).into());
                if let Some(condition) = self.completed(object) {
                    row.insert("conditions".to_owned(), json!([condition]));
                }
                match self.include {
                    Include::Nothing => {
                        row.insert("object".to_owned(), Value::Null);
                    }
                    Include::Metadata => {
                        let partial = json!({
                            "kind": "PartialObjectMetadata", "apiVersion": self.meta_version(),
                            "metadata": read::at(object, &["metadata"]),
                        });
                        row.insert("object".to_owned(), partial);
                    }
                    Include::Object => {
                        row.insert("object".to_owned(), object.clone());
                    }
                }
                Value::Object(row)
            })
            .collect();
        let metadata = metadata.unwrap_or_else(|| match objects {
            [object] => json!({ "resourceVersion": read::text(object, &["metadata", "resourceVersion"]) }),
            _ => json!({}),
        });
        let columns = if columns { self.columns() } else { Vec::new() };
        json!({
            "kind": "Table", "apiVersion": self.meta_version(), "metadata": metadata,
            "columnDefinitions": if columns.is_empty() { Value::Null } else { columns.into() }, "rows": rows,
        })
    }

    /// The mark of a pod that is done, by which clients leave its row out.
    fn completed(&self, object: &Value) -> Option<Value> {
        if !self.served.resource.group.is_empty() || &*self.served.resource.kind != "Pod" {
            return None;
        }
        let phase = read::text(object, &["status", "phase"]);
        let message = match phase {
            "Succeeded" => "The pod has completed successfully.",
            "Failed" => "The pod failed.",
            _ => return None,
        };
        Some(json!({ "type": "Completed", "status": "True", "reason": phase, "message": message }))
    }

    fn columns(&self) -> Vec<Value> {
        let column = |name: &str, type_: &str, format: &str, description: &str, priority: i64| {
            json!({
                "name": name, "type": type_, "format": format, "description": description,
                "priority": priority,
            })
        };
        let columns = self.served.rules.columns().iter();
        columns.map(|c| column(&c.name, &c.type_, &c.format, &c.description, c.priority)).collect()
    }
}

/// From the form in the store to the form that is served.
pub(crate) fn from_store(served: &Served, object: &mut Value) {
    match &served.stored {
        Stored::Same => {}
        Stored::CoreEvents => events::from_core(object),
        Stored::As(_) => object["apiVersion"] = served.api_version.as_str().into(),
    }
}

/// Brings an object of the store to the version that is stored now; whether an earlier one had written it.
pub(crate) fn renew(served: &Served, object: &mut Value) -> bool {
    let Stored::As(api_version) = &served.stored else { return false };
    let is_old = object["apiVersion"] != *api_version;
    if is_old {
        object["apiVersion"] = api_version.as_str().into();
    }
    is_old
}

/// From the form that is served to the form in the store.
pub(crate) fn to_store(served: &Served, object: &mut Value) {
    match &served.stored {
        Stored::Same => {}
        Stored::CoreEvents => events::to_core(object),
        Stored::As(api_version) => object["apiVersion"] = api_version.as_str().into(),
    }
}
