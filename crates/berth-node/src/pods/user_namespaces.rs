//! The ids of the machine that pods with `hostUsers: false` have: a range of 65,536 for each pod, never one for two pods.
//!
//! A pod's range is in the file `userns` of its directory, in the kubelet's form, before its first container starts, and goes
//! with that directory, which is when nothing of the pod runs any more. So that all nodes of a machine, of this program or of
//! another, keep apart, each range that is given away also has a link in [`TAKEN`], named after its number, to the directory
//! of the pod. Both are written under the lock of that directory. A link without a pod that says the same is left of a crash.
//!
//! Events: `FailedCreatePodSandBox`, `FailedMount`.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use berth_host::mount::check_mappable;
use berth_host::namespace::is_restricted;
use berth_host::path::Dir;
use berth_host::user_namespace::UserNamespace;
use berth_host::{Doing as _, Error};
use berth_runtime::{ContainerSpec, IdRange};
use k8s_openapi::api::core::v1::{Container, Pod};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::layout::Layout;

/// Where the ranges are that pods of this machine have. Not kept over a restart of the machine, and neither are pods.
const TAKEN: &str = "/run/berth/user-namespaces";
/// The file in a pod's directory, as the kubelet calls it.
const RECORD: &str = "userns";
/// As many ids as the kubelet gives to a pod.
const COUNT: u32 = 1 << 16;
/// Above the ids of users, of `useradd`'s ranges and of a kubelet's pods, which begin at 65,536.
const FIRST: u32 = 1 << 30;
const RANGES: u32 = 1 << 14;

/// What the kubelet keeps of a pod's user namespace.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    uid_mappings: Vec<Mapping>,
    gid_mappings: Vec<Mapping>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

/// Why a pod cannot have a user namespace: the reason of the event, and the message.
pub(super) type Refusal = (&'static str, String);

/// Whether a pod wants a user namespace of its own.
pub(super) fn is_wanted(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.host_users == Some(false))
}

/// The ids for a container of a pod that wants a user namespace. Waits for the disk.
pub(super) fn prepare(
    layout: &Layout,
    pod: &Pod,
    container: &Container,
    spec: &ContainerSpec,
) -> Result<IdRange, Refusal> {
    let no_sandbox = |why: String| ("FailedCreatePodSandBox", format!("hostUsers: false: {why}"));
    if is_restricted() {
        let why = "Berth runs without root, and has no ids for a user namespace of the pod; start it as root";
        return Err(no_sandbox(why.to_owned()));
    }
    refuse(pod, container, spec).map_err(no_sandbox)?;
    let range =
        Ranges::of_machine().take(layout, &spec.pod_uid).map_err(|error| no_sandbox(error.sentence()))?;
    let namespace = UserNamespace::new(range).map_err(|error| {
        no_sandbox(format!("{}; see /proc/sys/user/max_user_namespaces", error.sentence()))
    })?;
    for mount in &spec.mounts {
        check_mappable(&mount.source, namespace.as_fd()).map_err(|error| {
            let name = container.volume_mounts.iter().flatten();
            let name = name.into_iter().find(|known| Path::new("/").join(&known.mount_path) == mount.target);
            let name = name.map(|known| format!("MountVolume.SetUp failed for volume {:?}: ", known.name));
            let why = match error.kind() {
                io::ErrorKind::InvalidInput => {
                    "its filesystem, or one that is mounted in it, has no idmapped mounts with this kernel, which \
                     hostUsers: false needs"
                        .to_owned()
                }
                _ => error.sentence(),
            };
            ("FailedMount", format!("{}{}: {why}", name.unwrap_or_default(), mount.source.display()))
        })?;
    }
    Ok(range)
}

