//! A pod's status as `kubectl` shows it, from what is known of its containers, and its writing.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::net::IpAddr;
use std::path::Path;

use berth_kube::{Key, Next};
use berth_runtime::{ContainerId, Exit, Runtime, State};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
    ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodSpec, PodStatus, VolumeMount, VolumeMountStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Preconditions};

use super::decide::{ContainerRecord, Decision, Phase, is_sidecar};
use super::launch::{is_read_only, is_recursively_read_only, of_ephemeral};
use super::{End, Error, Pods};

/// What a status is made of.
pub(super) struct View<'a> {
    pub(super) pod: &'a Pod,
    pub(super) known: &'a HashMap<String, ContainerRecord>,
    pub(super) decision: &'a Decision,
    /// The pod has its volumes, so that containers can be started.
    pub(super) volumes_ready: bool,
    pub(super) node_address: IpAddr,
    /// The pod's own, which is the node's where pods have none; `None` while it is not given yet, and when it is taken back.
    pub(super) address: Option<IpAddr>,
    /// When the node first saw the pod.
    pub(super) first_observed: Timestamp,
    /// Why the node ends the pod, if it does.
    pub(super) end: Option<&'a End>,
    /// What runs its containers.
    pub(super) runtime: &'a dyn Runtime,
    /// Where the logs of its containers lie.
    pub(super) logs: Option<&'a Path>,
}

/// How much of a log a termination message may have, and how much is read for that.
const LOG_LINES: usize = 80;
const LOG_BYTES: usize = 2048;
const LOG_READ: u64 = 16 << 10;

/// Why a pod has ended that was there for longer than it may be.
pub(super) const EXPIRED: &str = "DeadlineExceeded";
pub(super) const EXPIRED_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// Why a pod has ended that took more of the disk than it may.
pub(super) const EVICTED: &str = "Evicted";

/// Why a pod has ended for whose volume the node had no room any more.
pub(super) const ATTACH_LIMIT: &str = "VolumeAttachmentLimitExceeded";

/// The status; what others have put into it stays.
pub(super) fn build(view: &View<'_>) -> PodStatus {
    let old = view.pod.status.clone().unwrap_or_default();
    let spec = view.pod.spec.clone().unwrap_or_default();
    let containers: Vec<ContainerStatus> =
        spec.containers.iter().map(|container| container_status(view, container, false)).collect();
    let init: Vec<ContainerStatus> = spec
        .init_containers
        .iter()
        .flatten()
        .map(|container| container_status(view, container, true))
        .collect();
    let ephemeral: Vec<ContainerStatus> = spec
        .ephemeral_containers
        .iter()
        .flatten()
        .filter_map(|one| of_ephemeral(one, view.runtime.images().is_some()))
        .map(|container| container_status(view, &container, false))
        .map(|status| ContainerStatus { ready: false, started: None, ..status })
        .collect();
    let conditions = conditions(view, &containers, &init);
    let node_address = view.node_address.to_string();
    // A pod that has ended keeps the one that it had.
    let address = view.address.map(|address| address.to_string()).or(old.pod_ip);
    // As upstream: while something still runs, the pod has not failed.
    let end = view.end.filter(|_| view.decision.phase == Phase::Failed);
    PodStatus {
        phase: Some(view.decision.phase.as_str().to_owned()),
        reason: end.map(|end| end.reason.to_owned()).or(old.reason),
        message: end.map(end_message).or(old.message),
        conditions: Some(merged(old.conditions.as_deref().unwrap_or_default(), conditions)),
        container_statuses: Some(containers),
        init_container_statuses: (!init.is_empty()).then_some(init),
        ephemeral_container_statuses: (!ephemeral.is_empty()).then_some(ephemeral),
        host_ip: Some(node_address.clone()),
        host_ips: Some(vec![HostIP { ip: node_address }]),
        pod_ips: address.clone().map(|ip| vec![PodIP { ip }]),
        pod_ip: address,
        start_time: old.start_time.clone().or(Some(Time(whole_seconds(view.first_observed)))),
        qos_class: old.qos_class.clone().or_else(|| Some(qos_class(&spec).to_owned())),
        observed_generation: view.pod.metadata.generation.or(old.observed_generation),
        ..old
    }
}

