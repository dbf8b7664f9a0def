//! The addresses of Services: each that wants one gets one of a range, which no other Service has.
//!
//! Which are taken is not kept anywhere: it is what the Services in the store say. So nothing has to be released or repaired,
//! and an address is free again with the write that removes its Service. A lock keeps two Services that are written at the same
//! time from getting the same one; it is held until the Service lies in the store.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use serde_json::{Value, json};
use tokio::sync::OwnedMutexGuard;

use super::Call;
use super::error::{Answer, Failure};
use super::object;
use super::write::put;
use crate::resource::{Cause, CauseReason};
use crate::rules::read::{at, map};
use crate::rules::service;
use crate::store::{Collection, Expect, Key, Store, WriteError};

const SERVICES: &str = "services";
/// The Service by which pods find the API server; it has the first address of the range.
const API: (&str, &str) = ("default", "kubernetes");

/// The addresses that Services may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceRange {
    /// The address of the network itself, which no Service gets.
    pub network: Ipv4Addr,
    /// How many bits of an address are the network's.
    pub prefix: u8,
}

impl ServiceRange {
    fn size(self) -> u32 {
        1u32.checked_shl(32 - u32::from(self.prefix.min(32))).unwrap_or(u32::MAX)
    }

    fn nth(self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network).wrapping_add(index))
    }

    fn contains(self, address: Ipv4Addr) -> bool {
        let index = u32::from(address).wrapping_sub(u32::from(self.network));
        (1..self.size() - 1).contains(&index)
    }

    /// A free address. The first ones are left to those that ask for a certain one, while there are others.
    fn free(self, taken: &HashSet<Ipv4Addr>) -> Option<Ipv4Addr> {
        let reserved = (self.size() / 16).clamp(1, 256);
        let all = (reserved..self.size() - 1).chain(1..reserved);
        all.map(|index| self.nth(index)).find(|address| !taken.contains(address))
    }
}

/// The address of the API server's own Service, which says in which range the Services of a store are.
pub fn api_service_address(store: &Store) -> Option<Ipv4Addr> {
    let object = store.get(&Key::new(Collection::from(SERVICES), API.0, API.1))?;
    service::address(&serde_json::from_slice(&object.bytes).ok()?)
}

/// Moves the Services of a store to another network: each keeps its place in it. For a store whose addresses somebody else has
/// by now; nobody serves it yet.
///
/// The API server's own Service, which says where the others are, is the last. So after a crash in between all are moved again,
/// be it to a third network, and it does not matter where each is.
pub async fn move_services(store: &Store, to: ServiceRange) -> Result<(), WriteError> {
    let view = store.view(&Collection::from(SERVICES));
    let api = Key::new(Collection::from(SERVICES), API.0, API.1);
    let (last, first): (Vec<_>, Vec<_>) = view.range(None, None).partition(|stored| stored.key == api);
    for stored in first.into_iter().chain(last) {
        let Ok(mut object) = serde_json::from_slice::<Value>(&stored.bytes) else { continue };
        let Some(address) = service::address(&object) else { continue };
        let moved = to.nth(u32::from(address) % to.size());
        if moved == address {
            continue;
        }
        let spec = map(&mut object, &["spec"]);
        spec.insert("clusterIP".to_owned(), json!(moved.to_string()));
        spec.insert("clusterIPs".to_owned(), json!([moved.to_string()]));
        store.write(stored.key.clone(), Expect::Revision(stored.revision), put(&object)).await?;
    }
    Ok(())
}

impl Call {
    /// Whether a write here gives Services addresses. It holds the lock over them until the object lies in the store, also if
    /// the client goes away meanwhile.
    pub(super) fn assigns_addresses(&self) -> bool {
        let resource = &self.served.resource;
        resource.group.is_empty()
            && &*resource.kind == "Service"
            && self.subresource.is_none()
            && self.api.inner.options.service_range.is_some()
    }

