//! `berth up` as a person meets it: kubectl, the examples, drivers that join, mistakes, kills, and what is left.

mod access;
mod bad_input;
mod clouds;
mod commands;
mod crash;
mod cri;
mod drivers;
mod etcd;
mod examples;
mod flex;
mod images;
mod jobs;
mod manifests;
mod monitoring;
mod mycsi;
mod nfs;
mod nfs_export;
mod nodes;
mod page;
mod pods;
mod postgres;
mod random;
mod rootless;
mod seeds;
mod services;
mod stateful;
mod strangers;
mod sub_path;
mod top;
mod volumes;

use anyhow::{Result, ensure};
use berth_e2e::up::Machine;
use serde_json::Value;

/// Checks that a text says this.
fn says(text: &str, what: &str) -> Result<()> {
    ensure!(text.contains(what), "{what:?} is not said in:\n{text}");
    Ok(())
}

/// A claim of the local driver's class.
fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  \
         accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

/// A pod that runs a script, with the volume of a claim at /data.
fn pod(name: &str, claim: &str, script: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 2\n  \
         containers:\n  - name: main\n    image: busybox\n    command: [sh, -c, {script:?}]\n    \
         volumeMounts: [{{name: data, mountPath: /data}}]\n  \
         volumes: [{{name: data, persistentVolumeClaim: {{claimName: {claim}}}}}]\n"
    )
}

/// Several manifests in one.
fn together(manifests: &[String]) -> String {
    manifests.join("---\n")
}

/// The text at a path such as `/spec/volumeName`; empty if there is none.
fn text<'a>(object: &'a Value, path: &str) -> &'a str {
    object.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// Waits until no claim, volume or attachment is there, and nothing is mounted or attached.
fn until_empty(machine: &Machine) -> Result<()> {
    for kind in ["pods", "pvc", "pv", "volumeattachments"] {
        machine.until(&format!("no {kind}"), || Ok(machine.all(kind)?.is_empty().then_some(())))?;
    }
    machine.until("nothing is mounted", || {
        let left = berth_e2e::up::Leftovers::of(machine.data())?;
        Ok((left.mounts.is_empty() && left.loops.is_empty()).then_some(()))
    })
}
