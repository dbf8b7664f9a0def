//! Kubernetes' decision tables for the PV controller, case by case under Kubernetes' numbers.
//!
//! Objects are written as words. A volume: name, size, phase (`-` for none), then any of `ref=<claim>[:<uid>]`,
//! `policy=`, `class=`, `vac=`, `by=<provisioner>`, `migrated=<driver>`, `modes=RWO,ROX,RWX,RWOP` (RWO,ROX unless
//! said), `labels`, `block`, `nomode`, `deleted`, `bbc`, `fin=<finalizers>`, `host`, `nfs`, `csi`, `preresize=<size>`
//! and `msg=<message with _ for spaces>`. A claim: name, size, phase, then any of `uid=` (u unless said), `vol=`,
//! `class=` (`class=` alone is the empty class), `vac=`, `modes=`, `selector`, `block`, `nomode`, `bc`, `bbc`, `node=`,
//! `asked=<provisioner>`, `asked-beta=`, `migrated=`, `beta=<class annotation>`, `cap=` (the size asked for, if bound)
//! and `hasvac=`.

mod binder;
mod concurrent;
mod matching;
mod provision;
mod reclaim;
mod rules;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::ResourceExt as _;
use serde_json::{Value, json};

use berth_kube::Key;

use super::names;
use super::plan::{self, ObservedClaim};
use super::pool::{self, Pool};
use super::step::{About, Step, Target};
use berth_core::names as annotations;
use berth_kube::storage;

/// The objects of a case.
#[derive(Default, Clone)]
struct World {
    claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
    volumes: BTreeMap<String, Arc<PersistentVolume>>,
    classes: Vec<Arc<StorageClass>>,
    unscheduled: Vec<String>,
    events: Vec<String>,
    /// What was left undone because it is not a write.
    deeds: Vec<Step>,
    refused: bool,
}

impl World {
    fn new(claims: &str, volumes: &str) -> Self {
        let mut world = Self::default();
        for claim in parts(claims).map(claim) {
            world.claims.insert(claim.name_any(), Arc::new(claim));
        }
        for volume in parts(volumes).map(volume) {
            world.volumes.insert(volume.name_any(), Arc::new(volume));
        }
        world
    }

    fn with_class(mut self, name: &str, provisioner: &str, mode: &str, default: bool) -> Self {
        let class = json!({
            "metadata": { "name": name, "annotations": { "storageclass.kubernetes.io/is-default-class": default.to_string() } },
            "provisioner": provisioner, "volumeBindingMode": mode,
        });
        self.classes.push(Arc::new(serde_json::from_value(class).unwrap()));
        self
    }

    /// One look at a claim, as the controller looks.
    fn reconcile_claim(&mut self, name: &str) {
        let claim = self.claims[name].clone();
        let pool = Pool::new(|_| {});
        for (name, volume) in &self.volumes {
            pool.volume_changed(name, Some(volume));
        }
        let key = Key::of(claim.as_ref());
        let turn = pool.turn(key.clone());
        let class =
            self.classes.iter().find(|class| class.name_any() == storage::class_of_claim(&claim)).cloned();
        let completed = claim.annotations().contains_key(annotations::BIND_COMPLETED);
        let volume = match storage::volume_name(&claim) {
            "" if completed => None,
            "" => {
                let pointing = self
                    .volumes
                    .values()
                    .filter(|volume| storage::claim_of_volume(volume).as_ref() == Some(&key));
                let reserved = pool::reserved(pointing.cloned().collect(), &claim);
                reserved.or_else(|| if plan::is_delayed(class.as_deref()) { None } else { turn.find(&claim) })
            }
            name => self.volumes.get(name).cloned(),
        };
        drop(turn);
        let default_class = names::default_of(&self.classes);
        let steps = plan::plan_claim(&ObservedClaim {
            claim: &claim,
            volume: volume.as_deref(),
            class: class.as_deref(),
            default_class: default_class.as_deref(),
            unscheduled: &self.unscheduled,
        });
        self.carry_out(&steps, Some(name), volume.map(|volume| volume.name_any()).as_deref());
    }

    /// One look at a volume, as the controller looks.
    fn reconcile_volume(&mut self, name: &str) {
        let Some(volume) = self.volumes.get(name).cloned() else { return };
        let key = storage::claim_of_volume(&volume);
        let claim = self.claims.values().find(|claim| {
            Some(Key::of(claim.as_ref())) == key && claim.metadata.uid.as_deref() == plan::bound_uid(&volume)
        });
        let claim = claim.cloned();
        let steps = plan::plan_volume(&volume, claim.as_deref());
        self.carry_out(&steps, claim.map(|claim| claim.name_any()).as_deref(), Some(name));
    }

