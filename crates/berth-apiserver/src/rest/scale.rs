//! `/scale`: the number of replicas of workloads and custom resources, in one shape.

use http::Response;
use serde_json::{Value, json};

use super::error::{Answer, Failure};
use super::object::{self, Expected};
use super::registry::ScalePaths;
use super::request::{FieldValidation, WriteOptions};
use super::write::Tracking;
use super::write::Written;
use super::{Accept, Body, Call, Shape, content};
use crate::patch;
use crate::resource::{Cause, CauseReason};
use crate::rules::{jsonpath, read};
use crate::schema;

impl Call {
    fn scale_of(paths: &ScalePaths, object: &Value) -> Value {
        let number =
            |path: &str| jsonpath::find(object, path).first().and_then(|value| value.as_i64()).unwrap_or(0);
        // Workloads keep a selector as an object, custom resources as a text.
        let selector = paths.selector.as_deref().and_then(|path| {
            jsonpath::find(object, path).first().map(|found| match found {
                Value::Object(_) => crate::rules::table::selector(found),
                _ => jsonpath::text(found),
            })
        });
        let mut metadata = serde_json::Map::new();
        for field in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
            if let Some(value) = object["metadata"].get(field) {
                metadata.insert(field.to_owned(), value.clone());
            }
        }
        let mut scale = json!({
            "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
            "spec": { "replicas": number(&paths.spec) }, "status": { "replicas": number(&paths.status) },
        });
        if let Some(selector) = selector.filter(|selector| !selector.is_empty()) {
            scale["status"]["selector"] = selector.into();
        }
        scale
    }

    fn scale_paths(&self) -> Answer<&ScalePaths> {
        self.served.scale.as_ref().ok_or_else(Failure::no_such_path)
    }

    fn respond_scale(&self, written: &Written) -> Answer<Response<Body>> {
        let scale = Self::scale_of(self.scale_paths()?, &written.value()?);
        Ok(content::respond(200, Accept { shape: Shape::Object, ..self.accept }, &scale))
    }

    pub(crate) fn scale(&self) -> Answer<Response<Body>> {
        let (paths, current) = (self.scale_paths()?, self.current()?);
        let object: Value = serde_json::from_slice(&current.bytes).map_err(Failure::internal)?;
        if jsonpath::find(&object, &paths.spec).is_empty() {
            let why = format!("the spec replicas field {:?} does not exist", paths.spec);
            return Err(Failure::internal(why));
        }
        self.respond_scale(&Written::Stored(current))
    }

    pub(crate) async fn update_scale(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = self.query.write_options("UpdateOptions")?;
        let type_ = schema::built_in("autoscaling", "v1", "Scale").unwrap_or_default();
        let expected = Expected {
            api_version: "autoscaling/v1",
            kind: "Scale",
            type_: &type_,
            registry: &self.registry,
        };
        let headers = &self.parts.headers;
        let scale = object::decode(headers, bytes, &expected, FieldValidation::Ignore, &mut Vec::new())?;
        self.rescale(&options, |_| Ok(scale.clone())).await
    }

    pub(crate) async fn patch_scale(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = self.query.write_options("PatchOptions")?;
        let patch: Value = object::parse_yaml(bytes).map_err(Failure::bad_request)?;
        let is_json = content::media_type(&self.parts.headers) == "application/json-patch+json";
        let paths = self.scale_paths()?;
        self.rescale(&options, |object| {
            let mut scale = Self::scale_of(paths, object);
            if is_json {
                patch::json(&mut scale, &patch).map_err(|_| Failure::unprocessable())?;
            } else {
                patch::merge(&mut scale, &patch);
            }
            Ok(scale)
        })
        .await
    }

    async fn rescale(
        &self,
        options: &WriteOptions,
        scale: impl Fn(&Value) -> Answer<Value>,
    ) -> Answer<Response<Body>> {
        let path = &self.scale_paths()?.spec;
        let written = self
            .modify(options, Tracking::Update, |old| {
                let scale = scale(old)?;
                let replicas = read::number(&scale, &["spec", "replicas"]).unwrap_or(0);
                if replicas < 0 {
                    let cause = Cause {
                        reason: CauseReason::Invalid,
                        message: format!("Invalid value: {replicas}: must be greater than or equal to 0"),
                        field: "spec.replicas".to_owned(),
                    };
                    return Err(Failure::invalid_kind("autoscaling", "Scale", &self.name, &[cause]));
                }
                let mut new = old.clone();
                jsonpath::set(&mut new, path, replicas.into());
                let version = object::text(&scale, "resourceVersion");
                if !version.is_empty() {
                    object::metadata(&mut new).insert("resourceVersion".to_owned(), version.into());
                }
                Ok(new)
            })
            .await?;
        self.respond_scale(&written)
    }
}