/// What the status says of an end; a pod whose volumes never came was not accepted.
fn end_message(end: &End) -> String {
    match end.reason {
        ATTACH_LIMIT => format!("Pod was rejected: {}", end.message),
        _ => end.message.clone(),
    }
}

fn container_status(view: &View<'_>, container: &Container, init: bool) -> ContainerStatus {
    let unknown = ContainerRecord::default();
    let known = view.known.get(&container.name).unwrap_or(&unknown);
    let run = |attempt: u32| {
        let pod_uid = view.pod.metadata.uid.clone().unwrap_or_default();
        ContainerId { pod_uid, name: container.name.clone(), attempt }
    };
    let id = |attempt: u32| view.runtime.address(&run(attempt));
    let falls_back = container.termination_message_policy.as_deref() == Some("FallbackToLogsOnError");
    let terminated = |ended: &Exit, attempt: u32| {
        let mut terminated = terminated(ended, id(attempt));
        if let Some(logs) = view.logs.filter(|_| falls_back && ended.code != 0)
            && terminated.message.is_none()
        {
            let log = logs.join(&container.name).join(format!("{attempt}.log"));
            terminated.message = Some(last_lines(&log)).filter(|lines| !lines.is_empty());
        }
        ContainerState { terminated: Some(terminated), ..ContainerState::default() }
    };
    let waiting = view.decision.waiting.get(&container.name);
    let (state, last) = match (&known.run, waiting) {
        (Some(State::Running { started }), _) => {
            let running = ContainerStateRunning { started_at: Some(Time(whole_seconds(*started))) };
            let last = known.last.as_ref().map(|ended| terminated(ended, known.attempt.saturating_sub(1)));
            (ContainerState { running: Some(running), ..ContainerState::default() }, last)
        }
        (Some(State::Exited(ended)), Some(waiting)) => {
            let message = (!waiting.message.is_empty()).then(|| waiting.message.clone());
            let state = ContainerStateWaiting { reason: Some(waiting.reason.to_owned()), message };
            let state = ContainerState { waiting: Some(state), ..ContainerState::default() };
            (state, Some(terminated(ended, known.attempt)))
        }
        (Some(State::Exited(ended)), None) => {
            let last = known.last.as_ref().map(|ended| terminated(ended, known.attempt.saturating_sub(1)));
            (terminated(ended, known.attempt), last)
        }
        (None, waiting) => {
            let (reason, message) =
                waiting.map_or(("ContainerCreating", ""), |w| (w.reason, w.message.as_str()));
            let message = (!message.is_empty()).then(|| message.to_owned());
            let waiting = ContainerStateWaiting { reason: Some(reason.to_owned()), message };
            (ContainerState { waiting: Some(waiting), ..ContainerState::default() }, None)
        }
    };
    let done = known.ended().is_some_and(|ended| ended.code == 0);
    let mounts = container.volume_mounts.iter().flatten().map(|mount| mount_status(view.pod, mount));
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        image_id: view.runtime.image(&run(known.attempt)).unwrap_or_default(),
        container_id: known.run.as_ref().map(|_| id(known.attempt)),
        ready: if init && !is_sidecar(container) { done } else { known.is_running() && known.health.ready },
        started: Some(known.is_running() && known.health.started),
        restart_count: i32::try_from(known.attempt).unwrap_or(i32::MAX),
        state: Some(state),
        last_state: last,
        volume_mounts: known.run.as_ref().map(|_| mounts.collect()),
        ..ContainerStatus::default()
    }
}

/// How a volume is mounted in a container that was started.
fn mount_status(pod: &Pod, mount: &VolumeMount) -> VolumeMountStatus {
    let read_only = mount.read_only.unwrap_or(false) || is_read_only(pod, &mount.name);
    let recursive = if is_recursively_read_only(mount) { "Enabled" } else { "Disabled" };
    VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: read_only.then_some(true),
        recursive_read_only: read_only.then(|| recursive.to_owned()),
        ..VolumeMountStatus::default()
    }
}

fn terminated(ended: &Exit, id: String) -> ContainerStateTerminated {
    ContainerStateTerminated {
        container_id: Some(id),
        exit_code: ended.code,
        signal: ended.signal,
        reason: Some(ended.reason.as_str().to_owned()),
        message: (!ended.message.is_empty()).then(|| ended.message.clone()),
        started_at: ended.started.map(|time| Time(whole_seconds(time))),
        finished_at: Some(Time(whole_seconds(ended.finished))),
    }
}

