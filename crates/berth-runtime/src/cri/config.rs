//! From what a container is made of to the messages of the interface.

use std::{collections::BTreeMap, path::Path};

use super::v1;
use crate::{
    ContainerId, ContainerSpec, Limits,
    root::{MASKED, READABLE},
};

/// The labels by which other programs know the pods and containers of Kubernetes.
const POD_NAME: &str = "io.kubernetes.pod.name";
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const POD_UID: &str = "io.kubernetes.pod.uid";
const CONTAINER: &str = "io.kubernetes.container.name";
/// The label that tells the containers of one directory from all others of the runtime.
const OWNER: &str = "berth.owner";

/// The annotation that says whether a container has a terminal, which the runtime does not.
const TERMINAL: &str = "berth.terminal";

/// In which a container that has used up its processor time waits for more, in microseconds.
const PERIOD: i64 = 100_000;

/// The selector of what belongs to an owner.
pub(super) fn of_owner(owner: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(OWNER.to_owned(), owner.to_owned())])
}

/// Which container a container of the runtime is, with the namespace and the name of its pod.
pub(super) fn identify(
    labels: &BTreeMap<String, String>,
    metadata: Option<&v1::ContainerMetadata>,
) -> Option<(ContainerId, String, String)> {
    let label = |name: &str| labels.get(name).cloned();
    let attempt = metadata?.attempt;
    let id = ContainerId { pod_uid: label(POD_UID)?, name: label(CONTAINER)?, attempt };
    Some((id, label(POD_NAMESPACE)?, label(POD_NAME)?))
}

/// Whether a container has a terminal.
pub(super) fn has_terminal(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get(TERMINAL).is_some_and(|has| has == "true")
}

/// The uid of the pod that a sandbox is of.
pub(super) fn pod_of(labels: &BTreeMap<String, String>) -> Option<&String> {
    labels.get(POD_UID)
}

/// The sandbox of a pod: it has the network of the machine, and so needs no network plugin.
pub(super) fn sandbox(
    spec: &ContainerSpec,
    owner: &str,
    attempt: u32,
    cgroup_parent: &Path,
) -> v1::PodSandboxConfig {
    let directory = spec.log.parent().and_then(Path::parent).unwrap_or(Path::new(""));
    let mut labels: BTreeMap<String, String> = spec.pod.labels.iter().cloned().collect();
    labels.extend(pod_labels(spec, owner));
    v1::PodSandboxConfig {
        metadata: Some(v1::PodSandboxMetadata {
            name: spec.pod_name.clone(),
            uid: spec.pod_uid.clone(),
            namespace: spec.namespace.clone(),
            attempt,
        }),
        // A name of its own would take a network of its own.
        hostname: String::new(),
        log_directory: directory.to_string_lossy().into_owned(),
        labels,
        linux: Some(v1::LinuxPodSandboxConfig {
            cgroup_parent: cgroup_parent.to_string_lossy().into_owned(),
            security_context: Some(v1::LinuxSandboxSecurityContext {
                namespace_options: Some(namespaces(spec, None)),
                privileged: spec.pod.privileged,
                seccomp: Some(v1::SecurityProfile::default()),
                ..v1::LinuxSandboxSecurityContext::default()
            }),
            sysctls: spec.pod.sysctls.iter().cloned().collect(),
            ..v1::LinuxPodSandboxConfig::default()
        }),
        ..v1::PodSandboxConfig::default()
    }
}

/// A container of an image, with mounts that are ready. `target` is the container of the runtime whose processes it sees.
pub(super) fn container(
    spec: &ContainerSpec,
    owner: &str,
    mounts: Vec<v1::Mount>,
    target: Option<String>,
) -> std::io::Result<v1::ContainerConfig> {
    let image = spec.image.clone().unwrap_or_default();
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let mut labels: BTreeMap<String, String> = pod_labels(spec, owner).into_iter().collect();
    labels.insert(CONTAINER.to_owned(), spec.name.clone());
    let mut devices = Vec::new();
    for device in &spec.devices {
        devices.push(v1::Device {
            container_path: text(&device.target),
            host_path: text(&std::fs::canonicalize(&device.source)?),
            permissions: if device.read_only { "rm" } else { "rwm" }.to_owned(),
        });
    }
    Ok(v1::ContainerConfig {
        metadata: Some(v1::ContainerMetadata { name: spec.name.clone(), attempt: spec.attempt }),
        image: Some(v1::ImageSpec {
            image: image.id,
            user_specified_image: image.name,
            ..v1::ImageSpec::default()
        }),
        command: spec.command.clone(),
        args: image.args,
        working_dir: spec.working_dir.as_deref().map(text).unwrap_or_default(),
        envs: spec
            .env
            .iter()
            .map(|(key, value)| v1::KeyValue { key: key.clone(), value: value.clone().into_bytes() })
            .collect(),
        mounts,
        devices,
        labels,
        annotations: BTreeMap::from([(TERMINAL.to_owned(), spec.tty.to_string())]),
        log_path: format!("{}/{}", spec.name, log_name(spec)),
        stdin: spec.stdin,
        stdin_once: spec.stdin_once,
        tty: spec.tty,
        linux: Some(v1::LinuxContainerConfig {
            resources: Some(resources(&spec.limits, spec.oom_score_adj)),
            security_context: Some(security(spec, image.user_name, target)),
        }),
    })
}

