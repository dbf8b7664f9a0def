//! `berth adopt`: PersistentVolumes for volumes that a driver has and no object knows.
//!
//! After the loss of the API server's objects, or a restore of an older backup, a driver still has its volumes. Each that no
//! PersistentVolume names gets one again, with the reclaim policy Retain. Where the driver's records, in the data directory, know
//! the claim it was made for, the volume is reserved for a claim of that name, which then binds to it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use berth_core::names::{CLAIM_NAME_PARAMETER, CLAIM_NAMESPACE_PARAMETER, PROVISIONED_BY};
use berth_csi::{Client as Driver, Endpoint, v1};
use clap::Args as ClapArgs;
use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference,
    PersistentVolume, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, ListParams, PostParams};
use serde_json::Value;

use crate::machine::ClusterArgs;
use crate::{backup, stack};

/// How long a driver may take for one answer.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Create PersistentVolumes for a driver's volumes that no object knows.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// The driver's socket [default: those of all drivers of the data directory]
    #[arg(long, value_name = "SOCKET")]
    csi_address: Option<PathBuf>,

    /// The class that the volumes get
    #[arg(long, default_value = "", value_name = "CLASS")]
    storage_class: String,

    /// Access modes of the volumes; the driver does not report them
    #[arg(long = "access-mode", default_values_t = ["ReadWriteOnce".to_owned()], value_name = "MODE")]
    access_modes: Vec<String>,

    /// Only print what would be created
    #[arg(long)]
    dry_run: bool,
}

/// Creates what is missing, and prints it.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let (cluster, data_dir) = args.cluster.connect().await?;
    let volumes: Api<PersistentVolume> = Api::all(cluster.client().clone());
    let present = volumes.list(&ListParams::default()).await.context("list the PersistentVolumes")?;
    let known: BTreeSet<(String, String)> = present
        .items
        .iter()
        .filter_map(|volume| volume.spec.as_ref()?.csi.as_ref())
        .map(|csi| (csi.driver.clone(), csi.volume_handle.clone()))
        .collect();
    let records = data_dir.as_deref().map(backup::driver_records).unwrap_or_default();
    let sockets = match (&args.csi_address, &data_dir) {
        (Some(socket), _) => vec![Socket { path: socket.clone(), once: false }],
        (None, Some(data_dir)) => sockets(data_dir)?,
        (None, None) => Vec::new(),
    };
    anyhow::ensure!(!sockets.is_empty(), "no driver of this machine was found; name its --csi-address");
    let mut adopted = 0;
    let mut listed_once = BTreeSet::new();
    for Socket { path, once } in sockets {
        let driver = Driver::connect(&Endpoint::Unix(path.clone()));
        let identity = driver.call(TIMEOUT, v1::GetPluginInfoRequest {}).await;
        let name = match identity.with_context(|| format!("ask the driver at {}", path.display())) {
            Ok(identity) => identity.name,
            // What a start with several nodes has left.
            Err(_) if once => continue,
            Err(error) => return Err(error),
        };
        // On nodes there are only those parts of such a driver that mount.
        if listed_once.contains(&name) {
            continue;
        }
        if once {
            listed_once.insert(name.clone());
        }
        for volume in list(&driver).await.with_context(|| format!("list the volumes of {name}"))? {
            let record = records.get(&volume.volume_id);
            let is_inline = record.is_some_and(|record| record["ephemeral"] == true);
            if is_inline || known.contains(&(name.clone(), volume.volume_id.clone())) {
                continue;
            }
            let object = persistent_volume(&name, &volume, record, &args);
            println!("{}", describe(&object));
            adopted += 1;
            if !args.dry_run {
                let created = volumes.create(&PostParams::default(), &object).await;
                created.with_context(|| format!("create the PersistentVolume of {}", volume.volume_id))?;
            }
        }
    }
    match (adopted, args.dry_run) {
        (0, _) => println!("Every volume is known."),
        (_, true) => println!("{adopted} volumes would be adopted."),
        (_, false) => {
            println!("Adopted {adopted} volumes. They are kept when their claims are deleted (Retain).");
        }
    }
    Ok(())
}

/// Where a driver listens.
struct Socket {
    path: PathBuf,
    /// It is the one controller of a driver for several nodes.
    once: bool,
}

/// Where the drivers of a data directory listen; those that run once for several nodes come first.
fn sockets(data_dir: &Path) -> anyhow::Result<Vec<Socket>> {
    let mut sockets = Vec::new();
    let mut add = |directory: &Path, name: &str, once: bool| -> anyhow::Result<()> {
        if directory.exists() {
            let entries =
                std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?;
            for entry in entries {
                let path = entry?.path().join(name);
                if path.exists() {
                    sockets.push(Socket { path, once });
                }
            }
        }
        Ok(())
    };
    add(&data_dir.join(stack::CONTROLLERS), stack::CONTROLLER_SOCKET, true)?;
    for root in stack::nodes::roots(data_dir) {
        add(&berth_node::layout::Layout::new(root.join(stack::NODE)).plugins(), "csi.sock", false)?;
    }
    Ok(sockets)
}

async fn list(driver: &Driver) -> anyhow::Result<Vec<v1::Volume>> {
    let mut volumes = Vec::new();
    let mut starting_token = String::new();
    loop {
        let page = driver.call(TIMEOUT, v1::ListVolumesRequest { max_entries: 0, starting_token }).await?;
        volumes.extend(page.entries.into_iter().filter_map(|entry| entry.volume));
        starting_token = page.next_token;
        if starting_token.is_empty() {
            return Ok(volumes);
        }
    }
}

