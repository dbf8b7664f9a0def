//! One run against one driver: makes calls, judges each by the rules of one call, and undoes what they left.

mod volumes;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use berth_csi::{Call, Client, Identity, code, v1};
use parking_lot::Mutex;
use prost::Message;
use tonic::{Code, Status};

use crate::Options;
use crate::process::DriverProcess;
use crate::report::CallRecord;
use crate::rules::{self, ObservedCall, below};

pub(crate) use self::volumes::PreparedVolume;

/// The calls that are kept for one check; more would make a report of megabytes.
const CALLS_KEPT: usize = 40;
/// The largest part of a message that is kept.
const TEXT_KEPT: usize = 4000;
/// How long a call that is answered ABORTED or UNAVAILABLE is repeated.
const RETRY: Duration = Duration::from_secs(20);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The node that a driver is started with.
const NODE: &str = "certify-node";
/// The key of the secret that every call carries.
const CANARY_KEY: &str = "berth-certify-canary";

/// Why a check did not pass.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The rule is broken.
    Broken(String),
    /// The rule could not be tested.
    NotRun(String),
}

pub(crate) type Outcome<T = ()> = Result<T, Fault>;

pub(crate) fn broken<T>(text: impl Into<String>) -> Outcome<T> {
    Err(Fault::Broken(text.into()))
}

pub(crate) fn not_run<T>(text: impl Into<String>) -> Outcome<T> {
    Err(Fault::NotRun(text.into()))
}

/// Fails the check unless this holds.
pub(crate) fn ensure(holds: bool, text: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Fault::Broken(text())) }
}

/// What an answer means for the check that asked.
pub(crate) trait Expected<T> {
    /// The call is what the check is about: a refusal breaks the rule.
    fn or_broken(self, what: &str) -> Outcome<T>;
    /// The call only prepares the check: after a refusal it cannot run.
    fn or_not_run(self, what: &str) -> Outcome<T>;
}

impl<T> Expected<T> for Result<T, Status> {
    fn or_broken(self, what: &str) -> Outcome<T> {
        self.map_err(|status| {
            let text = format!("{what} answered {}", describe(&status));
            // That calls are answered is a rule of its own.
            if is_local(&status) { Fault::NotRun(text) } else { Fault::Broken(text) }
        })
    }

    fn or_not_run(self, what: &str) -> Outcome<T> {
        self.map_err(|status| Fault::NotRun(format!("{what} answered {}", describe(&status))))
    }
}

impl<T> Expected<T> for io::Result<T> {
    fn or_broken(self, what: &str) -> Outcome<T> {
        self.map_err(|error| Fault::Broken(format!("{what}: {error}")))
    }

    fn or_not_run(self, what: &str) -> Outcome<T> {
        self.map_err(|error| Fault::NotRun(format!("{what}: {error}")))
    }
}

/// A status in one line.
pub(crate) fn describe(status: &Status) -> String {
    format!("{} ({})", code::grpc_name(status.code()), status.message())
}

/// Whether a status was made here and not sent by the driver.
pub(crate) fn is_local(status: &Status) -> bool {
    berth_csi::from_transport(status) || status.message().starts_with(NO_ANSWER)
}

const NO_ANSWER: &str = "no answer within";

/// A request of CSI, with the place of its secrets.
pub(crate) trait Request: Call + Clone + Default + Send + Sync + 'static {
    fn secrets(&mut self) -> Option<&mut BTreeMap<String, String>> {
        None
    }
}

macro_rules! requests {
    ([$($with:ident)*] [$($without:ident)*]) => {
        $(impl Request for v1::$with {
            fn secrets(&mut self) -> Option<&mut BTreeMap<String, String>> {
                Some(&mut self.secrets)
            }
        })*
        $(impl Request for v1::$without {})*
    };
}

