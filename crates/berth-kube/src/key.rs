//! The name of an object within its kind.

use std::fmt;

use kube::ResourceExt;

/// Namespace and name; the namespace is empty for kinds that have none.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The namespace, or empty.
    pub namespace: String,
    /// The name of the object, unique within its namespace and kind.
    pub name: String,
}

impl Key {
    /// The key of an object in a namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// The key of an object of a kind without namespaces.
    pub fn cluster(name: impl Into<String>) -> Self {
        Self::new("", name)
    }

    /// The key of an object.
    pub fn of(object: &impl ResourceExt) -> Self {
        Self::new(object.namespace().unwrap_or_default(), object.name_any())
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}
