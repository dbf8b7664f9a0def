//! The images that `berth up` has a program of its own for.
//!
//! Manifests of CSI drivers name images and leave the command to them. Nothing is pulled here; but Berth has the sidecars,
//! and some of the drivers, under their upstream names and flags. A container whose image is a row of [`STAND_INS`], and
//! which names no command, runs that program with its own arguments, and an event (`ImageStandIn`) says so.

use berth_node::StandIn;

use crate::driver::nfs::MountModeArg;

/// An image, by its name without registry, path and tag, and the words that start what runs in its place.
struct Row(&'static str, &'static [&'static str]);

const STAND_INS: &[Row] = &[
    Row("csi-provisioner", &["csi-provisioner"]),
    Row("csi-attacher", &["csi-attacher"]),
    Row("csi-resizer", &["csi-resizer"]),
    Row("csi-snapshotter", &["csi-snapshotter"]),
    Row("snapshot-controller", &["snapshot-controller"]),
    Row("csi-external-health-monitor-controller", &["csi-external-health-monitor-controller"]),
    Row("livenessprobe", &["livenessprobe"]),
    Row("csi-node-driver-registrar", &["csi-node-driver-registrar"]),
    Row("driver-registrar", &["csi-node-driver-registrar"]),
    Row(NFS_PLUGIN, &["driver", "nfs"]),
    // Where its manifests have the directory of the plugin.
    Row("do-csi-plugin", &["driver", "digitalocean", "--state-dir=/csi/state"]),
    Row(
        "csi-plugin",
        &[
            "driver",
            "aliyun",
            "--state-dir=/csi/diskplugin.csi.alibabacloud.com/state",
            "--service-port=usual",
        ],
    ),
    Row(
        "hostpathplugin",
        &["driver", "local", "--driver-name=hostpath.csi.k8s.io", "--data-dir=/csi-data-dir"],
    ),
];

/// The image whose program mounts shares, by the kernel's client or without.
const NFS_PLUGIN: &str = "nfsplugin";

/// The rows, as a node takes them. Where the kernel has no NFS client, the NFS driver is told to do without.
pub(crate) fn table() -> Vec<StandIn> {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    STAND_INS
        .iter()
        .map(|Row(image, words)| StandIn {
            image: (*image).to_owned(),
            words: owned(words),
            last_words: if *image == NFS_PLUGIN && MountModeArg::of_this_kernel().is_fuse() {
                vec!["--mount-mode=fuse".to_owned()]
            } else {
                Vec::new()
            },
            ..StandIn::default()
        })
        .collect()
}

/// What the help of `berth up` says of them.
pub(crate) fn help() -> String {
    let names: Vec<_> = STAND_INS.iter().map(|Row(image, _)| *image).collect();
    format!(
        "Images that Berth runs a program of its own for, if the container names no command: {}",
        names.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::TABLES;

    #[test]
    fn the_documentation_lists_every_stand_in() {
        let page = include_str!("../../../docs/workloads.md");
        for Row(image, words) in STAND_INS {
            let row = format!("| `{image}` | `berth {}` |", words.join(" "));
            assert!(page.contains(&row), "docs/workloads.md has no row {row}");
        }
    }

    #[test]
    fn every_stand_in_is_a_command_of_this_program() {
        for Row(image, words) in STAND_INS {
            let line = ["berth"].iter().chain(*words).chain(&["--help"]).map(OsString::from);
            let shown = TABLES.parse(line).expect_err("help comes as an error");
            assert_eq!(shown.kind(), clap::error::ErrorKind::DisplayHelp, "{image}: {shown}");
        }
    }
}
