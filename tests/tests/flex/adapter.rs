//! `berth driver flex`: drivers in shell, served as CSI drivers.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use berth_csi::v1::{self, volume_capability};
use berth_e2e::{csi::Csi, driver, machine, program::Program, sanity};
use tempfile::TempDir;
use tonic::Code;

/// Mounts the directory that the option `path` names, and writes down how it was called.
const MOUNTS: &str = r#"#!/bin/sh
printf '%s\n' "$*" >> "$(dirname "$0")/../calls"
option() { printf %s "$2" | sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
case $1 in
    init) echo '{"status":"Success","capabilities":{"attach":false,"supportsMetrics":true}}' ;;
    mount)
        path=$(option path "$3")
        if mkdir -p "$path" "$2" && mount --bind "$path" "$2"; then
            echo '{"status":"Success"}'
        else
            echo '{"status":"Failure","message":"mount failed"}'; exit 1
        fi ;;
    unmount)
        if umount "$2"; then echo '{"status":"Success"}'; else echo '{"status":"Failure","message":"not mounted"}'; exit 1; fi ;;
    *) echo '{"status":"Not supported"}' ;;
esac 2>/dev/null
"#;

/// Attaches nothing to a node called node-1, and mounts a tmpfs for it there.
const ATTACHES: &str = r#"#!/bin/sh
printf '%s\n' "$*" >> "$(dirname "$0")/../calls"
case $1 in
    init) echo '{"status":"Success"}' ;;
    attach) echo '{"status":"Success","device":"disk-7"}' ;;
    waitforattach) echo "{\"status\":\"Success\",\"device\":\"$2\"}" ;;
    mountdevice) mount -t tmpfs "$3" "$2" && echo '{"status":"Success"}' ;;
    unmountdevice) umount "$2" && echo '{"status":"Success"}' ;;
    detach | expandfs) echo '{"status":"Success"}' ;;
    *) echo '{"status":"Not supported"}' ;;
esac
"#;

/// A driver in shell and the adapter that serves it.
struct Adapter {
    dir: TempDir,
    plugin: PathBuf,
    program: Option<Program>,
}

impl Adapter {
    async fn start(script: &str) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let plugin = dir.path().join("acme.com~disk/disk");
        fs::create_dir_all(plugin.parent().context("a parent")?)?;
        // Written by a process that ends, so that nobody who forks meanwhile holds it open for writing.
        fs::write(dir.path().join("body"), script)?;
        machine::run("cp", &[&text(&dir.path().join("body")), &text(&plugin)])?;
        fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755))?;
        let mut adapter = Self { dir, plugin, program: None };
        adapter.begin().await?;
        Ok(adapter)
    }

    async fn begin(&mut self) -> Result<()> {
        let (plugin, state, endpoint) = (text(&self.plugin), text(&self.path("state")), self.endpoint());
        let words = [
            "driver",
            "flex",
            "--plugin",
            &plugin,
            "--state-dir",
            &state,
            "--endpoint",
            &endpoint,
            "--node-id",
            "node-1",
        ];
        let mut program = Program::start(&driver::binary()?, &words, &[], self.path("adapter.log"))?;
        program.says("ready").await?;
        self.program = Some(program);
        Ok(())
    }

    async fn kill(&mut self) -> Result<()> {
        self.program.take().context("it runs")?.kill()?;
        self.begin().await
    }

    async fn stop(mut self) -> Result<()> {
        self.program.take().context("it runs")?.stop().await?;
        self.nothing_left()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn endpoint(&self) -> String {
        format!("unix://{}", text(&self.path("csi.sock")))
    }

    fn csi(&self) -> Result<Csi> {
        Csi::connect(&self.endpoint())
    }

    /// How the driver was called since the last time, with its directory cut off.
    fn calls(&self) -> Result<Vec<String>> {
        let path = self.path("calls");
        let calls = fs::read_to_string(&path).unwrap_or_default();
        fs::write(&path, "")?;
        let here = text(self.dir.path());
        Ok(calls.lines().filter(|call| *call != "init").map(|call| call.replace(&here, "")).collect())
    }

    fn nothing_left(&self) -> Result<()> {
        let mounts = machine::mounts_below(self.dir.path())?;
        ensure!(mounts.is_empty(), "still mounted: {mounts:?}");
        for directory in ["state/mounted", "state/mounts"] {
            let left = fs::read_dir(self.path(directory)).map_or(0, Iterator::count);
            ensure!(left == 0, "{left} entries are left in {directory}");
        }
        Ok(())
    }
}

