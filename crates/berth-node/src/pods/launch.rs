//! From a container in a pod to what the runtime starts, or why it cannot.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::path::{Component, Path, PathBuf};

use berth_runtime::{
    Capabilities, ContainerSpec, Device, Image, ImageRun, Mount, PodSettings, Propagation, Security,
    find_sub_path,
};
use k8s_openapi::api::core::v1::{
    Container, EphemeralContainer, HostIP, Pod, PodIP, PodSpec, SecurityContext, VolumeMount,
};

use super::resources::Allowance;
use super::{Pods, network};
use crate::ids;
use crate::layout::Layout;
use crate::plugin::Ready;
use crate::plugins::{Objects, environment, expand};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const TERMINATION_LOG: &str = "/dev/termination-log";

/// What runs in an ephemeral container that names no command.
const SHELL: &str = "sh";

/// Where a container finds the program that runs in its image's place.
const STAND_IN: &str = "/usr/local/bin/berth";

/// A program that runs in the place of an image, for containers that leave the command to their image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StandIn {
    /// The name of the image, without registry, path and tag.
    pub image: String,
    /// The first words of its command line, behind the program's name; the container's arguments follow.
    pub words: Vec<String>,
    /// The last words of its command line, which win over the container's arguments.
    pub last_words: Vec<String>,
    /// Directories of this machine that it finds at their own paths.
    pub directories: Vec<PathBuf>,
}

/// A file or directory of this machine at a path of the container, to be read.
pub(super) fn shown(source: &Path, target: &Path) -> Mount {
    Mount {
        source: source.to_owned(),
        sub_path: None,
        target: target.to_owned(),
        read_only: true,
        recursive_read_only: false,
        restricted: false,
        propagation: Propagation::None,
    }
}

/// What runs in the place of a container's image, if the container names no command and there is such a program.
pub(super) fn stand_in<'a>(table: &'a [StandIn], container: &Container) -> Option<&'a StandIn> {
    if container.command.as_ref().is_some_and(|command| !command.is_empty()) {
        return None;
    }
    let image = container.image.as_deref()?;
    let image = image.split('@').next().unwrap_or_default();
    let name = image.rsplit('/').next().unwrap_or_default().split(':').next().unwrap_or_default();
    table.iter().find(|row| row.image == name)
}

/// An ephemeral container as one that can be started: without an image and a command it is a shell, as in the images that are used for
/// debugging.
pub(super) fn of_ephemeral(ephemeral: &EphemeralContainer, has_images: bool) -> Option<Container> {
    let mut container: Container = serde_json::from_value(serde_json::to_value(ephemeral).ok()?).ok()?;
    let words = container.command.iter().flatten().chain(container.args.iter().flatten()).count();
    if words == 0 && !has_images {
        container.command = Some(vec![SHELL.to_owned()]);
    }
    Some(container)
}