fn persistent_volume(
    driver: &str,
    volume: &v1::Volume,
    record: Option<&Value>,
    args: &Args,
) -> PersistentVolume {
    let record = record.unwrap_or(&Value::Null);
    let parameter = |name: &str| record["parameters"][name].as_str().map(str::to_owned);
    let claim_ref =
        parameter(CLAIM_NAME_PARAMETER).zip(parameter(CLAIM_NAMESPACE_PARAMETER)).map(|(name, namespace)| {
            ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("PersistentVolumeClaim".to_owned()),
                name: Some(name),
                namespace: Some(namespace),
                ..ObjectReference::default()
            }
        });
    let name = record["name"].as_str().map(str::to_owned).filter(|name| is_object_name(name));
    let is_block = record["access"].as_str().is_some_and(|access| access.eq_ignore_ascii_case("block"));
    let attributes: BTreeMap<String, String> = volume.volume_context.clone().into_iter().collect();
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(name.unwrap_or_else(|| format!("adopted-{}", handle_name(&volume.volume_id)))),
            annotations: Some(BTreeMap::from([(PROVISIONED_BY.to_owned(), driver.to_owned())])),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: Some(args.access_modes.clone()),
            capacity: Some(BTreeMap::from([(
                "storage".to_owned(),
                Quantity(volume.capacity_bytes.max(1).to_string()),
            )])),
            claim_ref,
            csi: Some(CSIPersistentVolumeSource {
                driver: driver.to_owned(),
                volume_handle: volume.volume_id.clone(),
                fs_type: record["filesystem"].as_str().map(str::to_owned),
                volume_attributes: (!attributes.is_empty()).then_some(attributes),
                ..CSIPersistentVolumeSource::default()
            }),
            node_affinity: affinity(&volume.accessible_topology),
            persistent_volume_reclaim_policy: Some("Retain".to_owned()),
            storage_class_name: Some(args.storage_class.clone()),
            volume_mode: Some(if is_block { "Block" } else { "Filesystem" }.to_owned()),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

fn affinity(topologies: &[v1::Topology]) -> Option<VolumeNodeAffinity> {
    let requirement = |(key, value): (&String, &String)| NodeSelectorRequirement {
        key: key.clone(),
        operator: "In".to_owned(),
        values: Some(vec![value.clone()]),
    };
    let terms: Vec<NodeSelectorTerm> = topologies
        .iter()
        .filter(|topology| !topology.segments.is_empty())
        .map(|topology| NodeSelectorTerm {
            match_expressions: Some(topology.segments.iter().map(requirement).collect()),
            match_fields: None,
        })
        .collect();
    (!terms.is_empty())
        .then_some(VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: terms }) })
}

fn is_object_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    name.len() <= 253 && name.bytes().all(plain) && ends(name.bytes().next()) && ends(name.bytes().last())
}

/// A handle as a part of an object's name: itself where that may be, else its checksum.
fn handle_name(handle: &str) -> String {
    if is_object_name(handle) && handle.len() <= 200 {
        return handle.to_owned();
    }
    format!("{:08x}", berth_journal::checksum(handle.as_bytes()))
}

fn describe(volume: &PersistentVolume) -> String {
    let spec = volume.spec.clone().unwrap_or_default();
    let handle = spec.csi.map(|csi| csi.volume_handle).unwrap_or_default();
    let claim = spec.claim_ref.map(|claim| {
        format!(", for claim {}/{}", claim.namespace.unwrap_or_default(), claim.name.unwrap_or_default())
    });
    let name = volume.metadata.name.clone().unwrap_or_default();
    format!("PersistentVolume {name}: volume {handle}{}", claim.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn a_volume_is_kept_and_reserved_for_the_claim_that_the_record_names() {
        let args = Line::parse_from(["adopt", "--storage-class", "fast"]).args;
        let volume = v1::Volume {
            volume_id: "vol-1".to_owned(),
            capacity_bytes: 1024,
            accessible_topology: vec![v1::Topology {
                segments: [("zone".to_owned(), "a".to_owned())].into_iter().collect(),
            }],
            ..v1::Volume::default()
        };
        let record = serde_json::json!({
            "name": "pvc-1", "access": "block",
            "parameters": { CLAIM_NAME_PARAMETER: "data", CLAIM_NAMESPACE_PARAMETER: "team" },
        });
        let object = persistent_volume("driver", &volume, Some(&record), &args);
        assert_eq!(object.metadata.name.as_deref(), Some("pvc-1"));
        let spec = object.spec.clone().unwrap();
        assert_eq!(spec.persistent_volume_reclaim_policy.as_deref(), Some("Retain"));
        assert_eq!(
            (spec.volume_mode.as_deref(), spec.storage_class_name.as_deref()),
            (Some("Block"), Some("fast"))
        );
        let claim = spec.claim_ref.unwrap();
        assert_eq!(
            (claim.namespace.as_deref(), claim.name.as_deref(), claim.uid),
            (Some("team"), Some("data"), None)
        );
        assert_eq!(spec.capacity.unwrap()["storage"].0, "1024");
        assert!(spec.node_affinity.is_some());
        assert_eq!(describe(&object), "PersistentVolume pvc-1: volume vol-1, for claim team/data");

        let unknown =
            persistent_volume("driver", &v1::Volume { volume_id: "A/b".to_owned(), ..volume }, None, &args);
        assert!(unknown.metadata.name.unwrap().starts_with("adopted-"));
        assert_eq!(unknown.spec.unwrap().claim_ref, None);
    }
}
