//! Stand-ins for what other modules are about to have.

use serde_json::Value;

use crate::resource::{Cause, Resource};
use crate::schema::Type;

pub(crate) enum Operation {
    Create,
    Update,
    Delete,
}
pub(crate) struct Denied {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}
pub(crate) trait Reader {
    fn get(&self, group: &str, resource: &str, namespace: &str, name: &str) -> Option<Value>;
    fn list(&self, group: &str, resource: &str) -> Vec<Value>;
}
pub(crate) fn admit(
    _: Operation,
    _: &Resource,
    _: &mut Value,
    _: Option<&Value>,
    _: &dyn Reader,
) -> Result<(), Denied> {
    Ok(())
}
pub(crate) fn apply_defaults(_: &Type, _: &mut Value) {}
pub(crate) fn validate(_: &Type, _: &Value) -> Vec<Cause> {
    Vec::new()
}
pub(crate) fn from_openapi(_: &Value) -> Result<Type, Vec<String>> {
    Err(Vec::new())
}
