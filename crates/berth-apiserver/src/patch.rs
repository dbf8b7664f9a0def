//! Changing objects by patches: JSON patch, merge patch, strategic merge patch and server-side apply.
//!
//! Pure functions over values: who may patch what, and what the result must satisfy, is decided elsewhere.

use serde_json::{Map, Value};

mod apply;
mod fields;
mod json;
mod managed;
mod strategic;
mod typed;

pub(crate) use apply::misfit_message;
pub use apply::{ApplyError, Conflict, Writer, apply, track_update};
pub use json::{MAX_OPERATIONS, json};
pub use strategic::strategic;

/// Why a patch cannot be applied; the variants are told apart by the answer they get.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    /// The patch itself is malformed (400).
    #[error("{0}")]
    Malformed(String),
    /// A JSON patch has too many operations (413).
    #[error("The allowed maximum operations in a JSON patch is {max}, got {0}", max = MAX_OPERATIONS)]
    TooManyOperations(usize),
    /// The operations of a JSON patch look at or move too many values (413).
    #[error("The operations of the JSON patch take too long on an object of this size")]
    TooMuchWork,
    /// The patch does not fit the object (422).
    #[error("{0}")]
    Unfit(String),
    /// The patch asks for what the type does not allow (500, as kube-apiserver has it).
    #[error("{0}")]
    Failed(String),
}

impl PatchError {
    /// The HTTP status kube-apiserver answers with.
    pub fn code(&self) -> u16 {
        match self {
            Self::Malformed(_) => 400,
            Self::TooManyOperations(_) | Self::TooMuchWork => 413,
            Self::Unfit(_) => 422,
            Self::Failed(_) => 500,
        }
    }
}

/// Applies a merge patch (RFC 7396).
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(fields) = target else { return };
    for (name, change) in changes {
        if change.is_null() {
            fields.remove(name);
        } else {
            merge(fields.entry(name.clone()).or_insert(Value::Null), change);
        }
    }
}

#[cfg(test)]
mod tests;