fn log_name(spec: &ContainerSpec) -> String {
    spec.log.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn pod_labels(spec: &ContainerSpec, owner: &str) -> [(String, String); 4] {
    [(POD_NAME, &*spec.pod_name), (POD_NAMESPACE, &spec.namespace), (POD_UID, &spec.pod_uid), (OWNER, owner)]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
}

fn namespaces(spec: &ContainerSpec, target: Option<String>) -> v1::NamespaceOption {
    let of_node = |is: bool, otherwise| if is { v1::NamespaceMode::Node } else { otherwise };
    let own = if spec.pod.shares_processes { v1::NamespaceMode::Pod } else { v1::NamespaceMode::Container };
    let processes = match target {
        Some(_) => v1::NamespaceMode::Target,
        None => of_node(spec.pod.host_processes, own),
    };
    v1::NamespaceOption {
        network: v1::NamespaceMode::Node.into(),
        pid: processes.into(),
        ipc: of_node(spec.pod.host_ipc, v1::NamespaceMode::Pod).into(),
        target_id: target.unwrap_or_default(),
    }
}

fn resources(limits: &Limits, oom_score_adj: Option<i32>) -> v1::LinuxContainerResources {
    let number = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
    v1::LinuxContainerResources {
        cpu_period: if limits.cpu_millis.is_some() { PERIOD } else { 0 },
        cpu_quota: limits.cpu_millis.map(|millis| number(millis) * PERIOD / 1000).unwrap_or_default(),
        cpu_shares: limits.cpu_shares.map(number).unwrap_or_default(),
        memory_limit_in_bytes: limits.memory.map(number).unwrap_or_default(),
        oom_score_adj: oom_score_adj.map(i64::from).unwrap_or_default(),
        ..v1::LinuxContainerResources::default()
    }
}

fn security(
    spec: &ContainerSpec,
    user_name: Option<String>,
    target: Option<String>,
) -> v1::LinuxContainerSecurityContext {
    let number = |value: u32| v1::Int64Value { value: value.into() };
    let own = &spec.security;
    let profile = if own.seccomp {
        v1::security_profile::ProfileType::RuntimeDefault
    } else {
        v1::security_profile::ProfileType::Unconfined
    };
    let paths = |paths: &[&str]| -> Vec<String> {
        let wanted = own.mask_kernel_files && !own.host_devices;
        paths.iter().filter(|_| wanted).map(|path| (*path).to_owned()).collect()
    };
    v1::LinuxContainerSecurityContext {
        // Exactly those, whatever the runtime would add.
        capabilities: Some(v1::Capability {
            add_capabilities: own.capabilities.into(),
            drop_capabilities: vec!["ALL".to_owned()],
            ..v1::Capability::default()
        })
        .filter(|_| !own.host_devices),
        privileged: own.host_devices,
        namespace_options: Some(namespaces(spec, target)),
        run_as_user: spec.user.map(number),
        run_as_group: spec.group.map(number),
        run_as_username: user_name.filter(|_| spec.user.is_none()).unwrap_or_default(),
        readonly_rootfs: spec.read_only_root,
        supplemental_groups: spec.groups.iter().copied().map(i64::from).collect(),
        supplemental_groups_policy: if spec.pod.only_own_groups {
            v1::SupplementalGroupsPolicy::Strict
        } else {
            v1::SupplementalGroupsPolicy::Merge
        }
        .into(),
        no_new_privs: own.no_new_privileges,
        masked_paths: paths(&MASKED),
        readonly_paths: paths(&READABLE),
        seccomp: Some(v1::SecurityProfile { profile_type: profile.into(), ..v1::SecurityProfile::default() }),
    }
}
