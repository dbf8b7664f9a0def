//! A cloud on this machine and a driver for its disks, each a process of its own, to be broken and killed.
//!
//! A provider is a row of [`PROVIDERS`]; tests of faults run for each. The twin is steered and looked at over its own HTTP
//! ([`Account`]), so that what the driver believes does not matter.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use berth_csi::v1;
use serde_json::Value;
use tempfile::TempDir;
use tonic::{Code, Status};

use crate::browser::request;
use crate::csi::{Csi, Mounted, text};
use crate::program::Program;
use crate::{driver, machine};

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two observations.
const PAUSE: Duration = Duration::from_millis(10);
/// One gibibyte in bytes.
pub const GIB: i64 = 1 << 30;

/// A provider whose driver and twin are tested.
#[derive(Debug)]
pub struct Provider {
    /// The name of the twin and of the backend.
    pub name: &'static str,
    /// The name of the driver.
    pub driver: &'static str,
    /// The first server of an account.
    pub instance: &'static str,
    /// The kinds of calls that do the work, as the twin counts them.
    pub calls: Calls,
    /// The parameters of volumes that have 1 GiB, and the class's of objects.
    pub parameters: &'static [(&'static str, &'static str)],
    /// The credentials of the driver, for its environment.
    pub credentials: &'static [(&'static str, &'static str)],
    /// What must not be in a log.
    secrets: &'static [&'static str],
    /// The driver's flags by which it needs no metadata service.
    pub located: &'static [&'static str],
    /// The driver's flags that say where the twin is: its API, its metadata service, and the devices of the server.
    flags: fn(&str, &str, &str) -> Vec<String>,
}

/// The names of a provider's calls.
#[derive(Debug)]
pub struct Calls {
    /// The call that makes a disk.
    pub create: &'static str,
    /// The call that attaches a disk to a server.
    pub attach: &'static str,
    /// The call that detaches a disk from its server.
    pub detach: &'static str,
    /// The call that grows a disk.
    pub resize: &'static str,
    /// The call that takes a snapshot.
    pub snapshot: &'static str,
    /// The call that removes a disk.
    pub delete: &'static str,
}

/// Every provider that there is a driver for.
pub const PROVIDERS: &[Provider] = &[DIGITALOCEAN, ALIYUN];

/// Volumes of DigitalOcean's block storage.
pub const DIGITALOCEAN: Provider = Provider {
    name: "digitalocean",
    driver: "dobs.csi.digitalocean.com",
    instance: "1",
    calls: Calls {
        create: "volumes.create",
        attach: "volumes.attach",
        detach: "volumes.detach",
        resize: "volumes.resize",
        snapshot: "volumes.snapshot",
        delete: "volumes.delete",
    },
    parameters: &[],
    credentials: &[("DIGITALOCEAN_ACCESS_TOKEN", "berth")],
    secrets: &["Bearer", "berth-token"],
    located: &["--region", "nyc3", "--node-id", "1"],
    flags: |url, metadata, devices| {
        let flags = ["--url", url, "--metadata-url", metadata, "--device-dir", devices];
        flags.map(str::to_owned).into()
    },
};

/// The driver for Alibaba Cloud's disks, and its twin.
pub const ALIYUN: Provider = Provider {
    name: "aliyun",
    driver: "diskplugin.csi.alibabacloud.com",
    instance: "i-berth1",
    calls: Calls {
        create: "CreateDisk",
        attach: "AttachDisk",
        detach: "DetachDisk",
        resize: "ResizeDisk",
        snapshot: "CreateSnapshot",
        delete: "DeleteDisk",
    },
    // The one type that comes in 1 GiB.
    parameters: &[("type", "cloud_auto")],
    credentials: &[
        ("ALIBABA_CLOUD_ACCESS_KEY_ID", "berth"),
        ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", "berth-secret"),
    ],
    secrets: &["berth-secret", "Signature="],
    located: &["--region", "cn-hangzhou", "--zone", "cn-hangzhou-h", "--node-id", "i-berth1"],
    flags: |url, metadata, devices| {
        let flags = ["--ecs-endpoint", url, "--metadata-url", metadata, "--device-dir", devices];
        flags.map(str::to_owned).into()
    },
};