/// The end of a container's log, of which a termination message has no more than upstream's.
fn last_lines(log: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_READ)))?;
        let mut end = Vec::new();
        file.read_to_end(&mut end)?;
        Ok(end)
    };
    let end = read().unwrap_or_default();
    let end = String::from_utf8_lossy(&end);
    let lines: Vec<&str> = end.lines().filter_map(|entry| entry.splitn(4, ' ').nth(3)).collect();
    let text: String =
        lines[lines.len().saturating_sub(LOG_LINES)..].iter().flat_map(|line| [*line, "\n"]).collect();
    text[text.ceil_char_boundary(text.len().saturating_sub(LOG_BYTES))..].to_owned()
}

fn conditions(
    view: &View<'_>,
    containers: &[ContainerStatus],
    init: &[ContainerStatus],
) -> Vec<PodCondition> {
    let spec = view.pod.spec.as_ref();
    let sidecars = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let sidecars = sidecars.filter(|container| is_sidecar(container));
    let counted = sidecars
        .filter_map(|container| init.iter().find(|status| status.name == container.name))
        .chain(containers);
    let unready: Vec<&str> =
        counted.filter(|status| !status.ready).map(|status| status.name.as_str()).collect();
    let phase = view.decision.phase;
    let containers_ready = match phase {
        Phase::Failed => condition("ContainersReady", false, "PodFailed", String::new()),
        Phase::Succeeded => condition("ContainersReady", false, "PodCompleted", String::new()),
        _ if unready.is_empty() => condition("ContainersReady", true, "", String::new()),
        _ => {
            let message = format!("containers with unready status: [{}]", unready.join(" "));
            condition("ContainersReady", false, "ContainersNotReady", message)
        }
    };
    let initialized = if phase == Phase::Succeeded {
        condition("Initialized", true, "PodCompleted", String::new())
    } else if view.decision.initialized {
        condition("Initialized", true, "", String::new())
    } else {
        let incomplete = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten().zip(init);
        let incomplete: Vec<&str> = incomplete
            .filter(
                |(container, status)| {
                    if is_sidecar(container) { status.started != Some(true) } else { !status.ready }
                },
            )
            .map(|(container, _)| container.name.as_str())
            .collect();
        let message = format!("containers with incomplete status: [{}]", incomplete.join(" "));
        condition("Initialized", false, "ContainersNotInitialized", message)
    };
    let ready = ready(view, &containers_ready);
    let can_start = view.volumes_ready && !phase.is_final();
    let evicted = view.end.filter(|end| end.reason == EVICTED);
    let disrupted =
        evicted.map(|end| condition("DisruptionTarget", true, "TerminationByKubelet", end.message.clone()));
    let usual = [
        condition("PodReadyToStartContainers", can_start, "", String::new()),
        initialized,
        ready,
        containers_ready,
        condition("PodScheduled", true, "", String::new()),
    ];
    usual.into_iter().chain(disrupted).collect()
}

fn ready(view: &View<'_>, containers_ready: &PodCondition) -> PodCondition {
    if containers_ready.status != "True" {
        return PodCondition { type_: "Ready".to_owned(), ..containers_ready.clone() };
    }
    let known = view.pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let gates = view.pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_ref()).into_iter().flatten();
    let problems: Vec<String> = gates
        .filter_map(|gate| match known.iter().find(|condition| condition.type_ == gate.condition_type) {
            None => Some(format!(
                "corresponding condition of pod readiness gate {:?} does not exist.",
                gate.condition_type
            )),
            Some(condition) if condition.status != "True" => Some(format!(
                "the status of pod readiness gate {:?} is not \"True\", but {}",
                gate.condition_type, condition.status
            )),
            Some(_) => None,
        })
        .collect();
    if problems.is_empty() {
        condition("Ready", true, "", String::new())
    } else {
        condition("Ready", false, "ReadinessGatesNotReady", problems.join(", "))
    }
}

fn condition(kind: &str, is_true: bool, reason: &str, message: String) -> PodCondition {
    PodCondition {
        type_: kind.to_owned(),
        status: if is_true { "True" } else { "False" }.to_owned(),
        reason: (!reason.is_empty()).then(|| reason.to_owned()),
        message: (!message.is_empty()).then_some(message),
        last_transition_time: Some(Time(whole_seconds(Timestamp::now()))),
        ..PodCondition::default()
    }
}