requests! {
    [CreateVolumeRequest DeleteVolumeRequest ControllerPublishVolumeRequest ControllerUnpublishVolumeRequest
     ValidateVolumeCapabilitiesRequest ControllerListVolumeHealthRequest ControllerGetVolumeHealthRequest
     ControllerModifyVolumeRequest CreateSnapshotRequest DeleteSnapshotRequest ListSnapshotsRequest GetSnapshotRequest
     ControllerExpandVolumeRequest NodeStageVolumeRequest NodePublishVolumeRequest NodeGetStorageHealthRequest
     NodeExpandVolumeRequest CreateVolumeGroupSnapshotRequest DeleteVolumeGroupSnapshotRequest
     GetVolumeGroupSnapshotRequest]
    [GetPluginInfoRequest GetPluginCapabilitiesRequest ProbeRequest ListVolumesRequest ControllerGetVolumeRequest
     GetCapacityRequest ControllerGetCapabilitiesRequest NodeUnstageVolumeRequest NodeUnpublishVolumeRequest
     NodeGetVolumeStatsRequest NodeGetVolumeHealthRequest NodeGetCapabilitiesRequest NodeGetInfoRequest
     GroupControllerGetCapabilitiesRequest]
}

/// What a check left behind, in the order of its making.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Left {
    Volume(String),
    Snapshot(String),
    Group(String, Vec<String>),
    Attached(String, String),
    Staged(String, String),
    Published(String, String),
}

#[derive(Default)]
struct State {
    calls: Vec<CallRecord>,
    /// By the rule's id: how the first call broke it, or `None` while all kept it.
    judged: BTreeMap<&'static str, Option<String>>,
    left: Vec<Left>,
    /// What could not be undone.
    stuck: Vec<String>,
    hung: BTreeSet<&'static str>,
    loop_devices: BTreeMap<u32, PathBuf>,
    number: u64,
}

/// A run against a driver.
pub(crate) struct Session {
    pub(crate) options: Options,
    pub(crate) driver: DriverProcess,
    pub(crate) identity: Identity,
    pub(crate) version: String,
    pub(crate) node: v1::NodeGetInfoResponse,
    /// Where volumes are mounted, as the driver sees it.
    directory: PathBuf,
    canary: String,
    client: Mutex<Client>,
    state: Mutex<State>,
}

impl Session {
    pub(crate) async fn open(options: Options) -> io::Result<Self> {
        fs::create_dir_all(&options.directory)?;
        let driver = DriverProcess::open(&options.launch, &options.directory, NODE).await?;
        let client = Client::connect(driver.endpoint());
        let timeout = options.timeout;
        let identity = client.identify(timeout).await.map_err(|status| {
            io::Error::other(format!("the driver does not say who it is: {}", describe(&status)))
        })?;
        let info = client.call(timeout, v1::GetPluginInfoRequest {}).await;
        let version = info.map(|info| info.vendor_version).unwrap_or_default();
        let node = client.call(timeout, v1::NodeGetInfoRequest {}).await.unwrap_or_default();
        let nanoseconds = std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
        let unique = format!("{:x}{nanoseconds:x}", std::process::id());
        let root = driver.root().unwrap_or_else(|| PathBuf::from("/"));
        let directory = options.directory.join(format!("mounts-{unique}"));
        fs::create_dir_all(below(&root, &directory.display().to_string()))?;
        Ok(Self {
            options,
            driver,
            identity,
            version,
            node,
            directory,
            canary: format!("canary-{unique}"),
            client: Mutex::new(client),
            state: Mutex::default(),
        })
    }