    fn carry_out(&mut self, steps: &[Step], claim: Option<&str>, volume: Option<&str>) {
        for step in steps {
            let old_claim = claim.and_then(|name| self.claims.get(name)).cloned();
            let old_volume = volume.and_then(|name| self.volumes.get(name)).cloned();
            match (step.target(), step) {
                (Target::Volume | Target::VolumeStatus, _) => {
                    let mut new = (*old_volume.unwrap()).clone();
                    step.change_volume(&mut new, old_claim.as_deref());
                    self.volumes.insert(new.name_any(), Arc::new(new));
                }
                (Target::Claim | Target::ClaimStatus, _) => {
                    let mut new = (*old_claim.unwrap()).clone();
                    step.change_claim(&mut new, old_volume.as_deref());
                    self.claims.insert(new.name_any(), Arc::new(new));
                }
                (Target::Nothing, Step::Record(event)) => {
                    let about = match event.about {
                        About::Claim => "",
                        About::Volume => " (volume)",
                    };
                    self.events.push(format!("{} {}{about}", event.severity.as_str(), event.reason));
                }
                (Target::Nothing, Step::Refuse(_)) => self.refused = true,
                (Target::Nothing, deed) => self.deeds.push(deed.clone()),
            }
        }
    }

    /// Looks at everything until nothing changes any more.
    fn settle(&mut self) {
        for _ in 0..20 {
            let before = (self.claims_text(), self.volumes_text());
            for name in self.claims.keys().cloned().collect::<Vec<_>>() {
                self.reconcile_claim(&name);
            }
            for name in self.volumes.keys().cloned().collect::<Vec<_>>() {
                self.reconcile_volume(&name);
            }
            if before == (self.claims_text(), self.volumes_text()) {
                return;
            }
        }
        panic!("does not settle: {} / {}", self.claims_text(), self.volumes_text());
    }

    fn claims_text(&self) -> String {
        self.claims.values().map(|claim| show_claim(claim)).collect::<Vec<_>>().join(" | ")
    }

    fn volumes_text(&self) -> String {
        self.volumes.values().map(|volume| show_volume(volume)).collect::<Vec<_>>().join(" | ")
    }

    /// Compares with what a case expects; objects in any order.
    fn check(&self, case: &str, claims: &str, volumes: &str, events: &str) {
        let expected = Self::new(claims, volumes);
        assert_eq!(self.claims_text(), expected.claims_text(), "claims of {case}");
        assert_eq!(self.volumes_text(), expected.volumes_text(), "volumes of {case}");
        let mut told = self.events.clone();
        told.dedup();
        assert_eq!(told.join(", "), events, "events of {case}");
    }
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split('|').map(str::trim).filter(|part| !part.is_empty())
}

fn modes(text: &str) -> Value {
    text.split(',')
        .map(|mode| match mode {
            "RWO" => "ReadWriteOnce",
            "ROX" => "ReadOnlyMany",
            "RWX" => "ReadWriteMany",
            "RWOP" => "ReadWriteOncePod",
            other => panic!("no access mode: {other}"),
        })
        .collect()
}

fn volume(text: &str) -> PersistentVolume {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [name, size, phase, rest @ ..] = words.as_slice() else { panic!("no volume: {text}") };
    let mut object = json!({
        "metadata": { "name": name, "uid": format!("uid-{name}"), "annotations": {} },
        "spec": {
            "capacity": { "storage": size }, "accessModes": modes("RWO,ROX"), "volumeMode": "Filesystem",
            "persistentVolumeReclaimPolicy": "Retain",
        },
        "status": {},
    });
    if *phase != "-" {
        object["status"]["phase"] = (*phase).into();
    }
    for word in rest {
        let (word, value) = word.split_once('=').unwrap_or((word, ""));
        let (meta, spec) = (|| "metadata", || "spec");
        match word {
            "ref" => {
                let (name, uid) = value.split_once(':').unwrap_or((value, ""));
                object[spec()]["claimRef"] = json!({ "namespace": "ns", "name": name });
                if !uid.is_empty() {
                    object[spec()]["claimRef"]["uid"] = uid.into();
                }
            }
            "policy" => object[spec()]["persistentVolumeReclaimPolicy"] = value.into(),
            "class" => object[spec()]["storageClassName"] = value.into(),
            "vac" => object[spec()]["volumeAttributesClassName"] = value.into(),
            "modes" => object[spec()]["accessModes"] = modes(value),
            "block" => object[spec()]["volumeMode"] = "Block".into(),
            "nomode" => object[spec()]["volumeMode"] = Value::Null,
            "host" => object[spec()]["hostPath"] = json!({ "path": "/tmp/volume" }),
            "nfs" => object[spec()]["nfs"] = json!({ "server": "server", "path": "/export" }),
            "csi" => object[spec()]["csi"] = json!({ "driver": "d", "volumeHandle": "h" }),
            "labels" => object[meta()]["labels"] = json!({ "foo": "true", "bar": "false" }),
            "deleted" => object[meta()]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into(),
            "fin" => object[meta()]["finalizers"] = value.split(',').collect(),
            "bbc" => object[meta()]["annotations"][annotations::BOUND_BY_CONTROLLER] = "yes".into(),
            "by" => object[meta()]["annotations"][annotations::PROVISIONED_BY] = value.into(),
            "migrated" => object[meta()]["annotations"][annotations::MIGRATED_TO] = value.into(),
            "preresize" => object[meta()]["annotations"][annotations::PRE_RESIZE_CAPACITY] = value.into(),
            "msg" => object["status"]["message"] = value.replace('_', " ").into(),
            _ => panic!("no word of a volume: {word}"),
        }
    }
    serde_json::from_value(object).unwrap()
}

