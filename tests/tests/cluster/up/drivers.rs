//! Other drivers: one more process that registers as the upstream registrar does, and one that misbehaves.

use std::process::{Child, Stdio};

use anyhow::{Context, Result, ensure};
use berth_e2e::{
    Access, Csi, Kind, Shape,
    up::{Machine, NODE},
};
use berth_testkit::{FaultKind, REFUSED, RegisteredDriver};
use serde_json::{Value, json};
use tonic::Code;

use crate::up::{pod, says, text, together};

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(machine: &Machine, args: &[&str]) -> Result<Process> {
    let log = std::fs::File::options().create(true).append(true).open(machine.dir().join("others.log"))?;
    let mut command = machine.command(args);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    Ok(Process(command.spawn().with_context(|| format!("start {args:?}"))?))
}

/// A volume of a driver, and the claim for it.
fn static_claim(name: &str, driver: &str, handle: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolume\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: ''\n  \
         capacity: {{storage: 16Mi}}\n  accessModes: [ReadWriteOnce]\n  \
         csi: {{driver: {driver}, volumeHandle: {handle}}}\n---\n\
         apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  \
         storageClassName: ''\n  volumeName: {name}\n  accessModes: [ReadWriteOnce]\n  \
         resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

/// Tells the machine that a driver does not attach.
fn never_attaches(driver: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {{name: {driver}}}\nspec: {{attachRequired: false}}\n"
    )
}

fn drivers(machine: &Machine) -> Result<Vec<String>> {
    let node = machine.get(&format!("csinode/{NODE}"))?;
    let drivers = node["spec"]["drivers"].as_array().cloned().unwrap_or_default();
    Ok(drivers.iter().map(|driver| text(driver, "/name").to_owned()).collect())
}

