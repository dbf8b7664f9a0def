//! One finalizer of an object, whatever others it has; used within [`crate::Cluster::update`] and
//! [`crate::Cluster::edit`].

use kube::ResourceExt;

/// Whether an object has a finalizer.
pub fn has(object: &impl ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|known| known == finalizer)
}

/// Adds a finalizer that is not there yet.
pub fn add(object: &mut impl ResourceExt, finalizer: &str) {
    if !has(object, finalizer) {
        object.finalizers_mut().push(finalizer.to_owned());
    }
}

/// Removes a finalizer; nothing changes if it is not there.
pub fn remove(object: &mut impl ResourceExt, finalizer: &str) {
    object.finalizers_mut().retain(|known| known != finalizer);
}