/// The new conditions with the times of the old ones where nothing changed, and the old ones that are not ours.
fn merged(old: &[PodCondition], new: Vec<PodCondition>) -> Vec<PodCondition> {
    let mut conditions: Vec<PodCondition> = new
        .into_iter()
        .map(|mut condition| {
            if let Some(old) = old.iter().find(|old| old.type_ == condition.type_) {
                if old.status == condition.status {
                    condition.last_transition_time.clone_from(&old.last_transition_time);
                }
                condition.last_probe_time.clone_from(&old.last_probe_time);
                condition.observed_generation = old.observed_generation;
            }
            condition
        })
        .collect();
    let foreign = old.iter().filter(|old| !conditions.iter().any(|condition| condition.type_ == old.type_));
    let foreign: Vec<PodCondition> = foreign.cloned().collect();
    conditions.extend(foreign);
    conditions
}

/// Kubernetes keeps whole seconds: more would never be equal to what it gives back.
pub(super) fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

impl Pods {
    /// Writes the status of a pod, and lets Kubernetes forget a pod of which nothing is left.
    pub(super) async fn report(&self, uid: &str) -> Result<Next, Error> {
        let Some(entry) = self.entry(uid) else { return Ok(Next::Done) };
        let Some(seen) = entry.latest() else { return Ok(Next::Done) };
        // The cache also has what we wrote ourselves.
        let pod = self.cache.get(&Key::of(seen.as_ref())).filter(|pod| pod.uid().as_deref() == Some(uid));
        let Some(pod) = pod else { return Ok(Next::Done) };
        let (status, finished) = {
            let pending = entry.pending_report();
            (pending.status.clone(), pending.finished)
        };
        if let Some(status) = status {
            let written = self.options.cluster.update_status(pod.as_ref(), |pod| put(pod, status)).await;
            match written {
                Ok(_) => {}
                Err(error) if error.is_not_found() => return Ok(Next::Done),
                Err(error) => return Err(error.into()),
            }
        }
        if finished {
            let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
            let parameters = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            };
            self.options.cluster.delete_with(pod.as_ref(), &parameters).await?;
        }
        Ok(Next::Done)
    }
}

/// Puts a status into a pod as it is by now: the times of conditions that did not change stay, and so does what others
/// have written meanwhile.
fn put(pod: &mut Pod, status: PodStatus) {
    let old = pod.status.take().unwrap_or_default();
    let conditions =
        merged(old.conditions.as_deref().unwrap_or_default(), status.conditions.unwrap_or_default());
    pod.status = Some(PodStatus {
        phase: status.phase,
        reason: status.reason.or(old.reason),
        message: status.message.or(old.message),
        conditions: Some(conditions),
        container_statuses: status.container_statuses,
        init_container_statuses: status.init_container_statuses,
        ephemeral_container_statuses: status.ephemeral_container_statuses,
        host_ip: status.host_ip,
        host_ips: status.host_ips,
        pod_ip: status.pod_ip,
        pod_ips: status.pod_ips,
        start_time: old.start_time.clone().or(status.start_time),
        qos_class: old.qos_class.clone().or(status.qos_class),
        observed_generation: status.observed_generation,
        ..old
    });
}

/// The class of a pod: `Guaranteed` if every container has equal requests and limits of CPU and memory, `BestEffort` if
/// none has any, else `Burstable`.
pub(super) fn qos_class(spec: &PodSpec) -> &'static str {
    let (mut any, mut all_equal) = (false, true);
    for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
        let resources = container.resources.clone().unwrap_or_default();
        let (requests, limits) =
            (resources.requests.unwrap_or_default(), resources.limits.unwrap_or_default());
        for name in ["cpu", "memory"] {
            let (request, limit) = (given(&requests, name), given(&limits, name));
            any |= request.is_some() || limit.is_some();
            all_equal &= limit.is_some() && (request.is_none() || request == limit);
        }
    }
    match (any, all_equal) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}

fn given<'a>(amounts: &'a BTreeMap<String, Quantity>, name: &str) -> Option<&'a str> {
    amounts.get(name).map(|quantity| quantity.0.as_str()).filter(|amount| *amount != "0")
}