fn until_registered(machine: &Machine, driver: &str, registered: bool) -> Result<()> {
    machine.until(&format!("{driver} registered: {registered}"), || {
        Ok((drivers(machine)?.iter().any(|name| name == driver) == registered).then_some(()))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_driver_process_registers_and_a_pod_runs_on_it() -> Result<()> {
    const OTHER: &str = "other.example";
    let machine = Machine::start()?;
    let socket = machine.data().join("node/plugins").join(OTHER).join("csi.sock");
    std::fs::create_dir_all(socket.parent().context("a socket lies in a directory")?)?;
    let (path, url) = (socket.display().to_string(), format!("unix://{}", socket.display()));
    let volumes = machine.dir().join("other").display().to_string();
    let registry = machine.data().join("node/plugins_registry").display().to_string();
    let options = ["--driver-name", OTHER, "--data-dir", &volumes, "--endpoint", &url, "--node-id", NODE];
    let driver = start(&machine, &[&["driver", "local", "--kind", "image"], &options[..]].concat())?;
    let registrar = [
        "csi-node-driver-registrar",
        "--csi-address",
        &path,
        "--kubelet-registration-path",
        &path,
        "--plugin-registration-path",
        &registry,
    ];
    let first = start(&machine, &registrar)?;
    tokio::task::block_in_place(|| until_registered(&machine, OTHER, true))?;
    let node = machine.get(&format!("node/{NODE}"))?;
    let ids = text(&node, "/metadata/annotations/csi.volume.kubernetes.io~1nodeid");
    let ids: Value = serde_json::from_str(ids)?;
    ensure!(ids == json!({"local.berth.dev": NODE, OTHER: NODE}), "{ids}");

    // A volume that the driver has, and objects that name it.
    let csi = Csi::connect(&url)?;
    let volume = csi.create("static", Shape::new(Kind::Image, Access::Mount("ext4"), 16)).await?;
    tokio::task::block_in_place(|| {
        machine.apply(&never_attaches(OTHER))?;
        machine.apply(&together(&[
            static_claim("data", OTHER, &volume.id),
            pod("one", "data", "exec sleep 1000000"),
        ]))?;
        machine.ready("one")?;
        machine.exec("one", "echo kept > /data/file")?;
        ensure!(machine.all("volumeattachments")?.is_empty(), "it never attaches");
        let table = std::fs::read_to_string("/proc/self/mountinfo")?;
        let staged = machine.data().join("node/plugins/kubernetes.io/csi").join(OTHER).display().to_string();
        ensure!(table.contains(&staged), "nothing is staged below {staged}");
        machine.delete("pod/one")?;

        // Without its registrar the driver is gone from the node; with it, it is back, and so is the data.
        drop(first);
        std::fs::remove_file(format!("{registry}/{OTHER}-reg.sock"))?;
        until_registered(&machine, OTHER, false)?;
        machine.apply(&pod("two", "data", "exec sleep 1000000"))?;
        says(&machine.event("Pod", "two", "FailedMount")?, OTHER)?;
        says(&machine.explain("pod/two")?, OTHER)
    })?;
    let second = start(&machine, &registrar)?;
    tokio::task::block_in_place(|| {
        machine.ready("two")?;
        ensure!(machine.exec("two", "cat /data/file")? == "kept\n");
        machine.kubectl(&["delete", "pod/two", "pvc/data", "pv/data"])?;
        crate::up::until_empty(&machine)
    })?;
    csi.delete(&volume.id).await?;
    drop((driver, second));
    machine.finish()
}

/// Waits until a pod is told what its driver said, and checks that it is explained, too.
const PUBLISH: &str = "NodePublishVolume";

/// A driver without staging or attaching in this process, which a socket of its own announces to the machine.
async fn register(machine: &Machine, driver: &str, socket: &str) -> RegisteredDriver {
    let registered = RegisteredDriver::new(driver, &machine.dir().join(socket));
    registered.start(&machine.data().join("node/plugins_registry"), &format!("{socket}.sock")).await;
    registered
}

fn until_told_why(machine: &Machine, name: &str) -> Result<()> {
    machine.until(&format!("{name} is told why"), || {
        let reported = machine.describe(&format!("pod/{name}"))?;
        Ok((reported.contains("FailedMount") && reported.contains(REFUSED)).then_some(()))
    })?;
    let explained = machine.explain(&format!("pod/{name}"))?;
    says(&explained, &format!("Stuck: pod {name}: "))?;
    says(&explained, REFUSED)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_fails_is_named_with_what_it_said_and_asked_again() -> Result<()> {
    const DRIVER: &str = "faulty.example";
    const REPAIRED: &str = "code-13";
    let machine = Machine::start()?;
    let faulty = register(&machine, DRIVER, "faulty").await;
    tokio::task::block_in_place(|| {
        until_registered(&machine, DRIVER, true)?;
        machine.apply(&never_attaches(DRIVER))?;
        let codes = [
            Code::Cancelled,
            Code::Unknown,
            Code::InvalidArgument,
            Code::DeadlineExceeded,
            Code::NotFound,
            Code::AlreadyExists,
            Code::PermissionDenied,
            Code::ResourceExhausted,
            Code::FailedPrecondition,
            Code::Aborted,
            Code::OutOfRange,
            Code::Unimplemented,
            Code::Internal,
            Code::Unavailable,
            Code::DataLoss,
            Code::Unauthenticated,
        ];
        // Each in a pod of its own, all at once, with one that works and one that never answers.
        let name = |code: Code| format!("code-{:02}", i32::from(code));
        let mut names: Vec<String> = codes.into_iter().map(name).collect();
        for code in codes {
            faulty.fail(PUBLISH, &name(code), FaultKind::Code(code), u32::MAX);
        }
        faulty.fail(PUBLISH, "hangs", FaultKind::Hang, u32::MAX);
        names.extend(["hangs".to_owned(), "works".to_owned()]);
        let objects: Vec<String> = names
            .iter()
            .flat_map(|name| [static_claim(name, DRIVER, name), pod(name, name, "exec sleep 1000000")])
            .collect();
        machine.apply(&together(&objects))?;
        machine.ready("works")?;
        // Each attempt is later than the one before, so the one that is to be repaired is not kept waiting.
        until_told_why(&machine, REPAIRED)?;
        faulty.repair(PUBLISH, REPAIRED);
        for name in codes.into_iter().map(name).filter(|name| name != REPAIRED) {
            until_told_why(&machine, &name)?;
        }
        ensure!(!faulty.times(PUBLISH, "hangs").is_empty());

        // One that is repaired goes on by itself; the others can be deleted although nothing was mounted.
        machine.ready(REPAIRED)?;
        let kept = [REPAIRED, "hangs", "works"];
        let others =
            names.iter().filter(|name| !kept.contains(&name.as_str())).map(|name| format!("pod/{name}"));
        machine.delete(&others.collect::<Vec<_>>().join(" "))
    })?;

    // It crashes: its pod runs on, and new ones are told what is missing.
    drop(faulty);
    tokio::task::block_in_place(|| {
        machine.exec("works", "true")?;
        machine.apply(&together(&[
            static_claim("late", DRIVER, "late"),
            pod("late", "late", "exec sleep 1000000"),
        ]))?;
        let why = machine.event("Pod", "late", "FailedMount")?;
        ensure!(why.len() > 20, "{why}");
        machine.finish()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_may_register_twice() -> Result<()> {
    const DRIVER: &str = "twice.example";
    let machine = Machine::start()?;
    let first = register(&machine, DRIVER, "one").await;
    tokio::task::block_in_place(|| until_registered(&machine, DRIVER, true))?;
    let second = register(&machine, DRIVER, "two").await;
    tokio::task::block_in_place(|| {
        machine
            .until("the second is answered", || Ok((!second.statuses().borrow().is_empty()).then_some(())))?;
        let statuses = first.statuses().borrow().clone();
        ensure!(statuses.iter().all(|status| status.plugin_registered), "{statuses:?}");
        let twice = drivers(&machine)?.iter().filter(|name| *name == DRIVER).count();
        ensure!(twice == 1, "it is there {twice} times");
        machine.apply(&never_attaches(DRIVER))?;
        machine.apply(&together(&[
            static_claim("data", DRIVER, "data"),
            pod("one", "data", "exec sleep 1000000"),
        ]))?;
        machine.ready("one")?;
        machine.finish()
    })
}