impl Provider {
    /// Makes a volume of at least so many GiB, of a source if there is one.
    pub async fn create(
        &self,
        csi: &Csi,
        name: &str,
        gib: i64,
        source: Option<v1::VolumeContentSource>,
    ) -> Result<CloudVolume, Status> {
        let request = v1::CreateVolumeRequest { volume_content_source: source, ..self.new_volume(name, gib) };
        let made = csi.controller.clone().create_volume(request).await?.into_inner().volume;
        let made = made.ok_or_else(|| Status::internal("the answer has no volume"))?;
        Ok(CloudVolume { id: made.volume_id, bytes: made.capacity_bytes, publish_context: BTreeMap::new() })
    }

    /// The request for a volume of at least so many GiB.
    pub fn new_volume(&self, name: &str, gib: i64) -> v1::CreateVolumeRequest {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        v1::CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(v1::CapacityRange { required_bytes: gib * GIB, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            parameters: self.parameters.iter().map(owned).collect(),
            ..Default::default()
        }
    }
}

/// What a twin says of its account.
#[derive(Debug, Clone)]
pub struct Account {
    port: u16,
}

impl Account {
    /// The twin at an address such as `http://127.0.0.1:4321`.
    pub fn at(url: &str) -> Result<Self> {
        let port = url.trim_end_matches('/').rsplit(':').next().and_then(|port| port.parse().ok());
        Ok(Self { port: port.with_context(|| format!("{url} has no port"))? })
    }

    /// A request to `/_twin`; gives its answer.
    pub fn steer(&self, method: &str, path: &str, body: &str) -> Result<Value> {
        let length = body.len();
        let head = format!("{method} /_twin/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n");
        let (status, answer) = request(self.port, &format!("{head}Content-Length: {length}\r\n\r\n{body}"))?;
        ensure!(status == 200, "{method} {path} was answered {answer}");
        let (_, body) = answer.split_once("\r\n\r\n").context("the answer has no body")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Has something go wrong.
    pub fn fault(&self, fault: &str) -> Result<()> {
        self.steer("POST", "faults", fault).map(drop)
    }

    /// Has nothing go wrong any more.
    pub fn clear_faults(&self) -> Result<()> {
        self.steer("DELETE", "faults", "").map(drop)
    }

    /// Whether there are faults, and all have happened as often as they should.
    pub fn faults_are_over(&self) -> Result<bool> {
        let faults = self.steer("GET", "faults", "")?;
        let faults = faults.as_array().context("faults are a list")?;
        Ok(!faults.is_empty() && faults.iter().all(|fault| fault["left"] == 0))
    }

    /// How often each kind of call was made, and `total`.
    pub fn calls(&self) -> Result<Value> {
        self.steer("GET", "calls", "")
    }

    /// The disks by their ids, as the twin has them.
    pub fn disks(&self) -> Result<BTreeMap<String, Value>> {
        Ok(serde_json::from_value(self.steer("GET", "state", "")?["disks"].take())?)
    }

    /// The ids of all disks, and of all snapshots.
    pub fn ids(&self) -> Result<(BTreeSet<String>, BTreeSet<String>)> {
        let state = self.steer("GET", "state", "")?;
        let ids = |what: &str| -> Result<BTreeSet<String>> {
            Ok(state[what].as_object().context("a map by ids")?.keys().cloned().collect())
        };
        Ok((ids("disks")?, ids("snapshots")?))
    }

    /// The servers that a disk is attached to.
    pub fn servers_of(&self, disk: &str) -> Result<Vec<String>> {
        let disks = self.disks()?;
        let disk = disks.get(disk).with_context(|| format!("there is no disk {disk}"))?;
        let attachments = disk["attachments"].as_array().context("attachments are a list")?;
        Ok(attachments.iter().filter_map(|one| Some(one["instance"].as_str()?.to_owned())).collect())
    }
}

/// A volume as its creation answered, and what attaching it said.
#[derive(Debug, Clone, Default)]
pub struct CloudVolume {
    /// The id of the disk.
    pub id: String,
    /// The capacity in bytes.
    pub bytes: i64,
    publish_context: BTreeMap<String, String>,
}

/// A twin and a driver.
#[derive(Debug)]
pub struct CloudBench {
    /// The provider whose twin and driver these are.
    pub provider: &'static Provider,
    /// What the twin says.
    pub account: Account,
    /// How often the driver was killed by [`Self::insist`].
    pub kills: usize,
    twin: Option<Program>,
    driver: Option<Program>,
    twin_flags: Vec<String>,
    driver_flags: Vec<String>,
    dir: TempDir,
}

impl CloudBench {
    /// A twin with these flags, by default without a limit of requests, and a driver with these flags.
    pub async fn start(provider: &'static Provider, twin: &[&str], driver: &[&str]) -> Result<Self> {
        let owned = |flags: &[&str]| flags.iter().map(ToString::to_string).collect();
        // The path stays short: a socket's may have 107 bytes.
        let dir = tempfile::Builder::new().prefix("cb-").rand_bytes(5).tempdir()?;
        let mut bench = Self {
            provider,
            account: Account { port: 0 },
            kills: 0,
            twin: None,
            driver: None,
            twin_flags: owned(twin),
            driver_flags: owned(driver),
            dir,
        };
        bench.start_twin().await?;
        bench.start_driver().await?;
        Ok(bench)
    }

