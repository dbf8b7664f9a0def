//! `managedFields`: who owns which fields of an object.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::fields::FieldSet;
use super::typed::Comparison;

/// No more managers than this are remembered for updates.
const MAX_UPDATERS: usize = 10;
/// Whom the fields of the oldest updaters go to.
const ANCIENT: &str = "ancient-changes";

/// One who manages fields, as an entry is told apart from others; appliers keep theirs across versions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manager {
    pub(super) name: String,
    pub(super) operation: Operation,
    /// The group and version through which the fields were written; empty for those who apply.
    pub(super) api_version: String,
    pub(super) subresource: String,
}

/// How fields came to be managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

/// What one manager owns.
#[derive(Debug, Clone, Default)]
pub(super) struct Owned {
    pub(super) set: FieldSet,
    pub(super) api_version: String,
    pub(super) time: Option<String>,
}

/// All managers of an object.
#[derive(Debug, Clone, Default)]
pub(super) struct Managed {
    pub(super) entries: BTreeMap<Manager, Owned>,
}

impl Manager {
    /// As messages name it.
    pub(super) fn display(&self) -> String {
        let through = match self.subresource.as_str() {
            "" => String::new(),
            subresource => format!(" with subresource {subresource:?}"),
        };
        let using = match self.operation {
            Operation::Apply => String::new(),
            Operation::Update => format!(" using {}", self.api_version),
        };
        format!("{:?}{through}{using}", self.name)
    }
}

impl Managed {
    /// Reads an object's `managedFields`.
    pub(super) fn read(object: &Value) -> Result<Self, String> {
        let mut managed = Self::default();
        for (index, entry) in object["metadata"]["managedFields"].as_array().into_iter().flatten().enumerate()
        {
            let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            let operation = match entry["operation"].as_str() {
                Some("Apply") => Operation::Apply,
                Some("Update") => Operation::Update,
                _ => return Err("operation must be `Apply` or `Update`".to_owned()),
            };
            let api_version = text("apiVersion");
            if api_version.is_empty() {
                return Err("apiVersion must not be empty".to_owned());
            }
            match text("fieldsType").as_str() {
                "FieldsV1" => {}
                "" => return Err(format!("missing fieldsType in managed fields entry {index}")),
                other => return Err(format!("invalid fieldsType {other:?} in managed fields entry {index}")),
            }
            let nothing = json!({});
            let set = FieldSet::read(entry.get("fieldsV1").unwrap_or(&nothing))
                .ok_or_else(|| "error decoding set".to_owned())?;
            let owner = Manager {
                name: text("manager"),
                operation,
                api_version: if operation == Operation::Apply { String::new() } else { api_version.clone() },
                subresource: text("subresource"),
            };
            let time = entry["time"].as_str().map(str::to_owned);
            managed.entries.insert(owner, Owned { set, api_version, time });
        }
        Ok(managed)
    }

    /// Writes an object's `managedFields`.
    pub(super) fn write(&self, object: &mut Value) {
        let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else { return };
        if self.entries.is_empty() {
            metadata.remove("managedFields");
            return;
        }
        let mut entries: Vec<_> = self.entries.iter().collect();
        entries.sort_by(|(a, owned_a), (b, owned_b)| {
            let order = |manager: &Manager, owned: &Owned| {
                let Manager { name, operation, subresource, .. } = manager.clone();
                (operation, owned.time.clone(), name, owned.api_version.clone(), subresource)
            };
            order(a, owned_a).cmp(&order(b, owned_b))
        });
        let written = entries.into_iter().map(|(manager, owned)| {
            let operation = match manager.operation {
                Operation::Apply => "Apply",
                Operation::Update => "Update",
            };
            let mut entry = json!({"manager": manager.name, "operation": operation, "apiVersion": owned.api_version,
                "fieldsType": "FieldsV1", "fieldsV1": owned.set.write()});
            if let Some(time) = &owned.time {
                entry["time"] = time.clone().into();
            }
            if !manager.subresource.is_empty() {
                entry["subresource"] = manager.subresource.clone().into();
            }
            entry
        });
        metadata.insert("managedFields".to_owned(), written.collect());
    }

    /// Takes from all managers but one what has changed: fields added or modified, which are returned by manager, and
    /// fields that are gone.
    pub(super) fn yield_to(
        &mut self,
        except: Option<&Manager>,
        changes: &Comparison,
    ) -> Vec<(Manager, FieldSet)> {
        let new = changes.modified.union(&changes.added);
        let mut yielded = Vec::new();
        for (manager, owned) in self.entries.iter_mut().filter(|(manager, _)| Some(*manager) != except) {
            let conflict = owned.set.intersection(&new);
            if !conflict.is_empty() {
                owned.set = owned.set.difference(&conflict);
                yielded.push((manager.clone(), conflict));
            }
            owned.set = owned.set.difference(&changes.removed);
        }
        self.entries.retain(|_, owned| !owned.set.is_empty());
        yielded
    }

    /// Everything any manager owns.
    pub(super) fn union(&self) -> FieldSet {
        self.entries.values().fold(FieldSet::default(), |all, owned| all.union(&owned.set))
    }

    /// Puts the oldest updaters together when there are too many.
    pub(super) fn cap(&mut self) {
        let mut updaters: Vec<Manager> =
            self.entries.keys().filter(|manager| manager.operation == Operation::Update).cloned().collect();
        let mut count = updaters.len();
        updaters.sort_by_key(|manager| (self.entries[manager].time.clone(), manager.clone()));
        let mut first: BTreeMap<String, Manager> = BTreeMap::new();
        for manager in updaters {
            if count <= MAX_UPDATERS {
                return;
            }
            let version = self.entries[&manager].api_version.clone();
            let Some(earlier) = first.get(&version) else {
                first.insert(version, manager);
                continue;
            };
            let bucket = Manager {
                name: ANCIENT.to_owned(),
                operation: Operation::Update,
                api_version: version,
                subresource: String::new(),
            };
            if !self.entries.contains_key(&bucket) {
                let owned = self.entries.remove(earlier).unwrap_or_default();
                self.entries.insert(bucket.clone(), owned);
            }
            let Some(merged) = self.entries.remove(&manager) else { continue };
            let ancient = self.entries.entry(bucket).or_default();
            ancient.set = ancient.set.union(&merged.set);
            ancient.time = merged.time;
            count -= 1;
        }
    }
}