impl Drop for Adapter {
    fn drop(&mut self) {
        self.program = None;
        let _ = machine::clear_below(self.dir.path());
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn capability() -> v1::VolumeCapability {
    let mount = volume_capability::MountVolume { fs_type: "ext4".to_owned(), ..Default::default() };
    let mode = volume_capability::access_mode::Mode::SingleNodeWriter;
    v1::VolumeCapability {
        access_mode: Some(volume_capability::AccessMode { mode: mode.into() }),
        access_type: Some(volume_capability::AccessType::Mount(mount)),
    }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn conforms(script: &str, parameters: &str, least: u64) -> Result<()> {
    let adapter = Adapter::start(script).await?;
    fs::write(
        adapter.path("parameters.yaml"),
        parameters.replace("STORAGE", &text(&adapter.path("storage"))),
    )?;
    let args = [
        format!("--csi.endpoint={}", adapter.endpoint()),
        format!("--csi.mountdir={}", text(&adapter.path("mount"))),
        format!("--csi.stagingdir={}", text(&adapter.path("staging"))),
        format!("--csi.testvolumeparameters={}", text(&adapter.path("parameters.yaml"))),
        "--csi.testvolumesize=1073741824".to_owned(),
    ];
    let outcome = sanity::run(adapter.dir.path(), &args)?;
    writeln!(std::io::stderr(), "csi-sanity, berth driver flex: {outcome}")?;
    ensure!(outcome.failures.is_empty(), "csi-sanity failed:\n{}", outcome.failures.join("\n"));
    ensure!(outcome.count("passed") >= usize::try_from(least)?, "{outcome}");
    adapter.stop().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_mounts_conforms() -> Result<()> {
    conforms(MOUNTS, "path: STORAGE\nflex.berth.dev/directory: volumes/${volume.id}\n", 30).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_attaches_conforms() -> Result<()> {
    conforms(ATTACHES, "disk: disk-${volume.id}\n", 30).await
}

/// A driver that only mounts, killed after each call.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_is_mounted_once_and_unmounted_whenever_the_adapter_is_killed() -> Result<()> {
    let mut adapter = Adapter::start(MOUNTS).await?;
    let (storage, target) = (adapter.path("storage"), adapter.path("pod/mount"));
    let publish = v1::NodePublishVolumeRequest {
        volume_id: "pv-1".to_owned(),
        target_path: text(&target),
        volume_capability: Some(capability()),
        volume_context: map(&[
            ("path", &text(&storage)),
            ("csi.storage.k8s.io/pod.name", "web"),
            ("csi.storage.k8s.io/pod.namespace", "shop"),
        ]),
        secrets: map(&[("password", "open sesame")]),
        ..Default::default()
    };
    for _ in 0..2 {
        adapter.csi()?.node.node_publish_volume(publish.clone()).await?;
        ensure!(machine::mounts_below(adapter.dir.path())? == std::slice::from_ref(&target));
        adapter.kill().await?;
    }
    fs::write(target.join("file"), "from the pod")?;
    ensure!(fs::read_to_string(storage.join("file"))? == "from the pod");
    let calls = adapter.calls()?;
    let document = r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pod.name":"web","kubernetes.io/pod.namespace":"shop","kubernetes.io/pod.uid":"","kubernetes.io/pvOrVolumeName":"pv-1","kubernetes.io/readwrite":"rw","kubernetes.io/secret/password":"b3BlbiBzZXNhbWU=","kubernetes.io/serviceAccount.name":"","path":"/storage"}"#;
    ensure!(calls == [format!("mount /pod/mount {document}")], "{calls:?}");
    let log = fs::read_to_string(adapter.path("adapter.log"))?;
    ensure!(!log.contains("sesame") && !log.contains("b3BlbiBz"), "a secret is in the log");

    let unpublish =
        v1::NodeUnpublishVolumeRequest { volume_id: "pv-1".to_owned(), target_path: text(&target) };
    for _ in 0..2 {
        adapter.csi()?.node.node_unpublish_volume(unpublish.clone()).await?;
        adapter.kill().await?;
    }
    ensure!(adapter.calls()? == ["unmount /pod/mount"]);
    ensure!(!target.exists());
    // Read-only, whatever the driver makes of it.
    adapter
        .csi()?
        .node
        .node_publish_volume(v1::NodePublishVolumeRequest { readonly: true, ..publish.clone() })
        .await?;
    ensure!(fs::write(target.join("file"), "").is_err());
    adapter.csi()?.node.node_unpublish_volume(unpublish).await?;
    // An option that only Kubernetes may set.
    let mut reserved = publish;
    reserved.volume_context.insert("kubernetes.io/fsType".to_owned(), "xfs".to_owned());
    let refused = adapter.csi()?.node.node_publish_volume(reserved).await.unwrap_err();
    ensure!(
        refused.code() == Code::InvalidArgument && refused.message().contains("kubernetes.io/fsType"),
        "{refused}"
    );
    adapter.stop().await
}

/// A driver that attaches is called as upstream's controller and kubelet call it, also by processes that know nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_attaches_is_called_in_order_also_when_killed_between() -> Result<()> {
    let mut adapter = Adapter::start(ATTACHES).await?;
    let (staging, target) = (adapter.path("staging"), adapter.path("pod/mount"));
    let context = map(&[("size", "7"), ("flex.berth.dev/driver", "acme.com/disk")]);
    let attached = adapter
        .csi()?
        .controller
        .controller_publish_volume(v1::ControllerPublishVolumeRequest {
            volume_id: "pv-2".to_owned(),
            node_id: "node-1".to_owned(),
            volume_capability: Some(capability()),
            volume_context: context.clone(),
            ..Default::default()
        })
        .await?
        .into_inner();
    ensure!(attached.publish_context == map(&[("device", "disk-7")]), "{attached:?}");
    adapter.kill().await?;
    let stage = v1::NodeStageVolumeRequest {
        volume_id: "pv-2".to_owned(),
        staging_target_path: text(&staging),
        volume_capability: Some(capability()),
        publish_context: attached.publish_context.clone(),
        volume_context: context.clone(),
        ..Default::default()
    };
    adapter.csi()?.node.node_stage_volume(stage).await?;
    adapter.kill().await?;
    let publish = v1::NodePublishVolumeRequest {
        volume_id: "pv-2".to_owned(),
        staging_target_path: text(&staging),
        target_path: text(&target),
        volume_capability: Some(capability()),
        publish_context: attached.publish_context,
        volume_context: context,
        ..Default::default()
    };
    adapter.csi()?.node.node_publish_volume(publish).await?;
    fs::write(target.join("file"), "from the pod")?;
    adapter.kill().await?;
    let grow = v1::NodeExpandVolumeRequest {
        volume_id: "pv-2".to_owned(),
        volume_path: text(&target),
        staging_target_path: text(&staging),
        capacity_range: Some(v1::CapacityRange { required_bytes: 2 << 30, limit_bytes: 0 }),
        ..Default::default()
    };
    adapter.csi()?.node.node_expand_volume(grow).await?;
    ensure!(fs::read_to_string(staging.join("file"))? == "from the pod");
    let unpublish =
        v1::NodeUnpublishVolumeRequest { volume_id: "pv-2".to_owned(), target_path: text(&target) };
    adapter.csi()?.node.node_unpublish_volume(unpublish).await?;
    adapter.kill().await?;
    let unstage =
        v1::NodeUnstageVolumeRequest { volume_id: "pv-2".to_owned(), staging_target_path: text(&staging) };
    for _ in 0..2 {
        adapter.csi()?.node.node_unstage_volume(unstage.clone()).await?;
        adapter.kill().await?;
    }
    let detach = v1::ControllerUnpublishVolumeRequest {
        volume_id: "pv-2".to_owned(),
        node_id: "node-1".to_owned(),
        ..Default::default()
    };
    adapter.csi()?.controller.controller_unpublish_volume(detach).await?;

    check_calls(&adapter.calls()?)?;
    adapter.stop().await
}

/// The calls of a driver that attaches, from the first to the last.
fn check_calls(calls: &[String]) -> Result<()> {
    let names: Vec<&str> = calls.iter().filter_map(|call| call.split(' ').next()).collect();
    // Some may be repeated by a process that was started anew.
    let mut once = names.clone();
    once.dedup();
    ensure!(
        once == [
            "attach",
            "waitforattach",
            "mountdevice",
            "mount",
            "expandvolume",
            "expandfs",
            "unmount",
            "unmountdevice",
            "detach"
        ],
        "{calls:#?}"
    );
    let json = r#"{"kubernetes.io/fsType":"ext4","kubernetes.io/pvOrVolumeName":"pv-2","kubernetes.io/readwrite":"rw","size":"7"}"#;
    ensure!(calls[0] == format!("attach {json} node-1"), "{}", calls[0]);
    ensure!(calls.contains(&format!("waitforattach disk-7 {json}")), "{calls:#?}");
    ensure!(calls.contains(&format!("mountdevice /staging disk-7 {json}")), "{calls:#?}");
    ensure!(calls.last().is_some_and(|call| call == "detach pv-2 node-1"), "{calls:#?}");
    Ok(())
}