/// What does not go together with a user namespace.
fn refuse(pod: &Pod, container: &Container, started: &ContainerSpec) -> Result<(), String> {
    let Some(spec) = &pod.spec else { return Ok(()) };
    let mut ids = started.user.iter().chain(&started.group).chain(&started.groups);
    if let Some(id) = ids.find(|id| **id >= COUNT) {
        let (name, last) = (&container.name, COUNT - 1);
        return Err(format!(
            "container {name}: the user or group {id} does not exist with it, only those from 0 to {last}"
        ));
    }
    let shared = [("hostNetwork", spec.host_network), ("hostPID", spec.host_pid), ("hostIPC", spec.host_ipc)];
    if let Some((field, _)) = shared.into_iter().find(|(_, is_shared)| *is_shared == Some(true)) {
        return Err(format!("{field} is not possible with it"));
    }
    let name = &container.name;
    if container.volume_devices.as_ref().is_some_and(|devices| !devices.is_empty()) {
        return Err(format!("container {name}: volumeDevices are not possible with it"));
    }
    let is_both = |propagation: &Option<String>| propagation.as_deref() == Some("Bidirectional");
    let mut mounts = container.volume_mounts.iter().flatten();
    match mounts.find(|mount| is_both(&mount.mount_propagation)) {
        Some(mount) => Err(format!(
            "container {name}, volume mount {}: mountPropagation Bidirectional is not possible with it, as what is \
             mounted in a user namespace is not seen outside",
            mount.name
        )),
        None => Ok(()),
    }
}

/// Gives back the ids of a pod of which nothing runs any more; its directory is to be removed next.
pub(super) fn release(layout: &Layout, uid: &str) -> Result<(), Error> {
    Ranges::of_machine().release(&layout.pod(uid))
}

/// The ranges of a machine.
struct Ranges {
    taken: PathBuf,
}

impl Ranges {
    fn of_machine() -> Self {
        Self { taken: TAKEN.into() }
    }

    /// The range of a pod: the one that it has, or one that nobody has.
    fn take(&self, layout: &Layout, uid: &str) -> Result<IdRange, Error> {
        let pod = layout.pod(uid);
        let _lock = self.lock()?;
        let known = recorded(&pod)?;
        if let Some(number) = known {
            match self.owner(number)? {
                Some(owner) if owner == pod => return Ok(range(number)),
                None => {
                    self.link(number, &pod)?;
                    return Ok(range(number));
                }
                // The machine was restarted since, and another pod was quicker. Nothing of this one runs.
                Some(_) => {}
            }
        }
        let number = self.free()?;
        self.link(number, &pod)?;
        let mapping = || vec![Mapping { host_id: range(number).first, container_id: 0, length: COUNT }];
        let record = Record { uid_mappings: mapping(), gid_mappings: mapping() };
        let json = serde_json::to_vec(&record).map_err(io::Error::from).doing("write", pod.join(RECORD))?;
        Dir::ensure(&pod, 0o750)?.write_atomically(RECORD, &json)?;
        Ok(range(number))
    }

    fn release(&self, pod: &Path) -> Result<(), Error> {
        let Some(number) = recorded(pod)? else { return Ok(()) };
        let _lock = self.lock()?;
        if self.owner(number)?.as_deref() == Some(pod) {
            self.unlink(number)?;
        }
        Ok(())
    }