    /// The directory of everything.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the twin, for the first time or again, where it was.
    pub async fn start_twin(&mut self) -> Result<()> {
        let data = text(&self.path("cloud"));
        let mut words = vec!["cloud", self.provider.name, "--data-dir", &data];
        words.extend(self.twin_flags.iter().map(String::as_str));
        if !words.contains(&"--rate-limit") {
            words.extend(["--rate-limit", "none"]);
        }
        let mut twin = Program::start(&driver::binary()?, &words, &[], self.path("cloud.log"))?;
        let line = twin.says("http://127.0.0.1:").await?;
        self.account = Account::at(line.split_whitespace().next_back().unwrap_or_default())?;
        self.twin = Some(twin);
        Ok(())
    }

    /// Kills the twin; its devices stay.
    pub fn kill_twin(&mut self) -> Result<()> {
        self.twin.take().context("no twin runs")?.kill()
    }

    /// Starts the driver, for the first time or again.
    pub async fn start_driver(&mut self) -> Result<()> {
        let words = self.driver_words(&text(&self.path("state")), &self.endpoint());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let log = self.path("driver.log");
        let mut started = Program::start(&driver::binary()?, &words, self.provider.credentials, log)?;
        started.says("ready").await?;
        self.driver = Some(started);
        Ok(())
    }

    /// The arguments of a driver for the first server of the twin, which needs [`Provider::credentials`] in its environment.
    pub fn driver_words(&self, state_dir: &str, endpoint: &str) -> Vec<String> {
        let url = format!("http://127.0.0.1:{}", self.account.port);
        let metadata = format!("{url}/_node/{}", self.provider.instance);
        let devices = text(&self.path("cloud/devices").join(self.provider.instance));
        let words = ["driver", self.provider.name, "--state-dir", state_dir, "--endpoint", endpoint];
        let words = words.map(str::to_owned).into_iter();
        words
            .chain((self.provider.flags)(&url, &metadata, &devices))
            .chain(self.driver_flags.iter().cloned())
            .collect()
    }

    /// Kills the driver as a power cut would.
    pub fn kill_driver(&mut self) -> Result<()> {
        self.driver.take().context("no driver runs")?.kill()
    }

    /// Where the driver listens.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.path("csi.sock").display())
    }

    /// The socket of the driver.
    pub fn socket(&self) -> PathBuf {
        self.path("csi.sock")
    }

    /// All that the driver has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("driver.log")).unwrap_or_default()
    }

    /// A new connection to the driver: one that was refused waits before it tries again.
    pub fn csi(&self) -> Result<Csi> {
        Csi::connect(&self.endpoint())
    }