/// What the runtime starts.
pub(super) async fn container_spec(
    pods: &Pods,
    pod: &Pod,
    container: &Container,
    attempt: u32,
    volumes: &HashMap<String, Ready>,
    image: Option<Image>,
) -> Result<ContainerSpec, String> {
    let security = security(pod, container)?;
    let options = &pods.options;
    let hostname = network::identity(pod, &options.network.domain)?.hostname;
    let environment = whole_environment(pods, pod, container, &hostname).await?;
    let known =
        |name: &str| environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let stand_in = stand_in(&options.stand_ins, container);
    let (mut mounts, devices) =
        (mounts(&options.layout, pod, container, volumes, known)?, devices(container, volumes)?);
    mounts.extend(network::mounts(&options.layout, pod, container));
    let words = container.command.iter().flatten().chain(container.args.iter().flatten());
    let command = if image.is_some() {
        container.command.iter().flatten().map(|word| expand(word, known)).collect()
    } else if container.command.as_ref().is_some_and(|command| !command.is_empty()) {
        words.map(|word| expand(word, known)).collect()
    } else if let Some(stand_in) = stand_in {
        mounts.push(shown(&options.program, Path::new(STAND_IN)));
        mounts.extend(stand_in.directories.iter().map(|directory| shown(directory, directory)));
        let program = std::iter::once(STAND_IN.to_owned()).chain(stand_in.words.iter().cloned());
        let arguments = words.map(|word| expand(word, known));
        program.chain(arguments).chain(stand_in.last_words.iter().cloned()).collect()
    } else {
        // Arguments alone are for an image's own command.
        Vec::new()
    };
    let identity = identity(pod, container, image.as_ref())?;
    let image = image.map(|image| ImageRun {
        id: image.id,
        name: container.image.clone().unwrap_or_default(),
        args: container.args.iter().flatten().map(|word| expand(word, known)).collect(),
        user_name: image.user_name,
    });
    let allowance = Allowance::new(pod, container, options.supply);
    let (namespace, name, uid) = names(pod);
    let termination = container.termination_message_path.as_deref().unwrap_or(TERMINATION_LOG);
    Ok(ContainerSpec {
        log: options.layout.log(namespace, name, uid, &container.name, attempt),
        pod_uid: uid.to_owned(),
        pod_name: name.to_owned(),
        namespace: namespace.to_owned(),
        name: container.name.clone(),
        attempt,
        hostname,
        command,
        env: environment,
        working_dir: container.working_dir.as_ref().filter(|path| !path.is_empty()).map(PathBuf::from),
        user: identity.user,
        group: identity.group,
        groups: identity.groups,
        user_namespace: None,
        security,
        limits: allowance.own,
        pod_limits: allowance.pod,
        oom_score_adj: Some(allowance.oom_score_adj),
        read_only_root: identity.read_only_root,
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        mounts,
        devices,
        hidden: options.hidden.clone(),
        termination_message_path: Some(PathBuf::from(termination)),
        pod: pod_settings(pod),
        target: target(pod, container),
        image,
    })
}

/// What all containers of a pod have in common.
fn pod_settings(pod: &Pod) -> PodSettings {
    let default = PodSpec::default();
    let spec = pod.spec.as_ref().unwrap_or(&default);
    let whole = spec.security_context.clone().unwrap_or_default();
    let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
    let sysctls = whole.sysctls.into_iter().flatten();
    PodSettings {
        host_processes: spec.host_pid == Some(true),
        host_ipc: spec.host_ipc == Some(true),
        shares_processes: spec.share_process_namespace == Some(true),
        privileged: all.any(is_privileged),
        only_own_groups: whole.supplemental_groups_policy.as_deref() == Some("Strict"),
        sysctls: sysctls.map(|sysctl| (sysctl.name, sysctl.value)).collect(),
        handler: None,
        labels: pod.metadata.labels.clone().into_iter().flatten().collect(),
    }
}

/// The container whose processes an ephemeral container sees.
fn target(pod: &Pod, container: &Container) -> Option<String> {
    let mut all = pod.spec.as_ref()?.ephemeral_containers.iter().flatten();
    let target = all.find(|one| one.name == container.name)?.target_container_name.clone();
    target.filter(|target| !target.is_empty())
}

fn is_privileged(container: &Container) -> bool {
    container.security_context.as_ref().is_some_and(|security| security.privileged == Some(true))
}