    /// Nobody else takes or gives back a range until this is dropped.
    fn lock(&self) -> Result<File, Error> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.taken);
        made.doing("make", &self.taken)?;
        let directory = File::open(&self.taken).doing("open", &self.taken)?;
        rustix::io::retry_on_intr(|| flock(&directory, FlockOperation::LockExclusive))
            .doing("lock", &self.taken)?;
        Ok(directory)
    }

    /// The pod's directory that has a range.
    fn owner(&self, number: u32) -> Result<Option<PathBuf>, Error> {
        let link = self.taken.join(number.to_string());
        match fs::read_link(&link) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).doing("read", link),
            Ok(pod) if recorded(&pod).is_ok_and(|known| known != Some(number)) => {
                self.unlink(number)?;
                Ok(None)
            }
            Ok(pod) => Ok(Some(pod)),
        }
    }

    fn link(&self, number: u32, pod: &Path) -> Result<(), Error> {
        let link = self.taken.join(number.to_string());
        symlink(pod, &link).doing("make", link)
    }

    fn unlink(&self, number: u32) -> Result<(), Error> {
        let link = self.taken.join(number.to_string());
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).doing("remove", link),
            _ => Ok(()),
        }
    }

    /// The first range that no pod has, and no user of the machine.
    fn free(&self) -> Result<u32, Error> {
        let users = ["/etc/subuid", "/etc/subgid"].map(|file| fs::read_to_string(file).unwrap_or_default());
        let of_users: Vec<(u64, u64)> = users.iter().flat_map(|file| ranges_of_users(file)).collect();
        for number in 0..RANGES {
            let (first, end) =
                (u64::from(range(number).first), u64::from(range(number).first) + u64::from(COUNT));
            let is_users = of_users.iter().any(|(start, past)| *start < end && first < *past);
            if !is_users && self.owner(number)?.is_none() {
                return Ok(number);
            }
        }
        let why = format!("all {RANGES} ranges of ids are taken");
        Err(Error::new("find ids for a pod", io::Error::other(why)))
    }
}

fn range(number: u32) -> IdRange {
    IdRange { first: FIRST + number * COUNT, count: COUNT }
}

/// The number of the range that a pod's directory records. What is no record of ours counts as none.
fn recorded(pod: &Path) -> Result<Option<u32>, Error> {
    let path = pod.join(RECORD);
    let json = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.doing("read", &path)?,
    };
    let record = serde_json::from_slice::<Record>(&json).ok();
    let first = record.as_ref().and_then(|record| record.uid_mappings.first()).map(|mapping| mapping.host_id);
    let number = first.and_then(|first| first.checked_sub(FIRST)).map(|above| above / COUNT);
    Ok(number.filter(|number| *number < RANGES && Some(range(*number).first) == first))
}