    /// Gives a Service the address that it needs, or refuses the one that it asks for. What is returned is to be held until
    /// the object is written.
    pub(super) async fn assign_address(
        &self,
        new: &mut Value,
        old: Option<&Value>,
    ) -> Answer<Option<OwnedMutexGuard<()>>> {
        let Some(range) = self.api.inner.options.service_range.filter(|_| self.assigns_addresses()) else {
            return Ok(None);
        };
        let resource = &self.served.resource;
        let kept = old.and_then(service::address);
        let is_settled = !service::needs_address(new)
            || at(new, &["spec", "clusterIP"]) == service::HEADLESS
            || kept.is_some() && kept == service::address(new);
        if is_settled {
            return Ok(None);
        }
        let guard = self.api.inner.addresses.clone().lock_owned().await;
        let view = self.store().view(&self.served.collection);
        let others = view.range(None, None).filter_map(|object| {
            let other: Value = serde_json::from_slice(&object.bytes).ok()?;
            service::address(&other)
        });
        let taken: HashSet<Ipv4Addr> = others.collect();
        let refuse = |why: &str| {
            let value = at(new, &["spec", "clusterIPs"]).clone();
            let cause = Cause {
                reason: CauseReason::Invalid,
                message: format!("Invalid value: {value}: {why}"),
                field: "spec.clusterIPs".to_owned(),
            };
            Err(Failure::invalid(resource, object::text(new, "name"), &[cause]))
        };
        match service::address(new) {
            Some(asked) if !range.contains(asked) => {
                return refuse(&format!(
                    "failed to allocate IP {asked}: the provided IP ({asked}) is not in the valid range. The range of valid \
                     IPs is {}/{}",
                    range.network, range.prefix
                ));
            }
            Some(asked) if taken.contains(&asked) => {
                return refuse(&format!("failed to allocate IP {asked}: provided IP is already allocated"));
            }
            Some(_) => {}
            None => {
                let Some(address) = range.free(&taken) else {
                    return Err(Failure::internal("failed to allocate a serviceIP: range is full"));
                };
                let spec = map(new, &["spec"]);
                spec.insert("clusterIP".to_owned(), json!(address.to_string()));
                spec.insert("clusterIPs".to_owned(), json!([address.to_string()]));
            }
        }
        Ok(Some(guard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store;

    #[test]
    fn a_range_gives_every_address_once_and_neither_its_first_nor_its_last() {
        let range = ServiceRange { network: Ipv4Addr::new(127, 9, 0, 0), prefix: 28 };
        let mut taken = HashSet::new();
        while let Some(address) = range.free(&taken) {
            assert!(range.contains(address) && taken.insert(address));
        }
        assert_eq!(taken.len(), 14);
        assert!(
            !range.contains(Ipv4Addr::new(127, 9, 0, 0)) && !range.contains(Ipv4Addr::new(127, 9, 0, 15))
        );
        let large = ServiceRange { network: Ipv4Addr::new(127, 9, 0, 0), prefix: 21 };
        assert_eq!(large.free(&HashSet::new()), Some(Ipv4Addr::new(127, 9, 0, 128)));
    }

    #[tokio::test]
    async fn services_that_were_moved_by_half_all_move() {
        let directory = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(directory.path(), store::Options::default()).unwrap();
        let range = |second| ServiceRange { network: Ipv4Addr::new(127, second, 64, 0), prefix: 21 };
        let key = |namespace: &str, name: &str| Key::new(Collection::from(SERVICES), namespace, name);
        for (namespace, name, address) in [
            (API.0, API.1, "127.9.64.1"),
            ("kube-system", "kube-dns", "127.9.64.10"),
            // As a move to another network left it that was cut off.
            ("default", "web", "127.10.65.7"),
            ("default", "headless", service::HEADLESS),
        ] {
            let object = json!({ "spec": { "clusterIP": address, "clusterIPs": [address] } });
            store.write(key(namespace, name), Expect::Absent, put(&object)).await.unwrap();
        }
        for _ in 0..2 {
            move_services(&store, range(11)).await.unwrap();
            assert_eq!(api_service_address(&store), Some(Ipv4Addr::new(127, 11, 64, 1)));
            for (namespace, name, address) in [
                ("kube-system", "kube-dns", "127.11.64.10"),
                ("default", "web", "127.11.65.7"),
                ("default", "headless", service::HEADLESS),
            ] {
                let object: Value =
                    serde_json::from_slice(&store.get(&key(namespace, name)).unwrap().bytes).unwrap();
                assert_eq!(
                    object["spec"],
                    json!({ "clusterIP": address, "clusterIPs": [address] }),
                    "{name}"
                );
            }
        }
    }
}