/// What the processes of a container may do, or which field asks for what this node cannot do.
fn security(pod: &Pod, container: &Container) -> Result<Security, String> {
    let refuse = |why: String| Err(format!("container {}: {why}", container.name));
    let spec = pod.spec.as_ref();
    let whole = spec.and_then(|spec| spec.security_context.clone()).unwrap_or_default();
    let own = container.security_context.clone().unwrap_or_default();
    let app_armor = own.app_armor_profile.or(whole.app_armor_profile).map(|profile| profile.type_);
    if let Some(profile) = app_armor.filter(|profile| profile != "Unconfined") {
        return refuse(format!("securityContext.appArmorProfile {profile} is not supported"));
    }
    let privileged = own.privileged == Some(true);
    let seccomp = own.seccomp_profile.or(whole.seccomp_profile).map(|profile| profile.type_);
    let seccomp = match seccomp.as_deref() {
        None | Some("Unconfined") => false,
        Some("RuntimeDefault") => !privileged,
        Some(other) => {
            return refuse(format!(
                "securityContext.seccompProfile {other} is not supported; use RuntimeDefault or Unconfined"
            ));
        }
    };
    let base = if privileged { Security::privileged() } else { Security::default() };
    // As runtimes do: a privileged container has all of them, whatever it adds or drops.
    let wanted = own.capabilities.filter(|_| !privileged).unwrap_or_default();
    let (add, drop) = (wanted.add.unwrap_or_default(), wanted.drop.unwrap_or_default());
    let mut capabilities = base.capabilities;
    let every = |names: &[String]| names.iter().any(|name| name.eq_ignore_ascii_case("ALL"));
    if every(&add) {
        capabilities = Capabilities::available();
    }
    if every(&drop) {
        capabilities = Capabilities::none();
    }
    for (names, field) in [(&add, "add"), (&drop, "drop")] {
        for name in names.iter().filter(|name| !name.eq_ignore_ascii_case("ALL")) {
            let Some(one) = Capabilities::named(&name.to_ascii_uppercase()) else {
                return refuse(format!("securityContext.capabilities.{field}: {name:?} is no capability"));
            };
            capabilities = match field {
                "add" if Capabilities::available().contain(one) => capabilities.with(one),
                "add" => {
                    return refuse(format!(
                        "securityContext.capabilities.add: Berth does not have {name} on this machine"
                    ));
                }
                _ => capabilities.without(one),
            };
        }
    }
    Ok(Security {
        capabilities,
        seccomp,
        no_new_privileges: own.allow_privilege_escalation == Some(false),
        mask_kernel_files: !privileged && own.proc_mount.as_deref() != Some("Unmasked"),
        ..base
    })
}

fn names(pod: &Pod) -> (&str, &str, &str) {
    let meta = &pod.metadata;
    (
        meta.namespace.as_deref().unwrap_or_default(),
        meta.name.as_deref().unwrap_or_default(),
        meta.uid.as_deref().unwrap_or_default(),
    )
}

async fn whole_environment(
    pods: &Pods,
    pod: &Pod,
    container: &Container,
    hostname: &str,
) -> Result<Vec<(String, String)>, String> {
    let options = &pods.options;
    let objects =
        Objects::of_container(&options.cluster, pod, container).await.map_err(|failed| failed.message)?;
    let mut pod = pod.clone();
    let status = pod.status.get_or_insert_default();
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let (address, node_address) = (pods.address(uid).to_string(), options.address.to_string());
    status.pod_ip = Some(address.clone());
    status.pod_ips = Some(vec![PodIP { ip: address.clone() }]);
    status.host_ip = Some(node_address.clone());
    status.host_ips = Some(vec![HostIP { ip: node_address }]);
    let own = environment(&pod, container, &objects).map_err(|failed| failed.message)?;
    // An image has a path, and users with their homes.
    let usual =
        [("PATH", PATH), ("HOME", "/root")].into_iter().filter(|_| options.runtime.images().is_none());
    let given =
        usual.chain([("HOSTNAME", hostname)]).map(|(name, value)| (name.to_owned(), value.to_owned()));
    let links = network::service_links(&pod, &network::services_of(&pods.services, &pod));
    let links =
        links.into_iter().filter(|(name, _)| !options.environment.iter().any(|(known, _)| known == name));
    let mut all: Vec<(String, String)> = given
        .chain(options.environment.iter().cloned())
        .chain(links)
        .filter(|(name, _)| !own.iter().any(|(known, _)| known == name))
        .collect();
    all.extend(own);
    Ok(all)
}