/// The ranges that a file such as `/etc/subuid` gives to users: the first id, and the one behind the last.
fn ranges_of_users(file: &str) -> impl Iterator<Item = (u64, u64)> {
    file.lines().filter_map(|line| {
        let mut fields = line.trim().split(':').skip(1).map(str::parse::<u64>);
        let (start, count) = (fields.next()?.ok()?, fields.next()?.ok()?);
        Some((start, start.saturating_add(count)))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    struct World {
        directory: tempfile::TempDir,
        ranges: Ranges,
    }

    impl World {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let ranges = Ranges { taken: directory.path().join("taken") };
            Self { directory, ranges }
        }

        fn node(&self, name: &str) -> Layout {
            Layout::new(self.directory.path().join(name))
        }

        fn taken(&self) -> Vec<String> {
            let mut names = crate::volumes::names(&self.ranges.taken);
            names.sort();
            names
        }
    }

    #[test]
    fn pods_of_all_nodes_have_ranges_of_their_own_and_keep_them() {
        let world = World::new();
        let (one, two) = (world.node("one"), world.node("two"));
        let first = world.ranges.take(&one, "a").unwrap();
        assert_eq!(first.count, 65_536);
        let all = [first, world.ranges.take(&two, "a").unwrap(), world.ranges.take(&one, "b").unwrap()];
        for (number, range) in all.iter().enumerate() {
            assert!(all[..number].iter().all(|other| other.first.abs_diff(range.first) >= 65_536));
        }
        assert_eq!(world.ranges.take(&one, "a").unwrap(), first, "it has one already");
        let record = fs::read_to_string(one.pod("a").join("userns")).unwrap();
        let mapping = format!(r#"[{{"hostId":{},"containerId":0,"length":65536}}]"#, first.first);
        assert_eq!(record, format!(r#"{{"uidMappings":{mapping},"gidMappings":{mapping}}}"#));
    }

    #[test]
    fn a_range_is_free_again_when_its_pod_is_gone() {
        let world = World::new();
        let node = world.node("n");
        let first = world.ranges.take(&node, "a").unwrap();
        world.ranges.release(&node.pod("a")).unwrap();
        assert!(world.taken().is_empty());
        // As after a death between that and the end of the directory.
        world.ranges.release(&node.pod("a")).unwrap();
        assert_eq!(world.ranges.take(&node, "b").unwrap(), first);
        world.ranges.release(&node.pod("a")).unwrap();
        assert_eq!(world.taken().len(), 1, "what another pod has is not given back");
        assert_ne!(world.ranges.take(&node, "a").unwrap(), first, "its own is taken");
        world.ranges.release(&node.pod("there is no such pod")).unwrap();
    }

    #[test]
    fn what_a_crash_left_belongs_to_nobody() {
        let world = World::new();
        let node = world.node("n");
        // The link was made, and the record was not written.
        fs::create_dir(&world.ranges.taken).unwrap();
        let number = world.ranges.free().unwrap();
        world.ranges.link(number, &node.pod("a")).unwrap();
        assert_eq!(world.ranges.take(&node, "b").unwrap(), range(number));
        // All links are lost, as after a restart of the machine.
        fs::remove_dir_all(&world.ranges.taken).unwrap();
        assert_eq!(world.ranges.take(&node, "b").unwrap(), range(number));
        // The record cannot be read: the pod gets another range.
        fs::write(node.pod("b").join("userns"), "{").unwrap();
        assert_eq!(world.ranges.take(&node, "b").unwrap(), range(number));
        assert_eq!(world.taken(), [number.to_string()]);
    }

    #[test]
    fn ids_of_users_are_not_given_to_pods() {
        let ranges: Vec<_> = ranges_of_users("ann:100000:65536\n# no range\nbob:1:x\n7:5:10\n").collect();
        assert_eq!(ranges, [(100_000, 165_536), (5, 15)]);
    }

    #[test]
    fn what_does_not_go_together_with_a_user_namespace_is_named() {
        let check = |spec: serde_json::Value, container: serde_json::Value, groups: serde_json::Value| {
            let pod: Pod = serde_json::from_value(json!({ "spec": spec })).unwrap();
            let started = json!({
                "pod_uid": "", "pod_name": "", "namespace": "", "name": "c", "attempt": 0, "hostname": "", "command": [],
                "env": [], "working_dir": null, "user": null, "group": null, "groups": groups, "read_only_root": false,
                "stdin": false, "tty": false, "mounts": [], "devices": [], "hidden": [], "log": "/l",
                "termination_message_path": null,
            });
            let container = serde_json::from_value(container).unwrap();
            refuse(&pod, &container, &serde_json::from_value(started).unwrap())
        };
        let (whole, plain) = (json!({ "containers": [] }), json!({ "name": "c" }));
        assert_eq!(check(whole.clone(), plain.clone(), json!([65_535])), Ok(()));
        let refused = check(whole.clone(), plain.clone(), json!([0, 65_536])).unwrap_err();
        assert!(refused.contains("container c: the user or group 65536 does not exist"), "{refused}");
        for field in ["hostNetwork", "hostPID", "hostIPC"] {
            let mut spec = whole.clone();
            spec[field] = true.into();
            assert!(check(spec, plain.clone(), json!([])).unwrap_err().contains(field));
        }
        let device = json!({ "name": "c", "volumeDevices": [{ "name": "d", "devicePath": "/dev/x" }] });
        assert!(check(whole.clone(), device, json!([])).unwrap_err().contains("container c: volumeDevices"));
        let mount = json!({ "name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional" });
        let mount = json!({ "name": "c", "volumeMounts": [mount] });
        assert!(check(whole, mount, json!([])).unwrap_err().contains("volume mount v: mountPropagation"));
    }
}
