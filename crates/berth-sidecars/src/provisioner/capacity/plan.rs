//! How the objects of one class and topology segment become what the driver answered. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use berth_core::names::{CAPACITY_DRIVER, CAPACITY_MANAGED_BY};
use berth_csi::v1::GetCapacityResponse;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use kube::ResourceExt as _;

use super::goal::CapacityKey;
use crate::size;

/// What all objects of a publisher have in common.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    pub(super) driver: String,
    pub(super) manager: String,
    pub(super) namespace: String,
    /// With whom the objects go.
    pub(super) owner: Option<OwnerReference>,
}

/// How much room there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::provisioner) struct Room {
    pub(super) available: i64,
    pub(super) largest: Option<i64>,
}

impl Room {
    /// Whether a volume of this size has room.
    pub(in crate::provisioner) fn fits(self, bytes: i64) -> bool {
        bytes <= self.available && self.largest.is_none_or(|largest| bytes <= largest)
    }
}

impl From<GetCapacityResponse> for Room {
    fn from(answer: GetCapacityResponse) -> Self {
        // Kubernetes takes no negative capacity, which a driver may answer that has promised too much.
        Self {
            available: answer.available_capacity.max(0),
            largest: answer.maximum_volume_size.map(|size| size.max(0)),
        }
    }
}

/// A write that is missing.
#[derive(Debug, Clone)]
pub(super) enum Write {
    /// There is no object.
    Create(Box<CSIStorageCapacity>),
    /// It has other values, or lacks its owner.
    Update(Arc<CSIStorageCapacity>),
    /// There is another for the same.
    Delete(Arc<CSIStorageCapacity>),
}

impl Frame {
    /// What chooses the objects of this publisher.
    pub(super) fn selector(&self) -> String {
        format!("{CAPACITY_DRIVER}={},{CAPACITY_MANAGED_BY}={}", self.driver, self.manager)
    }

    /// The writes after which there is exactly one object for the class and segment, with this room.
    pub(super) fn plan(
        &self,
        capacity_key: &CapacityKey,
        room: Room,
        there: &[Arc<CSIStorageCapacity>],
    ) -> Vec<Write> {
        let Some(kept) = kept(there) else {
            return vec![Write::Create(Box::new(self.object(capacity_key, room)))];
        };
        let same = self.is_owned(kept)
            && is_equal(kept.capacity.as_ref(), Some(room.available))
            && is_equal(kept.maximum_volume_size.as_ref(), room.largest);
        let surplus = there.iter().filter(|object| object.name_any() != kept.name_any());
        let update = (!same).then(|| Write::Update(kept.clone()));
        surplus.cloned().map(Write::Delete).chain(update).collect()
    }

    /// Writes this room into an object.
    pub(super) fn write_into(&self, object: &mut CSIStorageCapacity, room: Room) {
        object.capacity = Some(size::quantity(room.available));
        object.maximum_volume_size = room.largest.map(size::quantity);
        if let Some(owner) = self.owner.as_ref().filter(|_| !self.is_owned(object)) {
            let owners = object.metadata.owner_references.get_or_insert_default();
            owners.retain(|known| known.uid != owner.uid);
            // There may be but one controller; whoever was it before stays an owner.
            for known in owners.iter_mut() {
                known.controller = None;
            }
            owners.push(owner.clone());
        }
    }

    fn is_owned(&self, object: &CSIStorageCapacity) -> bool {
        self.owner.as_ref().is_none_or(|owner| {
            object
                .owner_references()
                .iter()
                .any(|known| known.controller == Some(true) && known.uid == owner.uid)
        })
    }

    fn object(&self, capacity_key: &CapacityKey, room: Room) -> CSIStorageCapacity {
        let labels = [(CAPACITY_DRIVER, &self.driver), (CAPACITY_MANAGED_BY, &self.manager)]
            .map(|(k, v)| (k.to_owned(), v.clone()));
        let mut object = CSIStorageCapacity {
            metadata: ObjectMeta {
                generate_name: Some("csisc-".to_owned()),
                namespace: Some(self.namespace.clone()),
                labels: Some(BTreeMap::from(labels)),
                ..ObjectMeta::default()
            },
            storage_class_name: capacity_key.class.clone(),
            node_topology: Some(LabelSelector {
                match_labels: Some(capacity_key.segment.clone()),
                match_expressions: None,
            }),
            ..CSIStorageCapacity::default()
        };
        self.write_into(&mut object, room);
        object
    }
}

/// Which of the objects for one class and segment stays: the oldest.
pub(super) fn kept(there: &[Arc<CSIStorageCapacity>]) -> Option<&Arc<CSIStorageCapacity>> {
    there.iter().min_by_key(|object| {
        (object.metadata.creation_timestamp.as_ref().map(|time| time.0), object.name_any())
    })
}

/// Whether a quantity is this many bytes, in whatever unit it is written.
fn is_equal(quantity: Option<&Quantity>, bytes: Option<i64>) -> bool {
    match (quantity, bytes) {
        (Some(quantity), Some(bytes)) => size::bytes(quantity) == Some(bytes),
        (None, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