fn claim(text: &str) -> PersistentVolumeClaim {
    let words: Vec<&str> = text.split_whitespace().collect();
    let [name, size, phase, rest @ ..] = words.as_slice() else { panic!("no claim: {text}") };
    let mut object = json!({
        "metadata": { "namespace": "ns", "name": name, "uid": "u", "annotations": {} },
        "spec": {
            "accessModes": modes("RWO,ROX"), "volumeMode": "Filesystem",
            "resources": { "requests": { "storage": size } },
        },
        "status": { "phase": phase },
    });
    if *phase == "Bound" {
        object["status"]["capacity"] = json!({ "storage": size });
    }
    for word in rest {
        let (word, value) = word.split_once('=').unwrap_or((word, ""));
        let (meta, spec, status) = (|| "metadata", || "spec", || "status");
        match word {
            "uid" => object[meta()]["uid"] = value.into(),
            "vol" => object[spec()]["volumeName"] = value.into(),
            "class" => object[spec()]["storageClassName"] = value.into(),
            "vac" => object[spec()]["volumeAttributesClassName"] = value.into(),
            "modes" => object[spec()]["accessModes"] = modes(value),
            "block" => object[spec()]["volumeMode"] = "Block".into(),
            "nomode" => object[spec()]["volumeMode"] = Value::Null,
            "selector" => {
                object[spec()]["selector"] = json!({ "matchLabels": { "foo": "true", "bar": "false" } });
            }
            "exists" => object[spec()]["selector"] = json!({ "matchLabels": { value: "true" } }),
            "bc" => object[meta()]["annotations"][annotations::BIND_COMPLETED] = "yes".into(),
            "bbc" => object[meta()]["annotations"][annotations::BOUND_BY_CONTROLLER] = "yes".into(),
            "node" => object[meta()]["annotations"][annotations::SELECTED_NODE] = value.into(),
            "beta" => object[meta()]["annotations"][annotations::BETA_STORAGE_CLASS] = value.into(),
            "migrated" => object[meta()]["annotations"][annotations::MIGRATED_TO] = value.into(),
            "asked" => {
                object[meta()]["annotations"][annotations::STORAGE_PROVISIONER] = value.into();
                object[meta()]["annotations"][annotations::BETA_STORAGE_PROVISIONER] = value.into();
            }
            "asked-new" => object[meta()]["annotations"][annotations::STORAGE_PROVISIONER] = value.into(),
            "cap" => object[status()]["capacity"] = json!({ "storage": value }),
            "hasvac" => object[status()]["currentVolumeAttributesClassName"] = value.into(),
            _ => panic!("no word of a claim: {word}"),
        }
    }
    if *phase == "Bound" {
        object["status"]["accessModes"] = object["spec"]["accessModes"].clone();
    }
    serde_json::from_value(object).unwrap()
}

/// All that a case compares of a volume.
fn show_volume(volume: &PersistentVolume) -> String {
    let mut object = serde_json::to_value(volume).unwrap();
    tidy(&mut object);
    if let Some(reference) = object["spec"]["claimRef"].as_object_mut() {
        for field in ["apiVersion", "kind", "resourceVersion"] {
            reference.remove(field);
        }
    }
    object.to_string()
}

/// All that a case compares of a claim.
fn show_claim(claim: &PersistentVolumeClaim) -> String {
    let mut object = serde_json::to_value(claim).unwrap();
    tidy(&mut object);
    object.to_string()
}

fn tidy(object: &mut Value) {
    if object["metadata"]["annotations"].as_object().is_some_and(serde_json::Map::is_empty) {
        object["metadata"].as_object_mut().unwrap().remove("annotations");
    }
}