fn mounts<'a>(
    layout: &Layout,
    pod: &Pod,
    container: &Container,
    volumes: &HashMap<String, Ready>,
    known: impl Fn(&str) -> Option<&'a str>,
) -> Result<Vec<Mount>, String> {
    let privileged = is_privileged(container);
    let (mut mounts, mut by_node_path) = (Vec::new(), Vec::new());
    for mount in container.volume_mounts.iter().flatten() {
        let ready = volumes.get(&mount.name).ok_or_else(|| not_there(&mount.name))?;
        let is_host_path = is_host_path(pod, &mount.name);
        if mount.mount_propagation.as_deref() == Some("Bidirectional") {
            check_shared(container, mount, &ready.path)?;
        }
        mounts.push(Mount {
            source: ready.path.clone(),
            sub_path: sub_path(container, mount, &known)?,
            restricted: !privileged && !is_host_path,
            target: absolute(&mount.mount_path),
            read_only: mount.read_only.unwrap_or(false) || is_read_only(pod, &mount.name),
            recursive_read_only: is_recursively_read_only(mount),
            propagation: match mount.mount_propagation.as_deref() {
                Some("Bidirectional") => Propagation::Bidirectional,
                Some("None") => Propagation::None,
                _ => Propagation::HostToContainer,
            },
        });
        // A CSI driver gets the node's paths, and has to find them by these names, too.
        if is_host_path && ready.path.starts_with(layout.root()) && ready.path.is_dir() {
            let same: Option<Mount> = mounts.last().cloned();
            by_node_path.extend(same.map(|same| Mount { target: ready.path.clone(), ..same }));
        }
    }
    // One that lies in another is there already. Mounted once more, it would show on the node, if the other is bidirectional.
    let outer: Vec<PathBuf> = by_node_path.iter().map(|mount: &Mount| mount.target.clone()).collect();
    let lies_in_another =
        |target: &Path| outer.iter().any(|outer| outer != target && target.starts_with(outer));
    mounts.extend(by_node_path.into_iter().filter(|mount| !lies_in_another(&mount.target)));
    // What is mounted below another mount comes after it.
    mounts.sort_by_key(|mount| mount.target.components().count());
    Ok(mounts)
}

/// Refuses to start a container whose mounts nobody else would see, though it asks that others do.
fn check_shared(container: &Container, mount: &VolumeMount, path: &Path) -> Result<(), String> {
    let shared = berth_host::mount::is_shared(path).map_err(|error| error.sentence())?;
    if shared {
        return Ok(());
    }
    Err(format!(
        "container {}, volume mount {}: mountPropagation is Bidirectional, but {} is not on a shared mount: run \
         `mount --make-shared /`, or of the filesystem that it is on",
        container.name,
        mount.name,
        path.display()
    ))
}

/// The path below a volume that a container mounts instead of it, with the variables of `subPathExpr` replaced.
fn sub_path<'a>(
    container: &Container,
    mount: &VolumeMount,
    known: impl Fn(&str) -> Option<&'a str>,
) -> Result<Option<PathBuf>, String> {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let (field, path) = match (given(&mount.sub_path), given(&mount.sub_path_expr)) {
        (Some(path), _) => ("subPath", path),
        (None, Some(expression)) => {
            let unknown = RefCell::new(None);
            let path = expand(&expression, |name| {
                let value = known(name);
                if value.is_none() {
                    unknown.borrow_mut().get_or_insert(name.to_owned());
                }
                value
            });
            if let Some(name) = unknown.into_inner() {
                return Err(format!(
                    "container {}, volume mount {}: subPathExpr names {name}, which is no variable of the container",
                    container.name, mount.name
                ));
            }
            ("subPathExpr", path)
        }
        (None, None) => return Ok(None),
    };
    let path = PathBuf::from(path);
    let leads_out = path.components().any(|part| !matches!(part, Component::Normal(_) | Component::CurDir));
    if leads_out {
        return Err(format!(
            "container {}, volume mount {}: {field} {:?} must be a relative path without ..",
            container.name,
            mount.name,
            path.display().to_string()
        ));
    }
    Ok(Some(path))
}

/// Finds what the mounts of a container name below their volumes. What cannot be had is told before the container is started, with
/// the kubelet's words, and without a path of the node.
pub(super) fn find_sub_paths(container: &Container, spec: &ContainerSpec) -> Result<(), String> {
    for mount in &spec.mounts {
        find_sub_path(mount).map_err(|error| {
            let of_mount = |named: &&VolumeMount| absolute(&named.mount_path) == mount.target;
            let named = container.volume_mounts.iter().flatten().find(of_mount);
            let why = if error.kind() == io::ErrorKind::CrossesDevices {
                "it leads out of the volume".to_owned()
            } else {
                error.to_string()
            };
            format!(
                "failed to prepare subPath for volumeMount {:?} of container {:?}: {why}",
                named.map_or("", |named| &named.name),
                container.name
            )
        })?;
    }
    Ok(())
}

