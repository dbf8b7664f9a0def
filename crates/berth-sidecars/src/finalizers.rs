//! Adding and removing one finalizer, whatever else is there.

use kube::ResourceExt;

/// Whether an object has a finalizer.
pub(crate) fn has(object: &impl ResourceExt, finalizer: &str) -> bool {
    object.finalizers().iter().any(|known| known == finalizer)
}

/// Adds a finalizer that is not there yet.
pub(crate) fn add(object: &mut impl ResourceExt, finalizer: &str) {
    if !has(object, finalizer) {
        object.finalizers_mut().push(finalizer.to_owned());
    }
}

/// Removes a finalizer.
pub(crate) fn remove(object: &mut impl ResourceExt, finalizer: &str) {
    object.finalizers_mut().retain(|known| known != finalizer);
}