    /// Repeats a call as an orchestrator does until it succeeds. When the twin's faults have happened, the driver is killed in the
    /// middle of it, and started again.
    pub async fn insist<T>(&mut self, what: &str, call: impl AsyncFn(Csi) -> Result<T, Status>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let csi = self.csi()?;
            let outcome = tokio::select! {
                outcome = call(csi) => Some(outcome),
                struck = self.struck() => { struck?; None }
            };
            match outcome {
                Some(Ok(done)) => return Ok(done),
                Some(Err(status)) => {
                    ensure!(is_transient(&status), "{what}: {status}\n{}", self.log());
                    ensure!(Instant::now() < deadline, "{what} does not succeed: {status}\n{}", self.log());
                    tokio::time::sleep(PAUSE).await;
                }
                None => {
                    self.kill_driver()?;
                    self.account.clear_faults()?;
                    self.start_driver().await?;
                    self.kills += 1;
                }
            }
        }
    }

    /// Returns when all faults have happened that there are.
    async fn struck(&self) -> Result<()> {
        while !self.account.faults_are_over()? {
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Waits until the account has these disks and snapshots and no others.
    pub async fn owns(&self, disks: &[&str], snapshots: &[&str]) -> Result<()> {
        let set = |ids: &[&str]| -> BTreeSet<String> { ids.iter().map(ToString::to_string).collect() };
        let (disks, snapshots) = (set(disks), set(snapshots));
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.account.ids()?;
            if found == (disks.clone(), snapshots.clone()) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the account has {found:?}, and should have {disks:?} and {snapshots:?}");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Ends both, and sees that nothing of the cloud is left.
    pub async fn finish(mut self) -> Result<()> {
        self.owns(&[], &[]).await?;
        self.stop().await
    }

    /// Ends both and removes what is left of the account, as a person does who tried something.
    pub async fn purge(mut self) -> Result<()> {
        self.stop().await?;
        let purged = machine::command(driver::binary()?)
            .args(["cloud", self.provider.name, "--purge", "--data-dir"])
            .arg(self.path("cloud"))
            .output()?;
        ensure!(purged.status.success(), "{}", String::from_utf8_lossy(&purged.stderr));
        ensure!(!self.path("cloud").exists(), "the account is left");
        Ok(())
    }

    async fn stop(&mut self) -> Result<()> {
        self.driver.take().context("no driver runs")?.stop().await?;
        self.twin.take().context("no twin runs")?.stop().await?;
        let log = self.log();
        let told = self.provider.secrets.iter().find(|secret| log.contains(**secret));
        ensure!(told.is_none(), "a secret is in the log: {told:?}");
        machine::until_detached(|| machine::loops_below(self.dir.path()))
    }
}

impl Drop for CloudBench {
    fn drop(&mut self) {
        // Before what they have mounted and attached.
        drop((self.driver.take(), self.twin.take()));
        if let Err(error) = machine::clear_below(self.dir.path()) {
            eprintln!("could not clean up after a test: {error:#}");
            self.dir.disable_cleanup(true);
        }
    }
}

/// Whether an orchestrator repeats the call and may hope that it succeeds.
fn is_transient(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Aborted | Code::DeadlineExceeded | Code::Cancelled)
}

/// Mounted by one node, with a filesystem of the driver's choice.
pub fn capability() -> v1::VolumeCapability {
    use v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
    v1::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

/// Attaches a volume to a server; the volume says then what a node has to know.
pub async fn attach(csi: &Csi, volume: &CloudVolume, server: &str) -> Result<CloudVolume, Status> {
    let request = v1::ControllerPublishVolumeRequest {
        volume_id: volume.id.clone(),
        node_id: server.to_owned(),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    let attached = csi.controller.clone().controller_publish_volume(request).await?.into_inner();
    Ok(CloudVolume { publish_context: attached.publish_context, ..volume.clone() })
}

/// Detaches a volume from a server.
pub async fn detach(csi: &Csi, id: &str, server: &str) -> Result<(), Status> {
    let request = v1::ControllerUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: server.to_owned(),
        ..Default::default()
    };
    csi.controller.clone().controller_unpublish_volume(request).await.map(drop)
}

/// Stages an attached volume, if its device appears within that time.
pub async fn stage(csi: &Csi, volume: &CloudVolume, mounted: &Mounted, time: Duration) -> Result<(), Status> {
    let mut stage = tonic::Request::new(v1::NodeStageVolumeRequest {
        volume_id: volume.id.clone(),
        staging_target_path: text(&mounted.staging),
        volume_capability: Some(capability()),
        publish_context: volume.publish_context.clone(),
        ..Default::default()
    });
    stage.set_timeout(time);
    csi.node.clone().node_stage_volume(stage).await.map(drop)
}

/// Stages and publishes an attached volume below a directory.
pub async fn mount(csi: &Csi, volume: &CloudVolume, dir: &Path) -> Result<Mounted, Status> {
    let mounted = Mounted::paths(&volume.id, dir)?;
    stage(csi, volume, &mounted, PATIENCE).await?;
    let publish = v1::NodePublishVolumeRequest {
        volume_id: volume.id.clone(),
        staging_target_path: text(&mounted.staging),
        target_path: text(&mounted.target),
        volume_capability: Some(capability()),
        publish_context: volume.publish_context.clone(),
        ..Default::default()
    };
    csi.node.clone().node_publish_volume(publish).await?;
    Ok(mounted)
}

/// Grows a volume to so many GiB.
pub async fn expand(csi: &Csi, id: &str, gib: i64) -> Result<i64, Status> {
    let request = v1::ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range: Some(v1::CapacityRange { required_bytes: gib * GIB, limit_bytes: 0 }),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    Ok(csi.controller.clone().controller_expand_volume(request).await?.into_inner().capacity_bytes)
}