    /// What stands in every secret of this run.
    pub(crate) fn canary(&self) -> &str {
        &self.canary
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn client(&self) -> Client {
        self.client.lock().clone()
    }

    fn number(&self) -> u64 {
        let mut state = self.state.lock();
        state.number += 1;
        state.number
    }

    /// A name that no other object has.
    pub(crate) fn name(&self, what: &str) -> String {
        format!("certify-{what}-{}-{}", &self.canary["canary-".len()..], self.number())
    }

    /// Makes a call, and judges it by the rules of one call.
    pub(crate) async fn call<C: Request>(&self, request: C) -> Result<C::Answer, Status> {
        self.perform(request, true).await
    }

    /// As `call`, beside others: what changes on the machine meanwhile is not its own.
    pub(crate) async fn call_beside_others<C: Request>(&self, request: C) -> Result<C::Answer, Status> {
        self.perform(request, false).await
    }

    /// Repeats a call while the driver says that it is busy or not there.
    pub(crate) async fn call_until_settled<C: Request>(&self, request: C) -> Result<C::Answer, Status> {
        let begun = Instant::now();
        loop {
            match self.perform(request.clone(), false).await {
                Err(status)
                    if matches!(status.code(), Code::Aborted | Code::Unavailable)
                        && begun.elapsed() < RETRY =>
                {
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    async fn perform<C: Request>(&self, mut request: C, alone: bool) -> Result<C::Answer, Status> {
        let method = name_of(C::METHOD);
        if self.state.lock().hung.contains(C::METHOD) {
            let text =
                format!("{NO_ANSWER} {:?}: it hung before, and is not tried again", self.options.timeout);
            return Err(Status::deadline_exceeded(text));
        }
        self.add_secrets(&mut request);
        let bytes = request.encode_to_vec();
        self.remember_attempt(method, &bytes);
        let before = alone.then(|| self.driver.mounts()).flatten();
        let begun = Instant::now();
        let answer = self.client().call(self.options.timeout, request.clone()).await;
        let took = begun.elapsed();
        let after = alone.then(|| self.driver.mounts()).flatten();
        let late = answer.is_err() && took >= self.options.timeout;
        let encoded = answer.as_ref().map(Message::encode_to_vec);
        if let Ok(answer) = &encoded {
            self.remember_answer(method, &bytes, answer);
        }
        self.note_loop_devices(after.as_deref());
        let text = match &answer {
            Ok(answer) => format!("{answer:?}"),
            Err(status) => describe(status),
        };
        self.record(CallRecord {
            method,
            request: self.readable(&format!("{request:?}")),
            answer: self.readable(&text),
        });
        let is_answered = match &answer {
            Err(status) if late || is_local(status) => {
                if late {
                    self.state.lock().hung.insert(C::METHOD);
                }
                self.judge_as(&rules::ANSWERS, Some(format!("{method}: {}", status.message())));
                false
            }
            _ => {
                self.judge_as(&rules::ANSWERS, None);
                true
            }
        };
        if is_answered {
            let root = alone.then(|| self.driver.root()).flatten();
            let mounts = before.as_deref().zip(after.as_deref());
            let call = ObservedCall {
                method: C::METHOD,
                request: &bytes,
                answer: encoded.as_deref().map_err(|status| *status),
                mounts,
                root: root.as_deref(),
            };
            for judgement in rules::judge(&call) {
                self.judge_as(judgement.rule, judgement.broken.map(|text| format!("{method}: {text}")));
            }
        }
        if !is_answered && self.driver.pid().is_none() {
            let _ = self.restart().await;
        }
        answer.map_err(|status| {
            if late {
                Status::deadline_exceeded(format!("{NO_ANSWER} {:?}", self.options.timeout))
            } else {
                status
            }
        })
    }

    /// Begins a call and gives up waiting for its answer after a moment, as a caller that dies does.
    pub(crate) async fn call_and_leave<C: Request>(&self, mut request: C, after: Duration) {
        self.add_secrets(&mut request);
        let bytes = request.encode_to_vec();
        self.remember_attempt(name_of(C::METHOD), &bytes);
        // Its own connection, which is closed with it.
        let client = Client::connect(self.driver.endpoint());
        let method = name_of(C::METHOD);
        let text = self.readable(&format!("{request:?}"));
        let answer = tokio::time::timeout(after, client.call(self.options.timeout, request)).await;
        if let Ok(Ok(answer)) = &answer {
            self.remember_answer(method, &bytes, &answer.encode_to_vec());
        }
        let answer =
            if answer.is_ok() { "answered before the caller went away" } else { "the caller went away" };
        self.record(CallRecord { method, request: text, answer: answer.to_owned() });
    }

    /// Kills the driver with SIGKILL and starts it again.
    pub(crate) async fn kill_and_restart(&self) -> Outcome {
        self.driver.kill().or_not_run("killing the driver")?;
        self.restart().await.or_broken("the driver does not start again after SIGKILL")
    }

    async fn restart(&self) -> io::Result<()> {
        if self.driver.is_own() {
            self.driver.run().await?;
        }
        *self.client.lock() = Client::connect(self.driver.endpoint());
        Ok(())
    }

    fn add_secrets(&self, request: &mut impl Request) {
        let value = format!("{}-{}", self.canary, self.number());
        if let Some(secrets) = request.secrets() {
            secrets.extend(self.options.secrets.clone());
            secrets.insert(CANARY_KEY.to_owned(), value);
        }
    }

    /// The beginning of a text; what a driver repeats of a secret is not printed again.
    pub(crate) fn readable(&self, text: &str) -> String {
        let mut text = text.replace(&self.canary, "***stripped***");
        for secret in self.options.secrets.values().filter(|secret| secret.len() >= 6) {
            text = text.replace(secret.as_str(), "***stripped***");
        }
        if let Some((end, _)) = text.char_indices().nth(TEXT_KEPT) {
            text.truncate(end);
            text.push('…');
        }
        text
    }

    fn record(&self, call: CallRecord) {
        let mut state = self.state.lock();
        if state.calls.len() >= CALLS_KEPT {
            state.calls.remove(0);
        }
        state.calls.push(call);
    }

    pub(crate) fn judge_as(&self, rule: &'static rules::Rule, found: Option<String>) {
        let found = found.map(|text| self.readable(&text));
        let mut state = self.state.lock();
        let judged = state.judged.entry(rule.id).or_default();
        if judged.is_none() {
            *judged = found;
        }
    }

    /// How the calls so far kept a rule: `None` if it applied to none.
    pub(crate) fn judgement(&self, id: &str) -> Option<Result<(), String>> {
        self.state.lock().judged.get(id).cloned().map(|broken| broken.map_or(Ok(()), Err))
    }

    pub(crate) fn take_calls(&self) -> Vec<CallRecord> {
        std::mem::take(&mut self.state.lock().calls)
    }

    /// Where a path of the driver is for this process.
    pub(crate) fn seen(&self, path: &str) -> PathBuf {
        below(&self.driver.root().unwrap_or_else(|| PathBuf::from("/")), path)
    }

    /// Works on files, no longer than a call may take: a mount may hang.
    pub(crate) async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        match tokio::time::timeout(self.options.timeout, tokio::task::spawn_blocking(work)).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) => Err(io::Error::other("the work on files panicked")),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    pub(crate) fn loop_devices(&self) -> BTreeMap<u32, PathBuf> {
        self.state.lock().loop_devices.clone()
    }

    pub(crate) fn stuck(&self) -> Vec<String> {
        self.state.lock().stuck.clone()
    }

    /// Notes the loop devices that are mounted below the directory of this run.
    fn note_loop_devices(&self, mounts: Option<&[berth_host::mount::MountInfo]>) {
        let own = mounts.unwrap_or_default().iter().filter(|mount| mount.target.starts_with(&self.directory));
        for number in
            own.filter(|mount| mount.device.0 == berth_host::loopdev::MAJOR).map(|mount| mount.device.1)
        {
            if let Some(file) = backing_file(number) {
                self.state.lock().loop_devices.insert(number, file);
            }
        }
    }

    /// The loop devices that this run has seen and that still have the same file.
    pub(crate) fn loop_devices_left(&self) -> Vec<String> {
        let devices = self.loop_devices();
        let left = devices.iter().filter(|(number, file)| backing_file(**number).as_ref() == Some(*file));
        left.map(|(number, file)| format!("/dev/loop{number} ({})", file.display())).collect()
    }

    fn remember_attempt(&self, method: &str, request: &[u8]) {
        let left = match method {
            "ControllerPublishVolume" => v1::ControllerPublishVolumeRequest::decode(request)
                .map(|request| Left::Attached(request.volume_id, request.node_id)),
            "NodeStageVolume" => v1::NodeStageVolumeRequest::decode(request)
                .map(|request| Left::Staged(request.volume_id, request.staging_target_path)),
            "NodePublishVolume" => v1::NodePublishVolumeRequest::decode(request)
                .map(|request| Left::Published(request.volume_id, request.target_path)),
            _ => return,
        };
        let Ok(left) = left else { return };
        let complete = match &left {
            Left::Attached(volume, node) => !volume.is_empty() && !node.is_empty(),
            Left::Staged(volume, path) | Left::Published(volume, path) => {
                !volume.is_empty() && path.starts_with('/')
            }
            _ => true,
        };
        let mut state = self.state.lock();
        if complete && !state.left.contains(&left) {
            state.left.push(left);
        }
    }

    fn remember_answer(&self, method: &str, request: &[u8], answer: &[u8]) {
        macro_rules! of {
            ($message:ident, $bytes:expr) => {
                v1::$message::decode($bytes).unwrap_or_default()
            };
        }
        let mut state = self.state.lock();
        let mut gone = |entry: &Left| state.left.retain(|left| left != entry);
        match method {
            "DeleteVolume" => gone(&Left::Volume(of!(DeleteVolumeRequest, request).volume_id)),
            "DeleteSnapshot" => gone(&Left::Snapshot(of!(DeleteSnapshotRequest, request).snapshot_id)),
            "DeleteVolumeGroupSnapshot" => {
                let request = of!(DeleteVolumeGroupSnapshotRequest, request);
                gone(&Left::Group(request.group_snapshot_id, request.snapshot_ids));
            }
            "ControllerUnpublishVolume" => {
                let request = of!(ControllerUnpublishVolumeRequest, request);
                gone(&Left::Attached(request.volume_id, request.node_id));
            }
            "NodeUnstageVolume" => {
                let request = of!(NodeUnstageVolumeRequest, request);
                gone(&Left::Staged(request.volume_id, request.staging_target_path));
            }
            "NodeUnpublishVolume" => {
                let request = of!(NodeUnpublishVolumeRequest, request);
                gone(&Left::Published(request.volume_id, request.target_path));
            }
            _ => {}
        }
        let new = match method {
            "CreateVolume" => {
                Left::Volume(of!(CreateVolumeResponse, answer).volume.unwrap_or_default().volume_id)
            }
            "CreateSnapshot" => {
                Left::Snapshot(of!(CreateSnapshotResponse, answer).snapshot.unwrap_or_default().snapshot_id)
            }
            "CreateVolumeGroupSnapshot" => {
                let group = of!(CreateVolumeGroupSnapshotResponse, answer).group_snapshot.unwrap_or_default();
                let members = group.snapshots.into_iter().map(|snapshot| snapshot.snapshot_id);
                Left::Group(group.group_snapshot_id, members.collect())
            }
            _ => return,
        };
        let has_id =
            matches!(&new, Left::Volume(id) | Left::Snapshot(id) | Left::Group(id, _) if !id.is_empty());
        if has_id && !state.left.contains(&new) {
            state.left.push(new);
        }
    }

    /// Undoes what the calls of a check left, the latest first.
    pub(crate) async fn clean_up(&self) {
        let calls = self.take_calls();
        loop {
            let Some(left) = self.state.lock().left.pop() else { break };
            let undone = match left.clone() {
                Left::Volume(volume_id) => {
                    self.undo(v1::DeleteVolumeRequest { volume_id, ..Default::default() }).await
                }
                Left::Snapshot(snapshot_id) => {
                    self.undo(v1::DeleteSnapshotRequest { snapshot_id, ..Default::default() }).await
                }
                Left::Group(group_snapshot_id, snapshot_ids) => {
                    let secrets = BTreeMap::new();
                    self.undo(v1::DeleteVolumeGroupSnapshotRequest {
                        group_snapshot_id,
                        snapshot_ids,
                        secrets,
                    })
                    .await
                }
                Left::Attached(volume_id, node_id) => {
                    self.undo(v1::ControllerUnpublishVolumeRequest {
                        volume_id,
                        node_id,
                        ..Default::default()
                    })
                    .await
                }
                Left::Staged(volume_id, staging_target_path) => {
                    self.undo(v1::NodeUnstageVolumeRequest { volume_id, staging_target_path }).await
                }
                Left::Published(volume_id, target_path) => {
                    self.undo(v1::NodeUnpublishVolumeRequest { volume_id, target_path }).await
                }
            };
            if let Err(status) = undone
                && status.code() != Code::NotFound
            {
                self.state.lock().stuck.push(format!("{left:?}: {}", describe(&status)));
            }
        }
        self.state.lock().calls = calls;
    }

    async fn undo<C: Request>(&self, request: C) -> Result<(), Status> {
        self.call_until_settled(request).await.map(drop)
    }
}

fn backing_file(number: u32) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/sys/block/loop{number}/loop/backing_file")).ok()?;
    Some(PathBuf::from(text.trim_end()))
}

/// The last part of a method's path.
fn name_of(path: &'static str) -> &'static str {
    path.rsplit('/').next().unwrap_or(path)
}