/// Whether what is mounted below a volume is read-only in a container, too.
pub(super) fn is_recursively_read_only(mount: &VolumeMount) -> bool {
    matches!(mount.recursive_read_only.as_deref(), Some("Enabled" | "IfPossible"))
}

/// Whether a volume is a directory or file of the host, whose owner decides what programs there may do.
fn is_host_path(pod: &Pod, name: &str) -> bool {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    volumes.into_iter().flatten().any(|volume| volume.name == name && volume.host_path.is_some())
}

/// Volumes that no container may write, whatever its mount says.
pub(super) fn is_read_only(pod: &Pod, name: &str) -> bool {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_ref());
    let Some(volume) = volumes.into_iter().flatten().find(|volume| volume.name == name) else { return false };
    volume.config_map.is_some()
        || volume.secret.is_some()
        || volume.downward_api.is_some()
        || volume.projected.is_some()
        || volume.persistent_volume_claim.as_ref().is_some_and(|claim| claim.read_only == Some(true))
        || volume.csi.as_ref().is_some_and(|csi| csi.read_only == Some(true))
        || volume.flex_volume.as_ref().is_some_and(|flex| flex.read_only == Some(true))
        || volume.image.is_some()
        || volume.nfs.as_ref().is_some_and(|nfs| nfs.read_only == Some(true))
}

fn devices(container: &Container, volumes: &HashMap<String, Ready>) -> Result<Vec<Device>, String> {
    let devices = container.volume_devices.iter().flatten();
    devices
        .map(|device| {
            let ready = volumes.get(&device.name).ok_or_else(|| not_there(&device.name))?;
            Ok(Device { source: ready.path.clone(), target: absolute(&device.device_path), read_only: false })
        })
        .collect()
}

fn not_there(name: &str) -> String {
    format!("the pod has no volume {name:?}")
}

fn absolute(path: &str) -> PathBuf {
    PathBuf::from("/").join(path)
}

struct Identity {
    user: Option<u32>,
    group: Option<u32>,
    groups: Vec<u32>,
    read_only_root: bool,
}

fn identity(pod: &Pod, container: &Container, image: Option<&Image>) -> Result<Identity, String> {
    let whole = pod.spec.as_ref().and_then(|spec| spec.security_context.clone()).unwrap_or_default();
    let own: SecurityContext = container.security_context.clone().unwrap_or_default();
    let number = |value: Option<i64>| value.and_then(|value| u32::try_from(value).ok());
    let group = number(own.run_as_group.or(whole.run_as_group));
    let asked = number(own.run_as_user.or(whole.run_as_user));
    let name = image.filter(|_| asked.is_none()).and_then(|image| image.user_name.as_ref());
    let of_image = image.filter(|_| name.is_none()).map(|image| image.user.unwrap_or(0));
    // A runtime finds the user of an image itself, but takes a group only with a user.
    let user = asked.or(of_image.filter(|_| group.is_some()));
    if let Some(name) = name.filter(|_| own.run_as_non_root.or(whole.run_as_non_root) == Some(true)) {
        return Err(format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root \
             (container: {})",
            container.name
        ));
    }
    if own.run_as_non_root.or(whole.run_as_non_root) == Some(true) && asked.or(of_image).unwrap_or(0) == 0 {
        return Err(format!(
            "container has runAsNonRoot and would run as root (container: {}): set runAsUser{}",
            container.name,
            if image.is_some() { "" } else { ", as there is no image to take a user from" }
        ));
    }
    ids::check_pod(pod)?;
    let groups = whole.supplemental_groups.into_iter().flatten().chain(whole.fs_group);
    Ok(Identity {
        user,
        group,
        groups: groups.filter_map(|group| number(Some(group))).collect(),
        read_only_root: own.read_only_root_filesystem.unwrap_or(false),
    })
}
