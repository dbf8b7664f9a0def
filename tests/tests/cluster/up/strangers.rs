//! Drivers that somebody else runs, known by their socket alone (`--driver-endpoint`).

use std::{fs, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use berth_csi::{CallLayer, ControllerCapability, Endpoint, Listener, Metrics};
use berth_e2e::{
    driver,
    program::Program,
    up::{Machine, NODE},
};
use berth_testkit::FakeDriver;
use rustix::process::Signal;
use tokio::runtime::Runtime;

use crate::up::{pod, says, text, together, until_empty};

/// A directory for sockets, whose path is short.
fn sockets() -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("st-").rand_bytes(5).tempdir().context("make a directory")
}

/// A class of a driver, which makes volumes at once.
fn class(driver: &str) -> String {
    format!(
        "apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {{name: theirs}}\nprovisioner: {driver}\nallowVolumeExpansion: true\n"
    )
}

fn claim(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: {name}}}\nspec:\n  storageClassName: theirs\n  \
         accessModes: [ReadWriteOnce]\n  resources: {{requests: {{storage: 16Mi}}}}\n"
    )
}

fn until_registered(machine: &Machine, driver: &str) -> Result<()> {
    machine.until(&format!("{driver} is registered"), || {
        let node = machine.get(&format!("csinode/{NODE}"))?;
        let drivers = node["spec"]["drivers"].as_array().cloned().unwrap_or_default();
        Ok(drivers.iter().any(|known| text(known, "/name") == driver).then_some(()))
    })
}

fn until_bound(machine: &Machine, claim: &str) -> Result<()> {
    machine.wait(&format!("pvc/{claim}"), "jsonpath={.status.phase}=Bound")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_comes_late_and_restarts_gets_sidecars_and_a_registration() -> Result<()> {
    let dir = sockets()?;
    let socket = dir.path().join("mycsi.sock");
    let endpoint = format!("unix://{}", socket.display());
    let machine = tokio::task::block_in_place(|| {
        Machine::start_with(&["--driver", "none", "--driver-endpoint", &endpoint])
    })?;
    says(&machine.log(), &format!("waiting for a driver at {}", socket.display()))?;

    let root = dir.path().join("root").display().to_string();
    let state = dir.path().join("state").display().to_string();
    let environment =
        [("MYCSI_ROOT", &*root), ("CSI_ENDPOINT", &*endpoint), ("NODE_ID", NODE), ("STATE_DIR", &*state)];
    let start = || Program::start(&driver::built("mycsi")?, &[], &environment, dir.path().join("mycsi.log"));
    let mycsi = start()?;
    tokio::task::block_in_place(|| {
        until_registered(&machine, "mycsi.jtthink.com")?;
        machine.apply(&together(&[
            class("mycsi.jtthink.com"),
            claim("one"),
            pod("one", "one", "echo kept > /data/file; exec sleep 1000000"),
        ]))?;
        machine.ready("one")?;
        until_written(&machine, "one")
    })?;

    // Killed, it is back with its volumes, and is used at once.
    rustix::process::kill_process(mycsi.pid(), Signal::KILL)?;
    drop(mycsi);
    let mycsi = start()?;
    tokio::task::block_in_place(|| {
        machine.apply(&together(&[claim("two"), pod("two", "two", "exec sleep 1000000")]))?;
        machine.ready("two")?;
        until_written(&machine, "one")?;
        machine.kubectl(&["delete", "pod/one", "pod/two", "pvc/one", "pvc/two"])?;
        until_empty(&machine)?;
        let left = fs::read_dir(Path::new(&root).join(".mycsi"))?.count();
        ensure!(left == 0, "{left} records are left");
        Ok(())
    })?;
    mycsi.stop().await?;
    tokio::task::block_in_place(|| machine.finish())
}

fn until_written(machine: &Machine, pod: &str) -> Result<()> {
    machine.exec_until(pod, "cat /data/file", |file| file == "kept\n").map(drop)
}

/// The fake driver on a socket. All its connections break when it ends, as those of a process do.
struct Serving(Runtime);

impl Serving {
    fn start(driver: &Arc<FakeDriver>, socket: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (socket, routes) = (Endpoint::Unix(socket.to_owned()), driver.routes());
        let (bound, is_bound) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            let listener = Listener::bind(&socket).await;
            let _ = bound.send(listener.is_ok());
            if let Ok(listener) = listener {
                let layer = CallLayer::new(Metrics::unregistered("fake"), None);
                let _ = berth_csi::serve(listener, routes, layer, std::future::pending()).await;
            }
        });
        ensure!(is_bound.recv()?, "the socket cannot be listened on");
        Ok(Self(runtime))
    }

    fn end(self) {
        self.0.shutdown_timeout(std::time::Duration::from_secs(10));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_can_more_after_a_restart_gets_the_sidecars_for_it() -> Result<()> {
    const DRIVER: &str = "changing.example";
    let dir = sockets()?;
    let (socket, other) = (dir.path().join("csi.sock"), dir.path().join("other.sock"));
    let fake = FakeDriver::new(DRIVER);
    let can = |capabilities: &[ControllerCapability]| {
        fake.capabilities.lock().controller = capabilities.iter().copied().map(i32::from).collect();
    };
    can(&[ControllerCapability::PublishUnpublishVolume]);
    let serving = Serving::start(&fake, &socket)?;
    let endpoints = [&socket, &other].map(|path| format!("unix://{}", path.display()));
    let machine = tokio::task::block_in_place(|| {
        Machine::start_with(&["--driver-endpoint", &endpoints[0], "--driver-endpoint", &endpoints[1]])
    })?;
    tokio::task::block_in_place(|| {
        says(&machine.log(), &format!("driver {DRIVER} at {}", socket.display()))?;
        until_registered(&machine, DRIVER)?;
        machine.apply(&together(&[class(DRIVER), claim("data")]))
    })?;
    ensure!(fake.count("CreateVolume") == 0, "it does not announce CREATE_DELETE_VOLUME");

    // Nothing is called meanwhile: that it is another driver now is learned from its socket.
    tokio::task::block_in_place(|| serving.end());
    can(&[ControllerCapability::PublishUnpublishVolume, ControllerCapability::CreateDeleteVolume]);
    let serving = Serving::start(&fake, &socket)?;
    tokio::task::block_in_place(|| until_bound(&machine, "data"))?;
    tokio::task::block_in_place(|| serving.end());
    can(&[
        ControllerCapability::PublishUnpublishVolume,
        ControllerCapability::CreateDeleteVolume,
        ControllerCapability::ExpandVolume,
    ]);
    let serving = Serving::start(&fake, &socket)?;
    let larger = r#"{"spec":{"resources":{"requests":{"storage":"32Mi"}}}}"#;
    machine.kubectl(&["patch", "pvc/data", "-p", larger])?;
    fake.until_called("ControllerExpandVolume", "", 1).await;

    // A second one of the name would do the same work twice.
    let second = FakeDriver::new(DRIVER);
    let serving_second = Serving::start(&second, &other)?;
    tokio::task::block_in_place(|| {
        machine.until("the second one is refused", || {
            Ok(machine.log().contains("a driver of this name has them already").then_some(()))
        })?;
        machine.apply(&together(&[claim("more"), pod("more", "more", "exec sleep 1000000")]))?;
        until_bound(&machine, "more")?;
        machine.ready("more")
    })?;
    ensure!(second.count("CreateVolume") == 0, "both were asked");
    tokio::task::block_in_place(|| {
        machine.kubectl(&["delete", "pod/more", "pvc/more", "pvc/data"])?;
        until_empty(&machine)
    })?;
    let volumes = fake.storage.volumes.lock().len();
    ensure!(volumes == 0, "{volumes} volumes are left");
    tokio::task::block_in_place(|| serving.end());
    tokio::task::block_in_place(|| serving_second.end());
    tokio::task::block_in_place(|| machine.finish())
}

#[test]
fn an_endpoint_that_is_no_socket_is_refused() -> Result<()> {
    let machine = Machine::new()?;
    for (endpoint, why) in [
        ("tcp://127.0.0.1:1", "a node knows drivers only by sockets"),
        ("csi.sock", "begins neither with unix:"),
        ("unix:///run/", "the name of the socket is missing"),
    ] {
        let output = machine.berth(&["up", "--driver-endpoint", endpoint])?;
        ensure!(output.status.code() == Some(2), "{endpoint}: {}", output.status);
        says(&String::from_utf8_lossy(&output.stderr), why)?;
    }
    Ok(())
}
